"""Every task with a closed form: the derivative of its value against finite differences and
against the implicit formula with a dense (pseudo-)inverse.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.helpers import F64, assert_same, finite_differences
from torch import Tensor

from hgms.tasks.circle import CircleDegenerate, CircleKink
from hgms.tasks.quadratic import Quadratic
from hgms.tasks.regression import LogisticCv, RidgeCv
from hgms.tasks.sphere import Sphere
from hgms.tasks.toy import ToyPenalty
from hgms_core import MatVec, hypergradient

CPU = torch.device("cpu")
CIRCLES = [CircleKink(), CircleDegenerate(), CircleDegenerate(b=0.2)]
CASES: list[tuple[Any, Any, float, float, float]] = [
    # the task, θ, the step of the differences and their tolerances
    *((task, t, 1e-5, 1e-5, 1e-9) for task in CIRCLES for t in (0.3, 1.3, 2.4)),
    *((ToyPenalty(starts=1), t, 1e-6, 0.0, 1e-7) for t in (0.0, 0.4, 1.1, 2.3, 3.0)),
    *(
        (task, None, 1e-6, 1e-7, 1e-8)
        for task in (
            Sphere(k=1, d=2),
            Sphere(),
            Sphere(k=3, d=4, growth=0.0),
            Sphere(k=6, d=20, shift=0.0, radius=2.0),
        )
    ),
    (Quadratic(), (-2, 0.5), 1e-5, 1e-6, 1e-9),
    (Quadratic(penalty="shared", features=7), (-2, 0.5), 1e-5, 1e-6, 1e-9),
    (Quadratic(rows=30, features=30, condition=1e3, noise=0.0), (-2, 0.5), 1e-5, 1e-6, 1e-9),
    (RidgeCv(), (-4, 0.5), 1e-4, 1e-5, 1e-8),
    (LogisticCv(dataset="sklearn:wine"), (-4, 0.5), 1e-4, 1e-5, 1e-8),
    (LogisticCv(dataset="sklearn:iris", penalties="classes"), (-4, 0.5), 1e-4, 1e-5, 1e-8),
]


def pseudoinverse(matvec: MatVec, b: Tensor) -> Tensor:
    hessian = torch.stack([matvec(column) for column in torch.eye(len(b), dtype=F64)], dim=1)
    return torch.linalg.pinv(hessian, rtol=1e-8, hermitian=True) @ b


@pytest.mark.parametrize(("task", "theta", "step", "rtol", "atol"), CASES)
def test_the_hypergradient_is_the_slope_of_the_value_and_the_implicit_formula(
    task: Any, theta: Any, step: float, rtol: float, atol: float
) -> None:
    problem, exact = task.problem(3, CPU, F64), task.closed_form(3, CPU, F64)
    ((name, leaf),) = problem.theta0.items()
    if theta is not None:
        low, high = theta if isinstance(theta, tuple) else (theta, theta)
        leaf = torch.linspace(low, high, leaf.numel(), dtype=F64).reshape(leaf.shape)
    at = {name: leaf}
    x, slope = exact.solution(at), exact.hypergradient(at)
    assert_same(finite_differences(exact.value, at, step), slope, rtol=rtol, atol=atol)
    below, above = problem.lower_data.whole, problem.upper_data["select"].whole
    assert_same(problem.f(at, x, above), exact.value(at), rtol=1e-12, atol=1e-14)
    for strategy in ("vjp", "jvp"):
        found = hypergradient(
            lambda t, y: problem.f(t, y, above),
            lambda t, y: problem.g(t, y, below),
            at,
            x,
            solver=pseudoinverse,
            strategy=strategy,
        )
        assert_same(found.value, slope, rtol=1e-9, atol=1e-13)
        assert found.lower_gradient_norm < (1e-9 if isinstance(task, LogisticCv) else 1e-12)
