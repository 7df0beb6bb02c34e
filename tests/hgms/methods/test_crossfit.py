"""Cross-fitted HG-MS: folds, scores, the lower step and α's hypergradient, each against a loop
or a formula of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, normal, rejects
from torch import Tensor

from hgms.compiled import Programs
from hgms.hypergradients import Fixed, Implicit
from hgms.methods.crossfit import CrossFit, FlatBranches, fold_problem, weights
from hgms.methods.crossfit.folds import Folds
from hgms.methods.crossfit.lower import advanced, branch, numbers, part
from hgms.outer import Sgd
from hgms.rows import trained_on
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms_core import Branch, CallableSolver, Candidates, Data, Key, Problem, Rows, Tree

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
SIZE = 24


def losses(x: Tree, batch: Tree) -> Tensor:
    return torch.nn.functional.softplus(-batch["y"] * (batch["a"] @ x["w"]))


def decay(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    return 0.05 * x["w"].square().sum()


def upper(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    return losses(x, batch).mean()


def lower(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    return (theta["logits"][batch["index"]].sigmoid() * losses(x, batch)).mean() + decay(
        theta, x, batch
    )


def table(rows: int, seed: int, wrong: int = 0) -> Tree:
    a = normal(rows, 3, seed=seed)
    y = torch.sign(a[:, 0] + 0.3 * a[:, 1])
    return {"a": a, "y": torch.where(torch.arange(rows) < wrong, -y, y)}


def problem() -> Problem:
    return Problem(
        theta0={"logits": torch.zeros(SIZE, dtype=F64)},
        x0={"w": 0.1 * normal(3, seed=1)},
        g=lower,
        f=upper,
        lower_data=table(SIZE, 10, wrong=8),
        upper_data={
            "differentiate": Data.of(table(9, 20)),
            "select": Data.of(table(4, 30)),
            "stop": Data.of(table(30, 40)),
        },
        fresh=lambda key: {"w": 0.1 * normal(3, seed=key.derive() % 1000)},
        rows=Rows(losses=losses, regulariser=decay),
    )


def method(**more: Any) -> CrossFit:
    parts = {
        "hypergradient": Implicit(solver=CG(ridge=1e-3)),
        "outer": Sgd(lr=0.5),
        "selector": BestOfN(),
    }
    return CrossFit(
        **{**parts, "count": 3, "steps": 4, "warmup": 10, "lr": 0.05, "batch_size": None, **more}
    )


def test_folds_part_the_rows_and_every_branch_keeps_equally_many() -> None:
    folds = Folds.drawn(problem(), 3, Key(4))
    assert torch.bincount(folds.lower).tolist() == [8, 8, 8]
    assert folds.held.shape == (3, 4)
    assert folds.kept.shape == (3, 9)
    assert len(set(folds.held.flatten().tolist())) == 12
    for held, kept in zip(folds.held.tolist(), folds.kept.tolist(), strict=True):
        assert sorted(held + kept) == list(range(13))


def test_a_score_is_the_log_odds_of_the_label() -> None:
    p = torch.tensor([0.2, 0.5, 0.9], dtype=F64)
    assert_same(weights.score(-p.log()), (p / (1 - p)).log(), **CLOSE)
    assert torch.isfinite(weights.score(torch.tensor([0.0, 50.0]))).all()


def test_rows_are_drawn_in_proportion_to_their_weights() -> None:
    weight = torch.tensor([0.0, 3.0, 1.0, 0.0])
    counts = torch.bincount(fold_problem.drawn(weight, 40_000, Key(0).generator()), minlength=4)
    assert counts[[0, 3]].tolist() == [0, 0]
    assert abs(counts[1] / 40_000 - 0.75) < 0.01


def test_the_lower_step_is_adam_at_a_point_up_the_slope() -> None:
    p = problem()
    rates = (0.05, 0.3, 0.98)
    below = p.lower_data.batch(None)
    above = p.upper_data["differentiate"].batch(None)

    def objective(scales: Any, theta: Tree, x: Tree, below: Tree, above: Tree) -> Tensor:
        return (
            scales[0] * losses(x, below).mean()
            + decay(theta, x, below)
            + scales[1] * upper(theta, x, above)
        )

    tree = branch(p.x0)
    x = p.x0["w"].clone().requires_grad_()
    adam = torch.optim.Adam([x], lr=rates[0], betas=(0.9, 0.99))
    average = p.x0["w"].clone()
    for count in range(1, 6):
        tree, _ = advanced(
            objective,
            numbers(rates[0], count, *rates[1:], (0.7, 0.2)),
            tree,
            p.theta0,
            below,
            above,
        )

        def slope(at: Tensor) -> Tensor:
            return torch.autograd.grad(objective((0.7, 0.2), {}, {"w": at}, below, above), at)[0]

        here = slope(x)
        x.grad = slope((x + rates[1] * x.norm() * here / here.norm()).detach().requires_grad_())
        adam.step()
        share = min(rates[2], count / (count + 9))
        average = share * average + (1 - share) * x.detach()
    assert_same(part("x", tree)["w"], x.detach(), **CLOSE)
    assert_same(part("a", tree)["w"], average, **CLOSE)


def test_the_objective_of_a_step_is_that_of_the_branch_on_average() -> None:
    """Rows drawn by weight and scaled by W/n have the gradient of the weighted mean: here by all
    rows, each by its chance.
    """
    p = problem()
    folds = Folds.drawn(p, 3, Key(4))
    alpha = weights.begin(2.0, 1.0, p.x0["w"])
    scores = weights.score(losses(p.x0, p.lower_data.batch(None)))
    weight = weights.logits(alpha, scores).sigmoid() * (folds.lower != 1)
    own = fold_problem.of_branch(p, folds, alpha, p.x0, scores, 1)
    fitted = fold_problem.losses_of(p, folds)
    above = trained_on(p).rows(folds.kept[1])
    by_row = [
        fitted.objective(
            (float(weight.sum()) / SIZE, 9 / SIZE),
            p.theta0,
            p.x0,
            p.lower_data.rows(torch.tensor([i])),
            above,
        )
        for i in range(SIZE)
    ]
    expected = (torch.stack(by_row) * weight).sum() / weight.sum()
    assert_same(own.g(alpha, p.x0, own.lower_data.batch(None)), expected, **CLOSE)


def solved(p: Problem, alpha: Tree) -> Tree:
    """argmin_x g_j(α, ·) by Newton's method."""
    w = p.x0["w"].clone()
    batch = p.lower_data.batch(None)

    def value(w: Tensor) -> Tensor:
        return p.g(alpha, {"w": w}, batch)

    for _ in range(10):
        w = w - torch.linalg.solve(torch.func.hessian(value)(w), torch.func.grad(value)(w))
    return {"w": w}


def test_the_hypergradient_of_a_branch_against_finite_differences_of_its_solution() -> None:
    p = problem()
    folds = Folds.drawn(p, 3, Key(4))
    alpha = weights.begin(1.5, 1.0, p.x0["w"])
    scores = weights.score(losses({"w": normal(3, seed=5)}, p.lower_data.batch(None)))
    own = fold_problem.of_branch(p, folds, alpha, p.x0, scores, 0)
    exact = CallableSolver(
        lambda matvec, b: torch.linalg.solve(
            torch.stack([matvec(e) for e in torch.eye(3, dtype=F64)]), b
        )
    )
    estimate, _ = Implicit(solver=exact).estimate(
        own, alpha, Branch(x=solved(own, alpha)), Key(0), {"v": None}
    )

    def value(alpha: Tree) -> float:
        return float(own.f(alpha, solved(own, alpha), own.upper_data["differentiate"].batch(None)))

    for name, leaf in alpha.items():
        above = value({**alpha, name: leaf + 1e-5})
        below = value({**alpha, name: leaf - 1e-5})
        assert abs((above - below) / 2e-5 - float(estimate.value[name])) < 1e-8, name
        assert abs(float(estimate.value[name])) > 1e-4, name


def test_one_outer_step_is_the_mean_over_the_branches() -> None:
    p = problem()
    m = method()
    state = m.init(p, 0)
    following, record = m.step(p, state, 0.0)
    folds = Folds.drawn(p, 3, Key(0).fold("folds"))
    averages = part("a", following["branches"])
    scores = torch.empty(SIZE, dtype=F64)
    for number in range(3):
        seen = {"w": averages["w"][number]}
        all_scores = weights.score(losses(seen, p.lower_data.batch(None)))
        scores[folds.lower == number] = all_scores[folds.lower == number]
    values = []
    for number in range(3):
        own = fold_problem.of_branch(
            p, folds, state["alpha"], {"w": averages["w"][number]}, scores, number
        )
        key = Key(0).fold("step", 0).fold("hypergradient", number)
        values.append(
            m.hypergradient.estimate(own, state["alpha"], Branch(x=own.x0), key, {"v": None})[
                0
            ].value
        )
    for name, leaf in state["alpha"].items():
        h = torch.stack([value[name] for value in values]).mean()
        assert_same(following["alpha"][name], leaf - 0.5 * h, **CLOSE)
    assert_same(following["theta"]["logits"], weights.logits(following["alpha"], scores), **CLOSE)
    assert record["oracle_calls"] == sum(following["cost"].values()) - following["cost"]["rows"]


def test_at_the_end_the_weights_stay_and_branches_see_all_rows() -> None:
    p = problem()
    m = method(finish=0.5, averaging=0.0)
    state, _ = m.step(p, m.init(p, 0), 0.0)
    following, _ = m.step(p, state, 0.75)
    for name in ("alpha", "theta"):
        assert_same(following[name], state[name])
    below = p.lower_data.batch(None)
    above = trained_on(p)
    weight = state["theta"]["logits"].sigmoid()
    key = Key(0).fold("step", 1).fold("branch", 2)
    tree = {name: leaf[2] for name, leaf in state["branches"].items()}
    tilt = float(state["alpha"][weights.TILT].exp())
    rows = fold_problem.drawn(weight, 4 * SIZE, key.fold("lower").generator()).reshape(4, SIZE)
    fitted = fold_problem.losses_of(p, Folds.drawn(p, 3, Key(0).fold("folds")))
    for step in range(4):
        setting = numbers(
            0.05 * 0.5, 11 + step, m.sharpness, 0.0, (float(weight.sum()) / SIZE, 13 * tilt / SIZE)
        )
        batch = {name: leaf[rows[step]] for name, leaf in below.items()}
        tree, _ = advanced(
            fitted.objective, setting, tree, p.theta0, batch, above.rows(torch.arange(13))
        )
    assert_same(following["branches"]["x.w"][2], tree["x.w"], **CLOSE)


def test_the_answer_is_the_best_branch_of_all_steps_on_rows_that_none_saw() -> None:
    p = problem()
    m = method(lr=0.3)
    state = m.init(p, 0)
    best = []
    stop = p.upper_data["stop"].batch(None)
    for step in range(4):
        state, _ = m.step(p, state, step / 10)
        averages = part("a", state["branches"])
        best += [float(upper({}, {"w": w}, stop)) for w in averages["w"]]
        assert float(upper({}, m.result(state)[1], stop)) == pytest.approx(min(best), rel=1e-12)


def test_a_fixed_alpha_stays() -> None:
    p = problem()
    m = method(hypergradient=Fixed())
    state, _ = m.step(p, m.init(p, 0), 0.0)
    assert_same(state["alpha"], weights.begin(2.0, 3.0, p.x0["w"]))


@pytest.mark.parametrize(
    "compiler",
    [
        pytest.param("traced", marks=pytest.mark.extended),
        pytest.param("compiled", marks=pytest.mark.nightly),
    ],
)
def test_compiled_steps_are_the_same(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler == "traced":  # all but the compiler, which takes most of a minute
        monkeypatch.setattr(
            "hgms.compiled.programs._inductor", lambda graph, leaves: lambda inputs: graph(*inputs)
        )
    p = problem()
    m = method(batch_size=8, upper_batch_size=4)
    compiled = evolve(p, compiler=Programs())
    written = m.init(p, 0)
    quick = m.init(compiled, 0)
    for step in range(2):
        written = m.step(p, written, step / 2)[0]
        quick = m.step(compiled, quick, step / 2)[0]
    assert compiled.compiler.outcomes["crossfit"] == "compiled"
    assert_same(quick["branches"], written["branches"], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            {"upper_data": {"differentiate": table(9, 20), "select": table(4, 30)}},
            ("no-rows-for-role", "method"),
        ),
        (
            {"upper_data": {role: table(5, 20) for role in ("differentiate", "select", "stop")}},
            None,
        ),
        ({"upper_data": table(5, 20)}, ("too-few-rows", "method", "count")),
        ({"rows": None}, ("not-supported", "method")),
    ],
)
def test_too_few_rows_are_refused(change: Any, error: tuple[str, ...] | None) -> None:
    p = evolve(problem(), **change)
    if error is None:
        assert method().init(p, 0)["step"] == 0
        return
    with rejects(*error):
        method().init(p, 0)


def test_flat_branches_take_the_same_step_in_a_pipeline() -> None:
    p = problem()
    generator = FlatBranches(count=2, steps=3, lr=0.05, batch_size=None, sharpness=0.2)
    candidates = generator.propose(p, p.theta0, generator.init(p, Key(0)), Key(0))
    tree = branch(p.x0)
    for count in range(1, 4):
        setting = numbers(0.05, count, 0.2, 0.98, (1.0, 0.0))
        tree, _ = advanced(
            lambda scales, theta, x, below, above: lower(theta, x, below),
            setting,
            tree,
            p.theta0,
            p.lower_data.batch(None),
            {},
        )
    assert_same(candidates.at(1)["w"], tree["a.w"], **CLOSE)
    assert isinstance(candidates, Candidates)
    assert candidates.cost.lower_gradients == 12
