"""Cross-fitted HG-MS: folds, scores, the lower step and α's hypergradient, each against a loop
or a formula of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, finite_differences, normal
from support.row_weights import table, weighing
from torch import Tensor

from hgms.hypergradients import Fixed, Implicit
from hgms.methods.crossfit import CrossFit, FlatBranches, SharpnessAware, fold_problem, weights
from hgms.methods.crossfit.folds import Folds
from hgms.methods.crossfit.lower import part
from hgms.outer import Sgd
from hgms.rows import trained_on
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms_core import Branch, CallableSolver, Data, Key, Problem, Tree

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
SIZE = 24
BELOW = table(SIZE, 10, wrong=8)


def losses(x: Tree, batch: Tree) -> Tensor:
    return torch.nn.functional.softplus(-batch["y"] * (batch["a"] @ x["w"]))


def decay(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    return 0.05 * x["w"].square().sum()


def problem() -> Problem:
    upper = {"differentiate": table(9, 20), "select": table(4, 30), "stop": table(30, 40)}
    return weighing(
        losses,
        decay,
        BELOW,
        {role: Data.of(rows) for role, rows in upper.items()},
        x0={"w": 0.1 * normal(3, seed=1)},
        fresh=lambda key: {"w": 0.1 * normal(3, seed=key.derive() % 1000)},
    )


def method(**more: Any) -> CrossFit:
    parts = {
        "hypergradient": Implicit(solver=CG(ridge=1e-3)),
        "outer": Sgd(lr=0.5),
        "selector": BestOfN(),
        "optimizer": SharpnessAware(lr=0.05),
    }
    return CrossFit(**{**parts, "count": 3, "steps": 4, "warmup": 10, "batch_size": None, **more})


def test_folds_part_the_rows_and_every_branch_keeps_equally_many() -> None:
    folds = Folds.draw(problem(), 3, Key(4))
    assert torch.bincount(folds.lower).tolist() == [8, 8, 8]
    assert (folds.held.shape, folds.kept.shape) == ((3, 4), (3, 9))
    assert len(folds.held.unique()) == 12
    both = torch.cat([folds.held, folds.kept], dim=1).sort(dim=1).values
    assert both.tolist() == [list(range(13))] * 3


def test_the_lower_step_is_adam_at_a_point_up_the_slope() -> None:
    p = problem()
    optimizer = SharpnessAware(lr=0.05, sharpness=0.3)
    generator = FlatBranches(count=2, steps=5, optimizer=optimizer, batch_size=None)
    candidates = generator.propose(p, p.theta0, generator.init(p, Key(0)), Key(0))
    slope = torch.func.grad(lambda w: p.g(p.theta0, {"w": w}, p.lower_data.batch(None)))
    x, average = p.x0["w"].clone(), p.x0["w"]
    adam = torch.optim.Adam([x], lr=0.05, betas=(0.9, 0.99))
    for count in range(1, 6):
        here = slope(x)
        x.grad = slope(x + 0.3 * x.norm() * here / here.norm())
        adam.step()
        average = average.lerp(x, 1 - min(0.98, count / (count + 9)))
    assert_same(candidates.at(1)["w"], average, **CLOSE)
    assert candidates.cost.lower_gradients == 20


def solved(p: Problem, alpha: Tree) -> Tree:
    """argmin_x g_j(α, ·) by Newton's method."""
    w = p.x0["w"]
    batch = p.lower_data.batch(None)

    def value(w: Tensor) -> Tensor:
        return p.g(alpha, {"w": w}, batch)

    for _ in range(8):
        w = w - torch.linalg.solve(torch.func.hessian(value)(w), torch.func.grad(value)(w))
    return {"w": w}


def test_a_branch_has_the_objective_of_its_steps_and_the_hypergradient_of_differences() -> None:
    """Rows drawn by weight and scaled by W/n have the gradient of the weighted mean: here by all
    rows, each by its chance.
    """
    p = problem()
    folds = Folds.draw(p, 3, Key(4))
    alpha = weights.begin(1.5, 1.0, p.x0["w"])
    scores = weights.score(losses({"w": normal(3, seed=5)}, BELOW))
    weight = weights.logits(alpha, scores).sigmoid() * (folds.lower != 1)
    own = fold_problem.of_branch(p, folds, alpha, p.x0, scores, 1)
    fitted = fold_problem.losses_of(p, folds)
    scales = (float(weight.sum()) / SIZE, float(alpha[weights.TILT].exp()) * 9 / SIZE)
    above = trained_on(p).rows(folds.kept[1])
    by_row = torch.stack(
        [
            fitted.objective(scales, p.theta0, p.x0, p.lower_data.rows(torch.tensor([i])), above)
            for i in range(SIZE)
        ]
    )
    mean = (by_row * weight).sum() / weight.sum()
    assert_same(own.g(alpha, p.x0, own.lower_data.batch(None)), mean, **CLOSE)

    exact = CallableSolver(
        lambda matvec, b: torch.linalg.solve(
            torch.stack([matvec(e) for e in torch.eye(3, dtype=F64)]), b
        )
    )
    found, _ = Implicit(solver=exact).estimate(
        own, alpha, *Branch(x=solved(own, alpha)).as_candidates(), Key(0), {"v": None}
    )
    held = own.upper_data["differentiate"].batch(None)
    wanted = finite_differences(lambda alpha: own.f(alpha, solved(own, alpha), held), alpha)
    assert_same(found.value, wanted, atol=1e-8)
    assert all(abs(float(leaf)) > 1e-4 for leaf in wanted.values())


def test_one_outer_step_is_the_mean_over_the_branches_and_a_fixed_alpha_stays() -> None:
    p, m = problem(), method()
    state = m.init(p, 0)
    following, record = m.step(p, state, 0.0)
    folds = Folds.draw(p, 3, Key(0).fold("folds"))
    averages = [{"w": w} for w in part("a", following["branches"])["w"]]
    scores = torch.stack([weights.score(losses(x, BELOW)) for x in averages])
    scores = scores[folds.lower, torch.arange(SIZE)]
    values = []
    for number, x in enumerate(averages):
        own = fold_problem.of_branch(p, folds, state["alpha"], x, scores, number)
        key = Key(0).fold("step", 0).fold("hypergradient", number)
        found = m.hypergradient.estimate(
            own, state["alpha"], *Branch(x=own.x0).as_candidates(), key, {"v": None}
        )
        values.append(found[0].value)
    for name, leaf in state["alpha"].items():
        h = torch.stack([value[name] for value in values]).mean()
        assert_same(following["alpha"][name], leaf - 0.5 * h, **CLOSE)
    assert_same(following["theta"]["logits"], weights.logits(following["alpha"], scores), **CLOSE)
    assert record["oracle_calls"] == sum(following["cost"].values()) - following["cost"]["rows"]
    fixed = method(hypergradient=Fixed())
    state, _ = fixed.step(p, fixed.init(p, 0), 0.0)
    assert_same(state["alpha"], weights.begin(2.0, 3.0, p.x0["w"]))


def test_a_branch_trains_on_the_other_folds() -> None:
    drawn: list[Tensor] = []

    def rows(index: Tensor) -> Tree:
        drawn.append(index.clone())
        return {name: leaf[index] for name, leaf in BELOW.items()}

    p, m = evolve(problem(), lower_data=Data(SIZE, rows=rows)), method(warmup=5, batch_size=6)
    state = m.init(p, 0)
    folds = Folds.draw(p, 3, Key(0).fold("folds"))
    drawn.clear()
    m.step(p, state)
    for number in range(3):
        seen = torch.cat(drawn[5 * number : 5 * (number + 1)])
        assert len(seen) == 30
        assert not (folds.lower[seen] == number).any()


def test_the_answer_is_the_best_branch_of_all_steps_on_rows_that_none_saw() -> None:
    p, m = problem(), method(optimizer=SharpnessAware(lr=0.3))
    state = m.init(p, 0)
    best = []
    stop = p.upper_data["stop"].batch(None)
    for step in range(3):
        state, _ = m.step(p, state, step / 10)
        averages = part("a", state["branches"])["w"]
        best += [float(losses({"w": w}, stop).mean()) for w in averages]
        found = float(losses(m.result(state)[1], stop).mean())
        assert found == pytest.approx(min(best), rel=1e-12)
