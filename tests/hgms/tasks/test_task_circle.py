"""The paper's two circle examples: brute force over the circle, and the functions that they
are made of. Derivatives: test_closed_forms.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import scipy.integrate
import torch
from support.helpers import F64, assert_same
from torch import Tensor

from hgms.tasks.circle import CircleDegenerate, CircleKink
from hgms.tasks.circle.functions import bump, bump_slope, wall, well
from hgms_core import Problem, Tree

CPU = torch.device("cpu")
TASKS = [CircleKink(), CircleDegenerate(), CircleDegenerate(b=0.2)]


def at(theta: float) -> Tree:
    return {"theta": torch.tensor([theta], dtype=F64)}


def built(task: Any, dtype: torch.dtype = F64) -> tuple[Problem, Any]:
    return task.problem(0, CPU, dtype), task.closed_form(0, CPU, dtype)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("theta", [0.3, 1.3, 2.4])
def test_no_point_of_the_circle_is_better_than_the_closed_form(task: Any, theta: float) -> None:
    problem, exact = built(task)
    angle = torch.linspace(0, 2 * math.pi, 20001, dtype=F64)
    circle = math.sqrt(1 + theta**2) * torch.stack([angle.cos(), angle.sin()], dim=1)
    lower, upper = (
        torch.func.vmap(loss, in_dims=(None, 0, None))(at(theta), {"x": circle}, {})
        for loss in (problem.g, problem.f)
    )
    assert max(lower.max(), problem.g(at(theta), exact.solution(at(theta)), {})) < 1e-25
    assert float(upper.min()) == pytest.approx(float(exact.value(at(theta))), abs=1e-7)


@pytest.mark.parametrize("t", [-1.7, 0.05, 0.6, 40.0])
def test_the_flat_well_is_the_integral_and_its_derivatives_are_right(t: float) -> None:
    integral, _ = scipy.integrate.quad(
        lambda s: math.exp(-1 / s**2) if s else 0.0, 0, abs(t), epsabs=1e-15, epsrel=1e-13
    )
    point = torch.tensor(t, dtype=F64)
    first, second = torch.func.grad(well)(point), torch.func.grad(torch.func.grad(well))(point)
    edge = math.exp(-1 / t**2)
    assert float(well(point)) == pytest.approx(integral, rel=1e-10, abs=1e-15)
    assert float(first) == pytest.approx(math.copysign(edge, t), rel=1e-9, abs=1e-15)
    assert float(second) == pytest.approx(2 / abs(t) ** 3 * edge, rel=1e-7, abs=1e-13)


@pytest.mark.parametrize("function", [bump, well, wall])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_nothing_near_zero_is_nan_through_two_derivatives(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    tiny = torch.finfo(dtype).tiny
    points = [0.0, -0.0, tiny, -tiny, tiny / 16, 1e-30, -1e-9, 1e-3, 0.0299, 0.0301, -0.031, 0.1]
    t = torch.tensor(points, dtype=dtype, requires_grad=True)
    value = torch.func.vmap(function)(t)
    (first,) = torch.autograd.grad(value.sum(), t, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), t)
    _, forward = torch.func.jvp(function, (t.detach(),), (torch.ones_like(t),))
    assert torch.isfinite(torch.stack([value, first, second, forward])).all()
    assert torch.allclose(first, forward)
    assert (value[:8] == 0).all()


def test_bump_slope_is_the_derivative_of_bump() -> None:
    theta = torch.linspace(-3, 3, 301, dtype=F64)
    slope = torch.func.grad(lambda t: bump(t).sum())(theta)
    assert_same(slope, bump_slope(theta), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("task", TASKS)
def test_the_problem_starts_at_the_wrong_side_and_stays_in_its_box(task: Any) -> None:
    problem, exact = built(task, torch.float32)
    numbers = problem.evaluate(problem.theta0, problem.x0)
    assert numbers["upper_loss"] > 0.3 > numbers["value"]
    assert numbers["manifold_distance"] < 1e-6
    assert numbers["solution_distance"] == pytest.approx(2 * math.sqrt(1 + task.start**2), rel=1e-5)
    best = exact.solution(problem.theta0)
    assert problem.evaluate(problem.theta0, best)["solution_distance"] == 0
    inside = [float(problem.project({"theta": torch.tensor([t])})["theta"]) for t in (-5, 9, 1.0)]
    assert inside == pytest.approx([task.low, task.high, 1.0])
