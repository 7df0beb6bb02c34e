"""The ridge task: its closed forms against independently solved lower levels and finite
differences.
"""

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


def solve_lower(problem: hgms_core.Problem, theta: dict[str, torch.Tensor]) -> torch.Tensor:
    """The lower level, solved by Newton's method from the loss alone."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        return problem.g(theta, {"x": x}, problem.lower_data.whole)

    x = problem.x0["x"]
    for _ in range(3):
        x = x - torch.linalg.solve(torch.func.hessian(loss)(x), torch.func.grad(loss)(x))
    assert torch.func.grad(loss)(x).norm() < 1e-13
    return x


@pytest.mark.parametrize("task", TASKS)
def test_the_closed_form_is_the_re_solved_lower_level(task: Quadratic) -> None:
    problem = task.problem(3, CPU, DOUBLE)
    exact = task.closed_form(3, CPU, DOUBLE)
    theta = theta_of(problem)
    assert torch.allclose(
        exact.solution(theta)["x"], solve_lower(problem, theta), rtol=1e-10, atol=1e-12
    )
    upper = problem.f(theta, exact.solution(theta), problem.upper_data["differentiate"].whole)
    assert torch.isclose(exact.value(theta), upper, rtol=1e-12)


@pytest.mark.parametrize("task", TASKS)
def test_the_hypergradient_is_the_slope_of_the_re_solved_value(task: Quadratic) -> None:
    problem = task.problem(1, CPU, DOUBLE)
    exact = task.closed_form(1, CPU, DOUBLE)
    theta = theta_of(problem)
    direction = torch.cos(torch.arange(theta["log_penalty"].numel(), dtype=DOUBLE))
    step = 1e-3

    def value(shift: float) -> float:
        moved = {"log_penalty": theta["log_penalty"] + shift * direction}
        return float(
            problem.f(moved, {"x": solve_lower(problem, moved)}, problem.upper_data["stop"].whole)
        )

    slope = (8 * (value(step) - value(-step)) - value(2 * step) + value(-2 * step)) / (12 * step)
    assert float(exact.hypergradient(theta)["log_penalty"] @ direction) == pytest.approx(
        slope, rel=1e-6, abs=1e-9
    )


def test_the_condition_number_is_the_one_asked_for() -> None:
    exact = Quadratic(rows=50, features=8, condition=1e4).closed_form(0, CPU, DOUBLE)
    eigenvalues = torch.linalg.eigvalsh(exact.a.T @ exact.a / 50)
    assert torch.allclose(
        eigenvalues.sort(descending=True).values, torch.logspace(0, -4, 8, dtype=DOUBLE), rtol=1e-8
    )


def test_a_minibatch_has_the_mean_of_its_rows_and_the_whole_penalty() -> None:
    problem = Quadratic(rows=12, features=3).problem(0, CPU, DOUBLE)
    x = {"x": torch.tensor([1.0, -2.0, 0.5], dtype=DOUBLE)}
    halves = [
        problem.g(problem.theta0, x, problem.lower_data.batch(torch.arange(12)[i::2]))
        for i in range(2)
    ]
    assert torch.isclose(
        sum(halves) / 2, problem.g(problem.theta0, x, problem.lower_data.whole), rtol=1e-13
    )


def test_evaluate_returns_the_declared_metrics() -> None:
    task = Quadratic()
    problem = task.problem(0, CPU, DOUBLE)
    exact = task.closed_form(0, CPU, DOUBLE)
    numbers = problem.evaluate(problem.theta0, problem.x0)
    assert list(numbers) == list(task.metrics)
    assert numbers["value"] == pytest.approx(float(exact.value(problem.theta0)))
    assert numbers["lower_distance"] == pytest.approx(
        float(exact.solution(problem.theta0)["x"].norm())
    )
    assert numbers["upper_loss"] > numbers["value"]
