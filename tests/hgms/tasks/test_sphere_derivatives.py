"""The sphere's lower Hessian."""

from __future__ import annotations

import pytest
import torch

import hgms_core
from hgms.tasks.sphere import Sphere, SphereClosedForm

CPU = torch.device("cpu")


DOUBLE = torch.float64


TASKS = [
    Sphere(k=1, d=2),
    Sphere(k=1, d=5),
    Sphere(),
    Sphere(k=3, d=4, growth=0.0),
    Sphere(k=6, d=20, shift=0.0, radius=2.0),
]


def built(task: Sphere, seed: int = 0) -> tuple[hgms_core.Problem, SphereClosedForm]:
    return task.problem(seed, CPU, DOUBLE), task.closed_form(seed, CPU, DOUBLE)


@pytest.mark.parametrize("task", TASKS)
def test_the_lower_hessian_vanishes_along_the_sphere_and_nowhere_else(task: Sphere) -> None:
    problem, exact = built(task, seed=2)
    hessian = torch.func.hessian(lambda x: problem.g(problem.theta0, {"x": x}, {}))(problem.x0["x"])
    eigenvalues = torch.linalg.eigvalsh(hessian)
    assert (eigenvalues[: task.k].abs() < 1e-12).all()
    normal = [1.0] * (task.d - task.k - 1) + [2 * float(exact.radius(problem.theta0)) ** 2]
    assert eigenvalues[task.k :].tolist() == pytest.approx(sorted(normal))
