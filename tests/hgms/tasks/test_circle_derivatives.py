"""The circle's derivatives: the bump, the kink and the degenerate weight."""

from __future__ import annotations

import math

import pytest
import torch

import hgms_core
from hgms.tasks.circle import CircleDegenerate, CircleKink
from hgms.tasks.circle.functions import bump, bump_slope

CPU = torch.device("cpu")


DOUBLE = torch.float64


def at(theta: float) -> dict[str, torch.Tensor]:
    return {"theta": torch.tensor([theta], dtype=DOUBLE)}


def pseudoinverse(matvec: hgms_core.MatVec, b: torch.Tensor) -> torch.Tensor:
    hessian = torch.stack([matvec(column) for column in torch.eye(len(b), dtype=DOUBLE)], dim=1)
    return torch.linalg.pinv(hessian, rtol=1e-8, hermitian=True) @ b


@pytest.mark.extended
def test_without_selection_the_iterates_run_through_the_kink_into_a_worse_minimum() -> None:
    task = CircleKink()
    problem = task.problem(0, CPU, DOUBLE)
    exact = task.closed_form(0, CPU, DOUBLE)
    ends = {}
    for selects in (True, False):
        theta = problem.theta0
        x = problem.x0
        for _ in range(150):
            # an exact lower solver: the best point of the circle, or the one nearest to the last
            nearest = {"x": x["x"] / x["x"].norm() * (1 + theta["theta"] ** 2).sqrt()}
            x = exact.solution(theta) if selects else nearest
            found = hgms_core.hypergradient(
                lambda t, y: problem.f(t, y, {}),
                lambda t, y: problem.g(t, y, {}),
                theta,
                x,
                solver=pseudoinverse,
            )
            theta = problem.project({"theta": theta["theta"] - 0.03 * found.value["theta"]})
        ends[selects] = (float(theta["theta"]), problem.evaluate(theta, x)["value"])
    assert ends[True] == (pytest.approx(2.2511, abs=1e-3), pytest.approx(-1.94877, abs=1e-5))
    assert ends[False] == (pytest.approx(1.3119, abs=1e-3), pytest.approx(-0.89804, abs=1e-5))


def test_the_degenerate_gradient_is_continuous_but_has_no_hoelder_exponent() -> None:
    exact = CircleDegenerate().closed_form(0, CPU, DOUBLE)
    tie = 10 / (2 * math.pi)
    distances = [1e-3, 1e-6, 1e-9, 1e-12]
    changes = [
        abs(float(exact.hypergradient(at(tie + distance))["theta"])) for distance in distances
    ]
    assert changes == sorted(changes, reverse=True)
    # a Hölder exponent of 0.1 would shrink the change a thousandfold^0.1 = 2 each time; (log
    # 1/s)^(-1/2) falls ever slower
    ratios = [near / far for near, far in zip(changes[1:], changes, strict=False)]
    assert ratios == sorted(ratios)
    assert ratios[-1] > 0.8
    predicted = [
        abs(float(bump_slope(at(tie)["theta"]))) / 4 / math.sqrt(math.log(1 / distance))
        for distance in distances
    ]
    assert changes[-1] == pytest.approx(predicted[-1], rel=0.05)


def test_the_ambient_hessian_hides_the_degeneracy() -> None:
    task = CircleDegenerate(b=0.7)
    problem = task.problem(0, CPU, DOUBLE)
    exact = task.closed_form(0, CPU, DOUBLE)
    tie = at(10 / (2 * math.pi))
    x = {"x": torch.stack([torch.sqrt(1 + tie["theta"][0] ** 2), torch.zeros((), dtype=DOUBLE)])}
    assert torch.allclose(exact.solution(tie)["x"], x["x"], atol=0.2)  # t* falls only like 1/√log
    hessian = torch.func.hessian(lambda point: problem.f(tie, {"x": point}, {}))(x["x"])
    assert float(hessian[1, 1]) == pytest.approx(1.4, abs=1e-12)


def test_bump_slope_is_the_derivative_of_bump() -> None:
    theta = torch.linspace(-3, 3, 301, dtype=DOUBLE, requires_grad=True)
    (slope,) = torch.autograd.grad(bump(theta).sum(), theta)
    assert torch.allclose(slope, bump_slope(theta.detach()), rtol=1e-11, atol=1e-14)
