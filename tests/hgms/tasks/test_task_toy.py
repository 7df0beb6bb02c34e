"""The toy problem of penalty methods: its lower level, its starts, and the published rule and
number of steps. Derivatives: test_closed_forms.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from attrs import evolve
from support.helpers import F64, load_script

from hgms.tasks.toy import ToyPenalty

CPU = torch.device("cpu")
SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "mls" / "toy.py"


@pytest.fixture(scope="module")
def toy() -> ModuleType:
    return load_script("mls_toy", SCRIPT)


def test_g_has_no_other_stationary_point_than_its_minimum_zero() -> None:
    """∂g/∂x = 2u + θ sin 2u with u = θ + x is 0 only at u = 0 where θ ≤ 3: there (∂g/∂x)² ≥ μ g
    for a μ > 0.
    """
    problem = ToyPenalty(starts=1).problem(0, CPU, F64)
    u = torch.linspace(-12, 12, 10_000, dtype=F64)
    for t in torch.linspace(0, 3, 31, dtype=F64):
        value = u.square() + t * u.sin().square()
        assert float(((2 * u + t * (2 * u).sin()).square() / value).min()) > 0.1
        theta = {"theta": t.reshape(1)}
        values = torch.stack([problem.g(theta, {"x": at - theta["theta"]}, {}) for at in u[::500]])
        assert torch.allclose(values, value[::500], rtol=1e-12)
        assert float(problem.g(theta, {"x": -theta["theta"]}, {})) == 0


def test_starts_are_drawn_by_the_seed_within_their_box_and_metrics_are_means_over_them() -> None:
    task = ToyPenalty(starts=200)
    problem = task.problem(0, CPU, F64)
    theta, x = problem.theta0["theta"], problem.x0["x"]
    assert 0 <= float(theta.min()) < 0.2
    assert -5 <= float(x.min()) < -4 < 7.5 < float(x.max()) <= 8.5
    assert 10 < int((theta == 3).sum()) < 50  # a seventh
    solution = task.closed_form(0, CPU, F64).solution(problem.theta0)
    numbers = problem.evaluate(problem.theta0, solution)
    assert numbers["residual"] == 0 < numbers["slope"]
    assert numbers["value"] == pytest.approx(numbers["upper_loss"], abs=1e-12)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["v-pbgd", "g-pbgd"])
def test_the_published_mean_of_a_thousand_starts_is_met(toy: ModuleType, name: str) -> None:
    problem = evolve(ToyPenalty().problem(0, CPU, F64), f=toy.published_upper)
    steps = toy.steps_to_convergence(toy.GENERATORS[name], problem)
    half = 1.96 * float(steps.std()) / len(steps) ** 0.5
    assert half < 5
    assert abs(float(steps.mean()) - toy.PUBLISHED[name]) < half + 1


def plain_steps(theta: float, x: float, gap: bool) -> int:
    """The published rule for one start, in plain Python with the published gradient: V-PBGD
    (``gap``) or G-PBGD.
    """
    for step in range(1, 20_001):
        e = math.exp(2 - 4 * theta)
        u = theta + x
        s = 4 * theta - 2
        f_t = 4 * e * math.cos(4 * x + 2) / (1 + e**2) + 4 * s / (s**2 + 1)
        f_x = -4 * math.sin(4 * x + 2) / (1 + e)
        g_x = 2 * u + theta * math.sin(2 * u)
        p_t = g_x + math.sin(u) ** 2
        p_x = g_x
        if not gap:
            p_t = g_x * (2 + math.sin(2 * u) + 2 * theta * math.cos(2 * u))
            p_x = g_x * (2 + 2 * theta * math.cos(2 * u))
        before = (theta, x)
        theta = min(max(theta - 0.01 * (f_t + 10 * p_t), 0), 3)
        x = x - 0.01 * (f_x + 10 * p_x)
        if math.dist(before, (theta, x)) <= 1e-5 * 0.01:
            return step
    return 20_000


@pytest.mark.extended
def test_our_methods_take_the_steps_of_the_published_rule(toy: ModuleType) -> None:
    problem = evolve(ToyPenalty(starts=12).problem(0, CPU, F64), f=toy.published_upper)
    starts = list(zip(problem.theta0["theta"].tolist(), problem.x0["x"].tolist(), strict=True))
    steps = toy.steps_to_convergence(toy.GENERATORS["g-pbgd"], problem)
    assert steps.tolist() == [plain_steps(*start, gap=False) for start in starts]
    tracked = toy.steps_to_convergence(toy.GENERATORS["v-pbgd"], problem)
    plain = torch.tensor([plain_steps(*start, gap=True) for start in starts], dtype=F64)
    assert float((tracked - plain).abs().max()) <= 1  # ω is near the minimiser, not at it
