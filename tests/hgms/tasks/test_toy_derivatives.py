"""The toy task against the published rule."""

from __future__ import annotations

import math
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


def test_g_has_no_other_stationary_point() -> None:
    """∂g/∂x = 2u + θ sin 2u with u = θ + x is 0 only at u = 0 where θ ≤ 3: there (∂g/∂x)² ≥ μ g
    for a μ > 0.
    """
    u = torch.cat(
        [
            torch.linspace(-12, -1e-3, 5000, dtype=DOUBLE),
            torch.linspace(1e-3, 12, 5000, dtype=DOUBLE),
        ]
    )
    for t in torch.linspace(0, 3, 31, dtype=DOUBLE):
        slope = 2 * u + t * (2 * u).sin()
        value = u.square() + t * u.sin().square()
        assert float((slope.square() / value).min()) > 0.1


def plain_steps(theta: float, x: float, gap: bool) -> int:
    """The published rule for one start, in plain Python with the published gradient: V-PBGD
    (``gap``) or G-PBGD.
    """
    gamma = 10.0
    alpha = 0.01
    for step in range(1, 20_001):
        e = math.exp(2 - 4 * theta)
        u = theta + x
        s = 4 * theta - 2
        f_t = 4 * e * math.cos(4 * x + 2) / (1 + e**2) + 4 * s / (s**2 + 1)
        f_x = -4 * math.sin(4 * x + 2) / (1 + e)
        g_x = 2 * u + theta * math.sin(2 * u)
        if gap:
            p_t = g_x + math.sin(u) ** 2
            p_x = g_x
        else:
            p_t = g_x * (2 + math.sin(2 * u) + 2 * theta * math.cos(2 * u))
            p_x = g_x * (2 + 2 * theta * math.cos(2 * u))
        new_theta = min(max(theta - alpha * (f_t + gamma * p_t), 0), 3)
        new_x = x - alpha * (f_x + gamma * p_x)
        length = math.hypot(theta - new_theta, x - new_x) / alpha
        theta = new_theta
        x = new_x
        if length <= 1e-5:
            return step
    return 20_000


@pytest.mark.extended
def test_our_methods_take_the_steps_of_the_published_rule(toy: ModuleType) -> None:
    problem = ToyPenalty(starts=12).problem(0, CPU, DOUBLE)
    problem = evolve(problem, f=toy.published_upper)
    starts = list(zip(problem.theta0["theta"].tolist(), problem.x0["x"].tolist(), strict=True))
    steps = toy.steps_to_convergence(toy.GENERATORS["g-pbgd"], problem)
    assert steps.tolist() == [plain_steps(*start, gap=False) for start in starts]
    tracked = toy.steps_to_convergence(toy.GENERATORS["v-pbgd"], problem)
    plain = torch.tensor([plain_steps(*start, gap=True) for start in starts], dtype=DOUBLE)
    assert float((tracked - plain).abs().max()) <= 1  # ω is near the minimiser, not at it
