"""The paper's two circle examples against brute force over the circle, finite differences and
the pseudoinverse formula.
"""

from __future__ import annotations

import math

import pytest
import scipy.integrate
import torch

import hgms_core
from hgms.tasks.circle import CircleDegenerate, CircleKink
from hgms.tasks.circle.functions import bump, wall, well

CPU = torch.device("cpu")
DOUBLE = torch.float64

TASKS = [CircleKink(), CircleDegenerate(), CircleDegenerate(b=0.2)]

THETAS = [0.3, 1.3, 2.4]


def at(theta: float) -> dict[str, torch.Tensor]:
    return {"theta": torch.tensor([theta], dtype=DOUBLE)}


def pseudoinverse(matvec: hgms_core.MatVec, b: torch.Tensor) -> torch.Tensor:
    hessian = torch.stack([matvec(column) for column in torch.eye(len(b), dtype=DOUBLE)], dim=1)
    return torch.linalg.pinv(hessian, rtol=1e-8, hermitian=True) @ b


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("theta", THETAS)
def test_no_point_of_the_circle_is_better_than_the_closed_form(
    task: CircleKink | CircleDegenerate, theta: float
) -> None:
    problem = task.problem(0, CPU, DOUBLE)
    exact = task.closed_form(0, CPU, DOUBLE)
    angle = torch.linspace(0, 2 * math.pi, 20001, dtype=DOUBLE)
    circle = math.sqrt(1 + theta**2) * torch.stack([angle.cos(), angle.sin()], dim=1)
    lower = torch.func.vmap(problem.g, in_dims=(None, 0, None))(at(theta), {"x": circle}, {})
    upper = torch.func.vmap(problem.f, in_dims=(None, 0, None))(at(theta), {"x": circle}, {})
    assert lower.max() < 1e-25
    assert float(upper.min()) == pytest.approx(float(exact.value(at(theta))), abs=1e-7)
    x = exact.solution(at(theta))
    assert torch.isclose(problem.f(at(theta), x, {}), exact.value(at(theta)), atol=1e-14)
    assert problem.g(at(theta), x, {}) < 1e-25


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("theta", THETAS)
def test_the_derivative_is_the_slope_of_the_value_and_the_pseudoinverse_formula(
    task: CircleKink | CircleDegenerate, theta: float
) -> None:
    problem = task.problem(0, CPU, DOUBLE)
    exact = task.closed_form(0, CPU, DOUBLE)
    slope = float(exact.hypergradient(at(theta))["theta"])
    step = 1e-5
    difference = float(exact.value(at(theta + step)) - exact.value(at(theta - step))) / (2 * step)
    assert slope == pytest.approx(difference, rel=1e-5, abs=1e-9)
    for strategy in ("vjp", "jvp"):
        found = hgms_core.hypergradient(
            lambda t, x: problem.f(t, x, {}),
            lambda t, x: problem.g(t, x, {}),
            at(theta),
            exact.solution(at(theta)),
            solver=pseudoinverse,
            strategy=strategy,
        )
        assert float(found.value["theta"]) == pytest.approx(slope, rel=1e-9, abs=1e-12)


def test_the_kink_is_a_kink() -> None:
    exact = CircleKink().closed_form(0, CPU, DOUBLE)
    tie = 10 / (2 * math.pi)
    left, right = (float(exact.hypergradient(at(tie + side))["theta"]) for side in (-1e-6, 1e-6))
    assert left > 0.1
    assert right < -0.1
    assert abs(float(exact.value(at(tie)))) < 1e-14
    assert abs(float(exact.solution(at(tie))["x"][0])) == pytest.approx(math.sqrt(1 + tie**2))


@pytest.mark.parametrize("t", [-1.7, 0.05, 0.6, 40.0])
def test_the_flat_well_is_the_integral_and_its_derivatives_are_right(t: float) -> None:
    integral, _ = scipy.integrate.quad(
        lambda s: math.exp(-1 / s**2) if s else 0.0, 0, abs(t), epsabs=1e-15, epsrel=1e-13
    )
    point = torch.tensor(t, dtype=DOUBLE, requires_grad=True)
    value = well(point)
    (first,) = torch.autograd.grad(value, point, create_graph=True)
    (second,) = torch.autograd.grad(first, point)
    assert float(value.detach()) == pytest.approx(integral, rel=1e-10, abs=1e-15)
    assert float(first.detach()) == pytest.approx(
        math.copysign(math.exp(-1 / t**2), t), rel=1e-9, abs=1e-15
    )
    assert float(second) == pytest.approx(
        2 / abs(t) ** 3 * math.exp(-1 / t**2), rel=1e-7, abs=1e-13
    )


@pytest.mark.parametrize("function", [bump, well, wall])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_near_zero_is_nan_through_two_derivatives(
    function: object, dtype: torch.dtype
) -> None:
    tiny = torch.finfo(dtype).tiny
    points = [0.0, -0.0, tiny, -tiny, tiny / 16, 1e-30, -1e-9, 1e-3, 0.0299, 0.0301, -0.031, 0.1]
    t = torch.tensor(points, dtype=dtype, requires_grad=True)
    value = torch.func.vmap(function)(t)
    (first,) = torch.autograd.grad(value.sum(), t, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), t)
    _, forward = torch.func.jvp(function, (t.detach(),), (torch.ones_like(t),))
    for numbers in (value, first, second, forward):
        assert torch.isfinite(numbers).all()
    assert torch.allclose(first, forward)
    assert (value[:8] == 0).all()


@pytest.mark.parametrize("task", TASKS)
def test_the_problem_starts_at_the_wrong_side_and_stays_in_its_box(
    task: CircleKink | CircleDegenerate,
) -> None:
    problem = task.problem(0, CPU, torch.float32)
    exact = task.closed_form(0, CPU, torch.float32)
    numbers = problem.evaluate(problem.theta0, problem.x0)
    assert list(numbers) == list(task.metrics)
    assert numbers["upper_loss"] > 0.3 > numbers["value"]
    assert numbers["manifold_distance"] < 1e-6
    assert numbers["solution_distance"] == pytest.approx(2 * math.sqrt(1 + task.start**2), rel=1e-5)
    assert problem.x0["x"].dtype is torch.float32
    for far, edge in ((-5.0, task.low), (9.0, task.high), (1.0, 1.0)):
        assert float(problem.project({"theta": torch.tensor([far])})["theta"]) == pytest.approx(
            edge
        )
    assert (
        problem.evaluate(problem.theta0, exact.solution(problem.theta0))["solution_distance"] == 0
    )
