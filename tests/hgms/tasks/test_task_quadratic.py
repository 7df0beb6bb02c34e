"""The ridge task: its condition number, its batches, and what it reports. Derivatives:
test_closed_forms.py.
"""

from __future__ import annotations

import pytest
import torch
from support.helpers import F64

from hgms.tasks.quadratic import Quadratic

CPU = torch.device("cpu")


def test_the_condition_number_is_the_one_asked_for() -> None:
    exact = Quadratic(rows=50, features=8, condition=1e4).closed_form(0, CPU, F64)
    eigenvalues = torch.linalg.eigvalsh(exact.a.T @ exact.a / 50)
    assert torch.allclose(eigenvalues, torch.logspace(-4, 0, 8, dtype=F64), rtol=1e-8)


def test_a_minibatch_has_the_mean_of_its_rows_and_the_whole_penalty() -> None:
    problem = Quadratic(rows=12, features=3).problem(0, CPU, F64)
    x = {"x": torch.tensor([1.0, -2.0, 0.5], dtype=F64)}
    whole, *halves = (
        problem.g(problem.theta0, x, problem.lower_data.batch(rows))
        for rows in (None, torch.arange(0, 12, 2), torch.arange(1, 12, 2))
    )
    assert torch.isclose(sum(halves) / 2, whole, rtol=1e-13)


def test_the_metrics_are_the_value_and_the_distance_to_the_solution() -> None:
    problem, exact = (of(0, CPU, F64) for of in (Quadratic().problem, Quadratic().closed_form))
    numbers = problem.evaluate(problem.theta0, problem.x0)
    assert numbers["value"] == pytest.approx(float(exact.value(problem.theta0)))
    distance = exact.solution(problem.theta0)["x"].norm()
    assert numbers["lower_distance"] == pytest.approx(float(distance))
    assert numbers["upper_loss"] > numbers["value"]
