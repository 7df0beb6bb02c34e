"""Second derivatives of the regression tasks."""

from __future__ import annotations

import pytest
import torch
from support.helpers import finite_differences

import hgms_core
from hgms.tasks.regression import LogisticCv, RidgeCv

CPU = torch.device("cpu")


DOUBLE = torch.float64


TASKS = [
    RidgeCv(),
    LogisticCv(),
    LogisticCv(dataset="sklearn:wine"),
    LogisticCv(dataset="sklearn:iris", penalties="classes"),
]


def theta_of(problem: hgms_core.Problem) -> dict[str, torch.Tensor]:
    theta0 = problem.theta0["log_penalty"]
    return {
        "log_penalty": torch.linspace(-4, 0.5, theta0.numel(), dtype=DOUBLE).reshape(theta0.shape)
    }


@pytest.mark.parametrize("task", TASKS)
def test_the_hypergradient_is_the_slope_of_the_value_and_the_implicit_formula(
    task: RidgeCv | LogisticCv,
) -> None:
    problem = task.problem(3, CPU, DOUBLE)
    exact = task.closed_form(3, CPU, DOUBLE)
    theta = theta_of(problem)
    found = exact.hypergradient(theta)["log_penalty"]
    slopes = finite_differences(exact.value, theta, step=1e-4)["log_penalty"]
    assert torch.allclose(found, slopes, rtol=1e-5, atol=1e-8)
    assert float(found.norm()) > 1e-3

    def dense(matvec: hgms_core.MatVec, b: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(
            torch.stack([matvec(column) for column in torch.eye(len(b), dtype=DOUBLE)], dim=1), b
        )

    implicit = hgms_core.hypergradient(
        lambda t, x: problem.f(t, x, problem.upper_data["differentiate"].whole),
        lambda t, x: problem.g(t, x, problem.lower_data.whole),
        theta,
        exact.solution(theta),
        solver=dense,
    )
    assert torch.allclose(implicit.value["log_penalty"], found, rtol=1e-8, atol=1e-12)


def test_newtons_hessian_is_that_of_the_loss() -> None:
    task = LogisticCv(dataset="sklearn:iris")
    problem = task.problem(0, CPU, DOUBLE)
    exact = task.closed_form(0, CPU, DOUBLE)
    theta = theta_of(problem)
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    gradient, hessian = exact._derivatives(theta, {"x": x})

    def loss(flat: torch.Tensor) -> torch.Tensor:
        return problem.g(theta, {"x": flat.reshape(3, 5)}, problem.lower_data.whole)

    assert torch.allclose(gradient, torch.func.grad(loss)(x.flatten()), rtol=1e-10, atol=1e-13)
    assert torch.allclose(hessian, torch.func.hessian(loss)(x.flatten()), rtol=1e-10, atol=1e-13)
