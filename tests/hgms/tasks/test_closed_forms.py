"""Every task with a closed form: the derivative of its value against finite differences and
against the implicit formula with a dense (pseudo-)inverse; and that selection decides where a
method ends.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.helpers import F64, assert_same, finite_differences
from torch import Tensor

from hgms.adapters import hypergradient
from hgms.tasks.circle import CircleDegenerate, CircleKink
from hgms.tasks.quadratic import Quadratic
from hgms.tasks.regression import LogisticCv, RidgeCv
from hgms.tasks.sphere import Sphere
from hgms.tasks.toy import ToyPenalty
from hgms_core import Estimate, MatVec, Problem, Tree

CPU = torch.device("cpu")
CIRCLES = [CircleKink(), CircleDegenerate(), CircleDegenerate(b=0.2)]
CASES: list[tuple[Any, Any, float, float, float]] = [
    # the task, θ, the step of the differences and their tolerances
    *((task, t, 1e-5, 1e-5, 1e-9) for task in CIRCLES for t in (0.3, 1.3, 2.4)),
    *((ToyPenalty(starts=1), t, 1e-6, 0.0, 1e-7) for t in (0.0, 0.4, 1.1, 2.3, 3.0)),
    *(
        (task, None, 1e-6, 1e-7, 1e-8)
        for task in (
            Sphere(k=1, d=2),
            Sphere(),
            Sphere(k=3, d=4, growth=0.0),
            Sphere(k=6, d=20, shift=0.0, radius=2.0),
        )
    ),
    (Quadratic(), (-2, 0.5), 1e-5, 1e-6, 1e-9),
    (Quadratic(penalty="shared", features=7), (-2, 0.5), 1e-5, 1e-6, 1e-9),
    (Quadratic(rows=30, features=30, condition=1e3, noise=0.0), (-2, 0.5), 1e-5, 1e-6, 1e-9),
    (RidgeCv(), (-4, 0.5), 1e-4, 1e-5, 1e-8),
    (LogisticCv(dataset="sklearn:wine"), (-4, 0.5), 1e-4, 1e-5, 1e-8),
    (LogisticCv(dataset="sklearn:iris", penalties="classes"), (-4, 0.5), 1e-4, 1e-5, 1e-8),
]


def pseudoinverse(matvec: MatVec, b: Tensor) -> Tensor:
    hessian = torch.stack([matvec(column) for column in torch.eye(len(b), dtype=F64)], dim=1)
    return torch.linalg.pinv(hessian, rtol=1e-8, hermitian=True) @ b


def formula(problem: Problem, theta: Tree, x: Tree, strategy: Any = "vjp") -> Estimate:
    below, above = problem.lower_data.whole, problem.upper_data["select"].whole
    return hypergradient(
        lambda t, y: problem.f(t, y, above),
        lambda t, y: problem.g(t, y, below),
        theta,
        x,
        solver=pseudoinverse,
        strategy=strategy,
    )


@pytest.mark.parametrize(("task", "theta", "step", "rtol", "atol"), CASES)
def test_the_hypergradient_is_the_slope_of_the_value_and_the_implicit_formula(
    task: Any, theta: Any, step: float, rtol: float, atol: float
) -> None:
    problem, exact = task.problem(3, CPU, F64), task.closed_form(3, CPU, F64)
    ((name, leaf),) = problem.theta0.items()
    if theta is not None:
        low, high = theta if isinstance(theta, tuple) else (theta, theta)
        leaf = torch.linspace(low, high, leaf.numel(), dtype=F64).reshape(leaf.shape)
    at = {name: leaf}
    x, slope = exact.solution(at), exact.hypergradient(at)
    assert_same(finite_differences(exact.value, at, step), slope, rtol=rtol, atol=atol)
    above = problem.upper_data["select"].whole
    assert_same(problem.f(at, x, above), exact.value(at), rtol=1e-12, atol=1e-14)
    for strategy in ("vjp", "jvp"):
        found = formula(problem, at, x, strategy)
        assert_same(found.value, slope, rtol=1e-9, atol=1e-13)
        assert found.lower_gradient_norm < (1e-9 if isinstance(task, LogisticCv) else 1e-12)


def end(task: Any, choose: Any, lr: float, steps: int) -> tuple[Tree, dict[str, float]]:
    """θ and the metrics after outer steps with ``choose(exact, theta, x)`` as the lower solver."""
    problem, exact = task.problem(0, CPU, F64), task.closed_form(0, CPU, F64)
    theta, x = problem.theta0, problem.x0
    for _ in range(steps):
        x = choose(exact, theta, x)
        h = formula(problem, theta, x).value["theta"]
        theta = problem.project({"theta": theta["theta"] - lr * h})
    return theta, problem.evaluate(theta, x)


@pytest.mark.extended
def test_only_a_method_that_selects_reaches_the_optimum() -> None:
    """Each lower solver is exact: it takes the best minimiser, or the one nearest to the last."""
    best = lambda exact, theta, x: exact.solution(theta)  # noqa: E731

    def on_circle(exact: Any, theta: Tree, x: Tree) -> Tree:
        return {"x": x["x"] / x["x"].norm() * (1 + theta["theta"] ** 2).sqrt()}

    def on_sphere(exact: Any, theta: Tree, x: Tree) -> Tree:
        on = exact.inside.T @ x["x"] - exact.center(theta)
        return exact.point(theta, on / on.norm())

    for choose, at, value in ((best, 2.2511, -1.94877), (on_circle, 1.3119, -0.89804)):
        theta, numbers = end(CircleKink(), choose, 0.03, 150)
        assert float(theta["theta"]) == pytest.approx(at, abs=1e-3)
        assert numbers["value"] == pytest.approx(value, abs=1e-5)
    task = Sphere(k=2, d=5)
    selected, nearest = (end(task, choose, 0.3, 50)[1] for choose in (best, on_sphere))
    assert abs(selected["upper_gap"]) < 1e-8
    assert nearest["upper_gap"] > 0.2 * abs(task.closed_form(0, CPU, F64).optimum)
    assert nearest["manifold_distance"] < 0.1
