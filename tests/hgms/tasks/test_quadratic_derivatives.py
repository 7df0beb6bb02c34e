"""The quadratic task's implicit hypergradient in closed form."""

from __future__ import annotations

import pytest
import torch

import hgms_core
from hgms.tasks.quadratic import Quadratic

CPU = torch.device("cpu")


DOUBLE = torch.float64


TASKS = [
    Quadratic(),
    Quadratic(penalty="shared", features=7),
    Quadratic(rows=30, features=30, condition=1e3, noise=0.0),
]


def theta_of(problem: hgms_core.Problem) -> dict[str, torch.Tensor]:
    size = problem.theta0["log_penalty"].numel()
    return {"log_penalty": torch.linspace(-2, 0.5, size, dtype=DOUBLE)}


@pytest.mark.parametrize("task", TASKS)
def test_the_implicit_formula_gives_the_closed_form(task: Quadratic) -> None:
    problem = task.problem(2, CPU, DOUBLE)
    exact = task.closed_form(2, CPU, DOUBLE)
    theta = theta_of(problem)

    def dense(matvec: hgms_core.MatVec, b: torch.Tensor) -> torch.Tensor:
        hessian = torch.stack([matvec(column) for column in torch.eye(len(b), dtype=DOUBLE)], dim=1)
        return torch.linalg.solve(hessian, b)

    found = hgms_core.hypergradient(
        lambda t, x: problem.f(t, x, problem.upper_data["select"].whole),
        lambda t, x: problem.g(t, x, problem.lower_data.whole),
        theta,
        exact.solution(theta),
        solver=dense,
    )
    assert torch.allclose(
        found.value["log_penalty"], exact.hypergradient(theta)["log_penalty"], rtol=1e-9, atol=1e-13
    )
    assert found.lower_gradient_norm < 1e-12
