"""The toy problem of penalty methods: its closed form, its starts, and the published number of
steps to convergence.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from attrs import evolve
from support.helpers import load_script

from hgms.tasks.toy import ToyPenalty

CPU = torch.device("cpu")
DOUBLE = torch.float64
SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "mls" / "toy.py"


@pytest.fixture(scope="module")
def toy() -> ModuleType:
    return load_script("mls_toy", SCRIPT)


def test_the_closed_form_is_the_least_of_g_and_its_derivative_the_slope_of_the_value() -> None:
    task = ToyPenalty(starts=1)
    problem = task.problem(0, CPU, DOUBLE)
    exact = task.closed_form(0, CPU, DOUBLE)
    for t in (0.0, 0.4, 1.1, 2.3, 3.0):
        theta = {"theta": torch.tensor([t], dtype=DOUBLE)}
        near = torch.linspace(-9, 9, 20001, dtype=DOUBLE)
        values = torch.stack([problem.g(theta, {"x": x.reshape(1)}, {}) for x in near[::40]])
        assert float(values.min()) >= 0 == float(problem.g(theta, exact.solution(theta), {}))
        assert torch.isclose(
            problem.f(theta, exact.solution(theta), {}), exact.value(theta), atol=1e-14
        )
        around = [float(exact.value({"theta": theta["theta"] + step})) for step in (-1e-6, 1e-6)]
        assert float(exact.hypergradient(theta)["theta"]) == pytest.approx(
            (around[1] - around[0]) / 2e-6, abs=1e-7
        )


def test_starts_are_drawn_by_the_seed_within_their_box_and_metrics_are_means_over_them() -> None:
    task = ToyPenalty(starts=200)
    problem, again, other = (task.problem(seed, CPU, DOUBLE) for seed in (0, 0, 1))
    assert torch.equal(problem.theta0["theta"], again.theta0["theta"])
    assert not torch.equal(problem.x0["x"], other.x0["x"])
    assert 0 <= float(problem.theta0["theta"].min()) < 0.2
    assert -5 <= float(problem.x0["x"].min()) < -4 < 7.5 < float(problem.x0["x"].max()) <= 8.5
    theta = problem.theta0
    assert 10 < int((theta["theta"] == 3).sum()) < 50  # a seventh
    numbers = problem.evaluate(theta, task.closed_form(0, CPU, DOUBLE).solution(theta))
    assert set(numbers) == set(task.metrics)
    assert numbers["residual"] == 0
    assert numbers["value"] == pytest.approx(numbers["upper_loss"], abs=1e-12)
    assert numbers["slope"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["v-pbgd", "g-pbgd"])
def test_the_published_mean_of_a_thousand_starts_is_met(toy: ModuleType, name: str) -> None:
    problem = evolve(ToyPenalty().problem(0, CPU, DOUBLE), f=toy.published_upper)
    steps = toy.steps_to_convergence(toy.GENERATORS[name], problem)
    half = 1.96 * float(steps.std()) / len(steps) ** 0.5
    assert half < 5
    assert abs(float(steps.mean()) - toy.PUBLISHED[name]) < half + 1
