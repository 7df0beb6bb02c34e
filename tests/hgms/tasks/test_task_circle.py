"""The paper's two circle examples: brute force over the circle, the kink, and the functions that
they are made of. Derivatives: test_closed_forms.py.
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
TIE = 10 / (2 * math.pi)


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


def test_the_kink_is_a_kink() -> None:
    _, exact = built(CircleKink())
    left, right = (float(exact.hypergradient(at(TIE + side))["theta"]) for side in (-1e-6, 1e-6))
    assert left > 0.1 > -0.1 > right
    assert abs(float(exact.value(at(TIE)))) < 1e-14
    assert abs(float(exact.solution(at(TIE))["x"][0])) == pytest.approx(math.sqrt(1 + TIE**2))


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


def test_the_degenerate_gradient_is_continuous_but_has_no_hoelder_exponent() -> None:
    _, exact = built(CircleDegenerate())
    distances = [1e-3, 1e-6, 1e-9, 1e-12]
    changes = [abs(float(exact.hypergradient(at(TIE + s))["theta"])) for s in distances]
    assert changes == sorted(changes, reverse=True)
    # a Hölder exponent of 0.1 would shrink the change a thousandfold^0.1 = 2 each time; (log
    # 1/s)^(-1/2) falls ever slower
    ratios = [near / far for near, far in zip(changes[1:], changes, strict=False)]
    assert ratios == sorted(ratios)
    assert ratios[-1] > 0.8
    slope = abs(float(bump_slope(at(TIE)["theta"]))) / 4
    assert changes[-1] == pytest.approx(slope / math.sqrt(math.log(1e12)), rel=0.05)


def test_the_ambient_hessian_hides_the_degeneracy() -> None:
    problem, exact = built(CircleDegenerate(b=0.7))
    x = torch.tensor([math.sqrt(1 + TIE**2), 0.0], dtype=F64)
    assert_same(exact.solution(at(TIE))["x"], x, atol=0.2)  # t* falls only like 1/√log
    hessian = torch.func.hessian(lambda point: problem.f(at(TIE), {"x": point}, {}))(x)
    assert float(hessian[1, 1]) == pytest.approx(1.4, abs=1e-12)
