"""The field's methods that are compositions: each step from the dense equations, and where each
ends.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.field_problems import CPU, run, tuned_penalty
from support.helpers import F64, assert_same, counted, network_problem
from torch import Tensor

from hgms.hypergradients import Implicit
from hgms.runs import RunConfig
from hgms.solvers import Neumann
from hgms.tasks.quadratic import Quadratic
from hgms_core import Key, Pipeline, Problem, Tree
from hgms_core.trees import Ravel

PROBLEM = network_problem()


def method(name: str, **parts: Any) -> Pipeline:
    """The composition of that name, with some of its numbers changed."""
    table = {"task": "quadratic", "method": {"name": name, **parts}, "budget": "1 steps"}
    found = RunConfig.from_dict(table).method
    assert isinstance(found, Pipeline)
    return found


def scalar() -> Problem:
    """g = x² − θx + ½θ² (Hessian 2, mixed derivative −1, x* = θ/2) and f = ½(x − 3)² + θ, so F'
    = ½(x* − 3) + 1.
    """
    one = torch.ones(1, dtype=F64)
    return Problem(
        theta0={"t": 2 * one},
        x0={"x": 5 * one},
        g=lambda t, x, _: (x["x"].square() - t["t"] * x["x"] + 0.5 * t["t"].square()).sum(),
        f=lambda t, x, _: (0.5 * (x["x"] - 3).square() + t["t"]).sum(),
    )


SGD = {"name": "sgd", "lr": 0.1}
LOWER = {"steps": 2, "lr": 0.25}  # x − ¼(2x − θ) = x/2 + θ/4


def test_fixed_point_by_hand() -> None:
    # x: 5 → 3 → 2 at θ = 2. b = x − 3 = −1; v ← v − ¼(2v − b): −¼, −⅜. h = 1 − (−1)·(−⅜).
    solver = {"name": "fixed-point", "lr": 0.25, "max_steps": 2}
    made = method("fixed-point", generator=LOWER, hypergradient={"solver": solver}, outer=SGD)
    state, record = made.step(scalar(), made.init(scalar(), 0))
    assert float(state["x"]["x"]) == 2.0
    assert float(state["theta"]["t"]) == pytest.approx(2 - 0.1 * (1 - 3 / 8))
    assert record["outcome"] == "iteration-limit"


def test_amigo_goes_on_from_its_last_linear_solution() -> None:
    solver = {"name": "fixed-point", "lr": 0.25, "max_steps": 2}
    made = method("amigo", generator=LOWER, hypergradient={"solver": solver}, outer=SGD)
    state, _ = made.step(scalar(), made.init(scalar(), 0))
    theta = 2 - 0.1 * (1 - 3 / 8)
    x = 2.0
    v = -3 / 8
    assert float(state["theta"]["t"]) == pytest.approx(theta)
    state, _ = made.step(scalar(), state)
    for _ in range(2):
        x = x / 2 + theta / 4
    for _ in range(2):
        v = v - 0.25 * (2 * v - (x - 3))
    assert float(state["x"]["x"]) == pytest.approx(x)
    assert float(state["theta"]["t"]) == pytest.approx(theta - 0.1 * (1 + v))


def test_darts_by_hand() -> None:
    # w: 5 → 3; w' = 3 − ¼·4 = 2, ∇f(w') = −1; h = ∂_θf − ξ·(−1)·(−1) = 1 − ¼, exactly, as g is
    # quadratic.
    made = method(
        "darts",
        generator={"lr": 0.25, "momentum": 0.0},
        hypergradient={"lr": 0.25, "derivative": "difference"},
        outer=SGD,
    )
    state, _ = made.step(scalar(), made.init(scalar(), 0))
    assert float(state["x"]["x"]) == 3.0
    assert float(state["theta"]["t"]) == pytest.approx(2 - 0.1 * 0.75, rel=1e-9)


def dense(key: Key, batch_size: int, products: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """The Hessians of the batches that ``products`` fresh products see, the mixed derivative of
    the next, and ∇f.
    """
    xs = Ravel.of(PROBLEM.x0)
    ts = Ravel.of(PROBLEM.theta0)
    x = xs.ravel(PROBLEM.x0)
    t = ts.ravel(PROBLEM.theta0)

    def g(batch: Tree) -> Any:
        return lambda t, x: PROBLEM.g(ts.unravel(t), xs.unravel(x), batch)

    drawn = [
        PROBLEM.lower_data.draw(key.fold("lower", count), batch_size, 1)
        for count in range(1, products + 2)
    ]
    batches = [PROBLEM.lower_data.batch(index[0]) for index in drawn if index is not None]
    hessians = [torch.func.hessian(g(batch), 1)(t, x) for batch in batches[:-1]]
    mixed = torch.func.jacrev(torch.func.grad(g(batches[-1]), 1), 0)(t, x)
    rows = PROBLEM.upper_data["differentiate"].whole
    direct, slope = torch.func.grad(
        lambda t, x: PROBLEM.f(ts.unravel(t), xs.unravel(x), rows), (0, 1)
    )(t, x)
    return hessians, mixed, direct, slope


@pytest.mark.parametrize("strategy", ["vjp", "jvp", "difference"])
def test_fresh_batches_are_one_a_product(strategy: Any) -> None:
    from hgms_core import Branch

    key = Key(5)
    lr = 0.4
    branch = Branch(x=PROBLEM.x0)
    estimator = Implicit(
        solver=Neumann(lr=lr, steps=4), batch_size=6, batches="fresh", strategy=strategy
    )
    found, _ = estimator.estimate(PROBLEM, PROBLEM.theta0, branch, key, estimator.init(PROBLEM))
    # Four terms are four steps of v ← v + lr(b − H v) from 0; the first product is with H of batch
    # 1 after the first step, and the last product only measures the residual.
    hessians, mixed, direct, slope = dense(key, 6, 4)
    v = lr * slope
    for hessian in hessians[:3]:
        v = v + lr * (slope - hessian @ v)
    expected = Ravel.of(PROBLEM.theta0).unravel(direct - mixed.T @ v)
    tolerance = 1e-6 if strategy == "difference" else 1e-11
    assert_same(found.value, expected, rtol=tolerance, atol=tolerance)
    assert found.cost.products == 4
    assert found.solution is not None
    residual = torch.linalg.vector_norm(slope - hessians[3] @ v) / torch.linalg.vector_norm(slope)
    assert float(found.solution.residual) == pytest.approx(float(residual), rel=1e-5)


@pytest.mark.parametrize("strategy", ["vjp", "jvp", "difference"])
@pytest.mark.parametrize("batches", ["one", "fresh"])
def test_what_an_implicit_estimate_costs_is_what_was_called(strategy: Any, batches: Any) -> None:
    from hgms_core import Branch

    problem, seen = counted(PROBLEM)
    branch = Branch(x=PROBLEM.x0)
    estimator = Implicit(
        solver=Neumann(lr=0.4, steps=4), batch_size=6, batches=batches, strategy=strategy
    )
    cost = estimator.estimate(problem, PROBLEM.theta0, branch, Key(5), estimator.init(problem))[
        0
    ].cost
    passes = 2 if strategy == "difference" else 1
    # a product with vjp goes back through the graph of a gradient: no evaluation
    again = 0 if strategy == "vjp" else 4
    assert (cost.upper_gradients, cost.products, cost.cross_products) == (1, 4, 1)
    assert cost.lower_gradients == (4 if batches == "fresh" and strategy == "vjp" else 1)
    assert seen["g"] == cost.lower_gradients + passes * again + passes
    assert seen["f"] == 1
    assert cost.rows == seen["f_rows"] + seen["g_rows"] + 6 * (4 - again)


LOWER_RUN = {"steps": 8, "lr": 0.8}
ADAM = {"lr": 0.1, "schedule": {"kind": "cosine"}}


def test_amigo_reaches_the_closed_form_optimum() -> None:
    problem, exact, best = tuned_penalty()
    solver = {"lr": 0.8, "max_steps": 4}
    made = method("amigo", generator=LOWER_RUN, hypergradient={"solver": solver}, outer=ADAM)
    theta, x, _ = run(made, problem, 50)
    assert float(theta["log_penalty"]) == pytest.approx(best, abs=0.01)
    assert_same(x, exact.solution(theta), rtol=1e-2, atol=1e-2)


def test_darts_is_right_in_one_dimension_and_biased_in_more() -> None:
    parts = {
        "generator": {"lr": 0.5, "momentum": 0.0},
        "hypergradient": {"lr": 0.5},
        "outer": {"name": "adam", "lr": 0.1, "betas": [0.9, 0.999], "schedule": {"kind": "cosine"}},
    }
    task = Quadratic(
        rows=12, validation_rows=40, features=1, condition=1.0, noise=2.0, penalty="shared"
    )
    problem = task.problem(1, CPU, F64)
    exact = task.closed_form(1, CPU, F64)
    theta, _, _ = run(method("darts", **parts), problem, 150)
    assert float(exact.hypergradient(theta)["log_penalty"].abs()) < 2e-3
    problem, exact, best = tuned_penalty()
    theta, x, _ = run(method("darts", **parts), problem, 150)
    assert abs(float(theta["log_penalty"]) - best) > 0.02
    # the lower level is solved; it is θ that is off
    assert_same(x, exact.solution(theta), rtol=0.05, atol=0.05)
