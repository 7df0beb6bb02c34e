"""The sphere task: closed forms, geometry, and that selection decides where a method ends."""

from __future__ import annotations

import pytest
import torch

import hgms_core
from hgms.tasks.sphere import Sphere, SphereClosedForm

CPU = torch.device("cpu")
DOUBLE = torch.float64

TASKS = [
    Sphere(k=1, d=2),
    Sphere(),
    Sphere(k=3, d=4, growth=0.0),
    Sphere(k=6, d=20, shift=0.0, radius=2.0),
]


def pseudoinverse(matvec: hgms_core.MatVec, b: torch.Tensor) -> torch.Tensor:
    hessian = torch.stack([matvec(column) for column in torch.eye(len(b), dtype=DOUBLE)], dim=1)
    return torch.linalg.pinv(hessian, rtol=1e-8, hermitian=True) @ b


def formula(
    problem: hgms_core.Problem, theta: hgms_core.Tree, x: hgms_core.Tree
) -> hgms_core.Estimate:
    return hgms_core.hypergradient(
        lambda t, y: problem.f(t, y, {}),
        lambda t, y: problem.g(t, y, {}),
        theta,
        x,
        solver=pseudoinverse,
    )


def built(task: Sphere, seed: int = 0) -> tuple[hgms_core.Problem, SphereClosedForm]:
    return task.problem(seed, CPU, DOUBLE), task.closed_form(seed, CPU, DOUBLE)


@pytest.mark.parametrize("task", TASKS)
def test_the_gradient_is_the_slope_of_the_value_and_the_pseudoinverse_formula(task: Sphere) -> None:
    problem, exact = built(task, seed=4)
    theta = problem.theta0["theta"]
    slope = exact.hypergradient({"theta": theta})["theta"]
    for i, column in enumerate(1e-6 * torch.eye(len(theta), dtype=DOUBLE)):
        difference = (
            exact.value({"theta": theta + column}) - exact.value({"theta": theta - column})
        ) / 2e-6
        assert float(slope[i]) == pytest.approx(float(difference), rel=1e-7, abs=1e-8)
    found = formula(problem, problem.theta0, exact.solution(problem.theta0))
    assert torch.allclose(found.value["theta"], slope, rtol=1e-9, atol=1e-11)
    assert found.lower_gradient_norm < 1e-12


@pytest.mark.parametrize("task", TASKS)
def test_the_solution_is_the_best_of_many_minimisers(task: Sphere) -> None:
    problem, exact = built(task, seed=1)
    directions = torch.randn(
        20000, task.k + 1, generator=torch.Generator().manual_seed(0), dtype=DOUBLE
    )
    directions = directions / directions.norm(dim=1, keepdim=True)
    points = torch.func.vmap(lambda direction: exact.point(problem.theta0, direction))(directions)
    lower = torch.func.vmap(problem.g, in_dims=(None, 0, None))(problem.theta0, points, {})
    upper = torch.func.vmap(problem.f, in_dims=(None, 0, None))(problem.theta0, points, {})
    best = exact.solution(problem.theta0)
    assert lower.max() < 1e-25
    assert problem.g(problem.theta0, best, {}) < 1e-25
    assert torch.isclose(
        problem.f(problem.theta0, best, {}), exact.value(problem.theta0), rtol=1e-12
    )
    assert upper.min() >= exact.value(problem.theta0)
    assert upper.max() <= problem.f(problem.theta0, problem.x0, {})
    if task.k <= 2:
        assert float(upper.min() - exact.value(problem.theta0)) < 1e-3


@pytest.mark.parametrize("task", TASKS)
def test_theta_star_is_stationary_and_nothing_nearby_or_far_is_better(task: Sphere) -> None:
    _, exact = built(task, seed=3)
    assert exact.hypergradient(exact.theta_star)["theta"].norm() < 1e-12
    assert float(exact.value(exact.theta_star)) == pytest.approx(exact.optimum, rel=1e-12)
    reach = exact.theta_star["theta"].norm()
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-3, 0.1, 1.0):
        for _ in range(200):
            step = torch.randn(task.k + 1, generator=generator, dtype=DOUBLE)
            theta = {"theta": exact.theta_star["theta"] + scale * reach * step / step.norm()}
            assert float(exact.value(theta)) > exact.optimum


def test_only_a_method_that_selects_reaches_the_optimum() -> None:
    problem, exact = built(Sphere(k=2, d=5))
    ends = {}
    for selects in (True, False):
        theta = problem.theta0
        x = problem.x0
        for _ in range(50):
            if selects:
                x = exact.solution(theta)
            else:  # an exact lower solver: the minimiser nearest to the last one
                on = exact.inside.T @ x["x"] - exact.center(theta)
                x = exact.point(theta, on / on.norm())
            theta = problem.project(
                {"theta": theta["theta"] - 0.3 * formula(problem, theta, x).value["theta"]}
            )
        ends[selects] = problem.evaluate(theta, x)
    assert abs(ends[True]["upper_gap"]) < 1e-8
    assert ends[False]["upper_gap"] > 0.2 * abs(exact.optimum)
    assert ends[False]["manifold_distance"] < 0.1


def test_the_start_is_the_worst_minimiser_and_fresh_ones_lie_on_the_sphere() -> None:
    problem, exact = built(Sphere(k=3, d=9), seed=5)
    start = problem.evaluate(problem.theta0, problem.x0)
    assert list(start) == list(Sphere.metrics)
    assert start["manifold_distance"] < 1e-12
    assert start["solution_distance"] == pytest.approx(2 * float(exact.radius(problem.theta0)))
    draws = [problem.initial(hgms_core.Key(0).fold(i)) for i in range(20)]
    for x in draws:
        assert problem.evaluate(problem.theta0, x)["manifold_distance"] < 1e-12
    assert torch.equal(draws[3]["x"], problem.initial(hgms_core.Key(0).fold(3))["x"])
    assert not torch.allclose(draws[3]["x"], draws[4]["x"])


def test_theta_is_projected_onto_the_ball_in_which_the_radius_is_positive() -> None:
    problem, exact = built(Sphere(growth=0.3))
    reach = 2 * exact.theta_star["theta"].norm()
    far = problem.project({"theta": -50 * exact.best})
    assert torch.isclose(far["theta"].norm(), reach)
    assert exact.radius(far) > 0
    assert torch.equal(problem.project(problem.theta0)["theta"], problem.theta0["theta"])
