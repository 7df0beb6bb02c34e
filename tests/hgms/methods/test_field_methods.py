"""The field's methods that are compositions: each step by hand or from the dense equations, and
where each ends.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.field_problems import CPU, run, tuned_penalty
from support.helpers import F64, assert_same, counted, network_problem

from hgms.hypergradients import Implicit
from hgms.runs import RunConfig
from hgms.solvers import Neumann
from hgms.tasks.quadratic import Quadratic
from hgms_core import Branch, Key, Outcome, Problem, Ravel

pytestmark = pytest.mark.usefixtures("one_registry")
PROBLEM = network_problem()


def method(name: str, **parts: Any) -> Any:
    """The composition of that name, with some of its numbers changed."""
    table = {"task": "quadratic", "method": {"name": name, **parts}, "budget": "1 steps"}
    return RunConfig.from_dict(table).method


# g = x² − θx + ½θ² (Hessian 2, mixed derivative −1, x* = θ/2) and f = ½(x − 3)² + θ, so F' = ½(x* −
# 3) + 1.
SCALAR = Problem(
    theta0={"t": torch.full((1,), 2.0, dtype=F64)},
    x0={"x": torch.full((1,), 5.0, dtype=F64)},
    g=lambda t, x, _: (x["x"].square() - t["t"] * x["x"] + 0.5 * t["t"].square()).sum(),
    f=lambda t, x, _: (0.5 * (x["x"] - 3).square() + t["t"]).sum(),
)
SGD = {"name": "sgd", "lr": 0.1}
LOWER = {"steps": 2, "optimizer": {"lr": 0.25}}  # x − ¼(2x − θ) = x/2 + θ/4
FIXED_POINT = {"solver": {"name": "fixed-point", "lr": 0.25, "max_steps": 2}}
NEUMANN = {"solver": {"name": "neumann", "lr": 0.25, "steps": 3}}
DARTS = {"generator": {"optimizer": {"lr": 0.25, "momentum": 0.0}}}


@pytest.mark.parametrize(
    ("name", "parts", "x", "h"),
    [
        # x: 5 → 3 → 2 at θ = 2. b = x − 3 = −1; v ← v − ¼(2v − b): −¼, −⅜. h = 1 − (−1)·(−⅜).
        ("fixed-point", {"generator": LOWER, "hypergradient": FIXED_POINT}, 2.0, 1 - 3 / 8),
        ("amigo", {"generator": LOWER, "hypergradient": FIXED_POINT}, 2.0, 1 - 3 / 8),
        # Three terms at x = 2: v = ¼(b + ½b + ¼b) with b = −1.
        ("stocbio", {"generator": LOWER, "hypergradient": NEUMANN}, 2.0, 1 - 7 / 16),
        # w: 5 → 3; w' = 3 − ¼·4 = 2, ∇f(w') = −1; h = ∂_θf − ξ·(−1)·(−1) = 1 − ¼, exactly, as g is
        # quadratic.
        ("darts", {**DARTS, "hypergradient": {"lr": 0.25, "derivative": "difference"}}, 3.0, 0.75),
    ],
)
def test_a_step_by_hand(name: str, parts: Any, x: float, h: float) -> None:
    made = method(name, outer=SGD, **parts)
    state, record = made.step(SCALAR, made.init(SCALAR, 0))
    assert float(state["x"]["x"]) == x
    theta = 2 - 0.1 * h
    assert float(state["theta"]["t"]) == pytest.approx(theta, rel=1e-9)
    if name == "fixed-point":
        assert record["outcome"] == Outcome.ITERATION_LIMIT.code
    if name == "amigo":  # goes on from its last linear solution
        state, _ = made.step(SCALAR, state)
        x = (2.0 / 2 + theta / 4) / 2 + theta / 4
        v = -3 / 8
        for _ in range(2):
            v = v - 0.25 * (2 * v - (x - 3))
        assert float(state["x"]["x"]) == pytest.approx(x)
        assert float(state["theta"]["t"]) == pytest.approx(theta - 0.1 * (1 + v))


@pytest.mark.parametrize("strategy", ["vjp", "jvp", "difference"])
@pytest.mark.parametrize("batches", ["one", "fresh"])
def test_an_implicit_estimate_is_its_equation_and_costs_what_was_called(
    strategy: Any, batches: Any
) -> None:
    problem, seen = counted(PROBLEM)
    estimator = Implicit(
        solver=Neumann(lr=0.4, steps=4), batch_size=6, batches=batches, strategy=strategy
    )
    found, _ = estimator.estimate(
        problem,
        PROBLEM.theta0,
        *Branch(x=PROBLEM.x0).as_candidates(),
        Key(5),
        estimator.init(problem),
    )
    cost = found.cost
    fresh = batches == "fresh"
    passes = 2 if strategy == "difference" else 1
    # a product with vjp goes back through the graph of a gradient: no evaluation
    again = 0 if strategy == "vjp" else 4
    lower = 4 if fresh and strategy == "vjp" else 1
    counts = (cost.lower_gradients, cost.upper_gradients, cost.products, cost.cross_products)
    assert counts == (lower, 1, 4, 1)
    assert (seen["g"], seen["f"]) == (lower + passes * again + passes, 1)
    assert cost.rows == seen["f_rows"] + seen["g_rows"] + 6 * (4 - again)

    # Four terms are four steps of v ← v + 0.4(b − H v) from 0; the first product is with H of batch
    # 1 after the first step, and the last product only measures the residual.
    specs = [Ravel.of(tree) for tree in (PROBLEM.theta0, PROBLEM.x0)]
    t, x = (
        spec.ravel(tree) for spec, tree in zip(specs, (PROBLEM.theta0, PROBLEM.x0), strict=True)
    )

    def flat(loss: Any, batch: Any) -> Any:
        return lambda t, x: loss(specs[0].unravel(t), specs[1].unravel(x), batch)

    keys = [Key(5).fold("lower", count) if fresh else Key(5).fold("lower") for count in range(1, 6)]
    drawn = [PROBLEM.lower_data.batch(PROBLEM.lower_data.draw(key, 6, 1)[0]) for key in keys]
    losses = [flat(PROBLEM.g, batch) for batch in drawn]
    hessians = [torch.func.hessian(loss, 1)(t, x) for loss in losses[:4]]
    mixed = torch.func.jacrev(torch.func.grad(losses[4], 1), 0)(t, x)
    upper = flat(PROBLEM.f, PROBLEM.upper_data["differentiate"].whole)
    direct, slope = torch.func.grad(upper, (0, 1))(t, x)
    v = 0.4 * slope
    for hessian in hessians[:3]:
        v = v + 0.4 * (slope - hessian @ v)
    expected = specs[0].unravel(direct - mixed.T @ v)
    tolerance = 1e-6 if strategy == "difference" else 1e-11
    assert_same(found.value, expected, rtol=tolerance, atol=tolerance)
    residual = float((slope - hessians[3] @ v).norm() / slope.norm())
    assert float(found.solution.residual) == pytest.approx(residual, rel=1e-5)


@pytest.mark.extended
def test_amigo_reaches_the_closed_form_optimum_and_darts_only_in_one_dimension() -> None:
    problem, exact, best = tuned_penalty()
    adam = {"lr": 0.1, "schedule": {"kind": "cosine"}}
    amigo = {
        "generator": {"steps": 8, "optimizer": {"lr": 0.8}},
        "hypergradient": {"solver": {"lr": 0.8}},
    }
    amigo["hypergradient"]["solver"]["max_steps"] = 4
    theta, x, _ = run(method("amigo", outer=adam, **amigo), problem, 50)
    assert float(theta["log_penalty"]) == pytest.approx(best, abs=0.01)
    assert_same(x, exact.solution(theta), rtol=1e-2, atol=1e-2)

    darts = method(
        "darts",
        generator={"optimizer": {"lr": 0.5, "momentum": 0.0}},
        hypergradient={"lr": 0.5},
        outer={"name": "adam", "betas": [0.9, 0.999], **adam},
    )
    theta, x, _ = run(darts, problem, 150)
    assert abs(float(theta["log_penalty"]) - best) > 0.02
    # the lower level is solved; it is θ that is off
    assert_same(x, exact.solution(theta), rtol=0.05, atol=0.05)
    task = Quadratic(
        rows=12, validation_rows=40, features=1, condition=1.0, noise=2.0, penalty="shared"
    )
    theta, _, _ = run(darts, task.problem(1, CPU, F64), 150)
    exact = task.closed_form(1, CPU, F64)
    assert float(exact.hypergradient(theta)["log_penalty"].abs()) < 2e-3
