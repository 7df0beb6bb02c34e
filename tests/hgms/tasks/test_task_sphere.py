"""The sphere task: its geometry, its start and its projection. Derivatives, and where methods
end: test_closed_forms.py.
"""

from __future__ import annotations

import pytest
import torch
from support.helpers import F64, normal

from hgms.tasks.sphere import Sphere, SphereClosedForm
from hgms_core import Key, Problem

CPU = torch.device("cpu")
TASKS = [
    Sphere(k=1, d=2),
    Sphere(k=1, d=5),
    Sphere(),
    Sphere(k=3, d=4, growth=0.0),
    Sphere(k=6, d=20, shift=0.0, radius=2.0),
]


def built(task: Sphere, seed: int = 0) -> tuple[Problem, SphereClosedForm]:
    return task.problem(seed, CPU, F64), task.closed_form(seed, CPU, F64)


@pytest.mark.parametrize("task", TASKS)
def test_the_solution_is_the_best_minimiser_and_theta_star_the_best_theta(task: Sphere) -> None:
    problem, exact = built(task, seed=1)
    theta = problem.theta0
    directions = normal(20_000, task.k + 1)
    points = torch.func.vmap(lambda direction: exact.point(theta, direction))(
        directions / directions.norm(dim=1, keepdim=True)
    )
    lower, upper = (
        torch.func.vmap(loss, in_dims=(None, 0, None))(theta, points, {})
        for loss in (problem.g, problem.f)
    )
    assert max(lower.max(), problem.g(theta, exact.solution(theta), {})) < 1e-25
    assert exact.value(theta) <= upper.min() <= upper.max() <= problem.f(theta, problem.x0, {})
    assert task.k > 2 or float(upper.min() - exact.value(theta)) < 1e-3

    best = exact.theta_star["theta"]
    assert exact.hypergradient({"theta": best})["theta"].norm() < 1e-12
    assert float(exact.value({"theta": best})) == pytest.approx(exact.optimum, rel=1e-12)
    for scale in (1e-3, 0.1, 1.0):
        for step in normal(100, task.k + 1):
            moved = best + scale * best.norm() * step / step.norm()
            assert float(exact.value({"theta": moved})) > exact.optimum


@pytest.mark.parametrize("task", TASKS)
def test_the_lower_hessian_vanishes_along_the_sphere_and_nowhere_else(task: Sphere) -> None:
    problem, exact = built(task, seed=2)
    hessian = torch.func.hessian(lambda x: problem.g(problem.theta0, {"x": x}, {}))(problem.x0["x"])
    eigenvalues = torch.linalg.eigvalsh(hessian)
    assert (eigenvalues[: task.k].abs() < 1e-12).all()
    across = [1.0] * (task.d - task.k - 1) + [2 * float(exact.radius(problem.theta0)) ** 2]
    assert eigenvalues[task.k :].tolist() == pytest.approx(sorted(across))


def test_the_start_is_the_worst_minimiser_and_fresh_ones_lie_on_the_sphere() -> None:
    problem, exact = built(Sphere(k=3, d=9), seed=5)
    draws = [problem.initial(Key(0).fold(i)) for i in (*range(20), 3)]
    numbers = [problem.evaluate(problem.theta0, x) for x in (problem.x0, *draws)]
    assert max(each["manifold_distance"] for each in numbers) < 1e-12
    assert numbers[0]["solution_distance"] == pytest.approx(2 * float(exact.radius(problem.theta0)))
    assert torch.equal(draws[3]["x"], draws[-1]["x"])
    assert not torch.allclose(draws[3]["x"], draws[4]["x"])


def test_theta_is_projected_onto_the_ball_in_which_the_radius_is_positive() -> None:
    problem, exact = built(Sphere(growth=0.3))
    far = problem.project({"theta": -50 * exact.best})
    assert torch.isclose(far["theta"].norm(), 2 * exact.theta_star["theta"].norm())
    assert exact.radius(far) > 0
    assert torch.equal(problem.project(problem.theta0)["theta"], problem.theta0["theta"])
