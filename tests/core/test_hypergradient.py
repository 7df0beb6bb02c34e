"""`hypergradient` against closed forms and differences; its outcomes and costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from support.helpers import F64, assert_same, finite_differences, normal, rejects, spd
from torch import Tensor

from hgms.adapters import hypergradient
from hgms.integrations.lower_solution import lower_solution
from hgms_core import (
    CallableSolver,
    ConfigError,
    Cost,
    Linearization,
    Outcome,
    cross_product,
    curvature,
)

A = spd(5)
B = normal(5, 3, seed=1)
C = normal(5, seed=2)


def quadratic_lower(theta: Tensor, x: Tensor) -> Tensor:
    return 0.5 * x @ A @ x - x @ B @ theta


def quadratic_upper(theta: Tensor, x: Tensor) -> Tensor:
    return 0.5 * (x - C).square().sum() + 0.05 * theta.square().sum()


def exact(theta: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.linalg.solve(A, B @ theta)
    return x, 0.1 * theta + B.T @ torch.linalg.solve(A, x - C)


def dense(matvec: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
    """Columns of the operator, then a dense solve."""
    return torch.linalg.solve(
        torch.stack([matvec(e) for e in torch.eye(len(b), dtype=b.dtype)], dim=1), b
    )


def scipy_cg(matvec: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
    operator = scipy.sparse.linalg.LinearOperator(
        (len(b), len(b)),
        matvec=lambda v: matvec(torch.from_numpy(np.ascontiguousarray(v))).numpy(),
        dtype=np.float64,
    )
    return torch.from_numpy(scipy.sparse.linalg.cg(operator, b.numpy(), rtol=1e-12)[0])


@pytest.mark.parametrize(
    ("strategy", "solver"), [("vjp", dense), ("jvp", scipy_cg), ("difference", dense)]
)
def test_the_hypergradient_is_the_closed_form_with_any_callable(strategy: Any, solver: Any) -> None:
    theta = normal(3, seed=3)
    x, expected = exact(theta)
    found = hypergradient(
        quadratic_upper, quadratic_lower, theta, x, solver=solver, strategy=strategy
    )
    assert_same(found.value, expected, rtol=1e-6 if strategy == "difference" else 1e-10)
    assert found.outcome is Outcome.CONVERGED
    assert float(found.residual) < 1e-6
    assert float(found.lower_gradient_norm) < 1e-12
    assert_same(found.upper_loss, quadratic_upper(theta, x), rtol=1e-15)


def test_the_hypergradient_is_the_slope_of_the_value() -> None:
    # An independent route on a nonlinear problem: solve the lower level by Newton's method at θ ± ε
    # and difference F.
    def g(theta: Tensor, x: Tensor) -> Tensor:
        return 0.5 * x @ A @ x + (x**4).sum() / 4 - x @ B @ torch.sin(theta)

    def solve(theta: Tensor) -> Tensor:
        x = torch.zeros(5, dtype=F64)
        for _ in range(60):
            slope = A @ x + x**3 - B @ torch.sin(theta)
            x = x - torch.linalg.solve(A + torch.diag(3 * x**2), slope)
        return x

    theta = normal(3, seed=5)
    slopes = finite_differences(lambda t: quadratic_upper(t["t"], solve(t["t"])), {"t": theta})
    found = hypergradient(quadratic_upper, g, theta, solve(theta), solver=dense)
    assert_same(found.value, slopes["t"], rtol=1e-7, atol=1e-9)


def test_losses_without_x_or_theta_leave_the_other_term() -> None:
    theta = normal(3, seed=3)
    x, expected = exact(theta)

    def value(f: Any, g: Any) -> Tensor:
        return hypergradient(f, g, theta, x, solver=dense).value

    assert_same(value(lambda t, x: (t**2).sum(), quadratic_lower), 2 * theta)
    assert_same(value(quadratic_upper, lambda t, x: 0.5 * x @ A @ x), 0.1 * theta)
    implicit_term = value(lambda t, p: 0.5 * (p - C).square().sum(), quadratic_lower)
    assert_same(implicit_term, expected - 0.1 * theta, rtol=1e-12)
    apart = value(lambda t, x: x.sum(), lambda t, x: (x**2).sum() + (t - 1).square().sum())
    assert_same(apart, torch.zeros(3, dtype=F64))


def test_the_cost_is_what_was_called() -> None:
    levels = Linearization.of(
        lambda t, x: quadratic_upper(t["t"], x["x"]),
        lambda t, x: quadratic_lower(t["t"], x["x"]),
        {"t": normal(3)},
        {"x": normal(5)},
    )
    found = levels.hypergradient(dense, rows=(7, 11))
    # five columns and one product to check the answer
    assert found.cost == Cost(
        upper_gradients=1, lower_gradients=1, products=6, cross_products=1, rows=7 + 11 * 8
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda g, theta, x, strategy: curvature(lambda p: g(theta, p), x, strategy),
        lambda g, theta, x, strategy: cross_product(g, theta, x, x, strategy),
        lambda g, theta, x, strategy: hypergradient(
            g, g, theta, x, solver=dense, strategy=strategy
        ),
        lambda g, theta, x, strategy: lower_solution(g, theta, x, solver=dense, strategy=strategy),
    ],
    ids=["curvature", "cross_product", "hypergradient", "lower_solution"],
)
def test_an_unknown_strategy_names_the_nearest(call: Any) -> None:
    with rejects("unknown-choice", "strategy", of=ConfigError) as caught:
        call(
            lambda t, p: quadratic_lower(t["t"], p["x"]), {"t": normal(3)}, {"x": normal(5)}, "vpj"
        )
    assert caught.value.did_you_mean == ("vjp",)


@pytest.mark.parametrize("broken", ["mixed", "direct", "slope"])
def test_a_hypergradient_that_is_not_finite_says_so_whatever_the_solve_did(broken: str) -> None:
    """Where the linear system is sound: √ has no derivative at 0."""
    zero = torch.zeros(2, dtype=F64)
    x = torch.tensor([1.0, 0.0], dtype=F64)

    def g(t: Tensor, p: Tensor) -> Tensor:
        term = {
            "mixed": (p[0] * t.sqrt()).sum(),
            "slope": p[0] * t.sum() + (p[0] - 1).abs().sqrt(),
            "direct": p[0] * t.sum(),
        }
        return 0.5 * p.square().sum() + term[broken]

    def f(t: Tensor, p: Tensor) -> Tensor:
        return p[0] + (t.sqrt().sum() if broken == "direct" else 0.0)

    strategy: Any = "difference" if broken == "slope" else "vjp"  # which looks beside the kink
    found = hypergradient(
        f, g, zero, x, solver=CallableSolver(lambda matvec, b: b), strategy=strategy
    )
    assert found.outcome is Outcome.NONFINITE
    norm = torch.as_tensor(found.lower_gradient_norm or 0.0).reshape(1)
    assert not torch.isfinite(torch.cat([found.value, norm])).all()


def test_a_callable_that_stops_early_is_told_apart_and_may_solve_a_batch() -> None:
    loose, tight = (CallableSolver(lambda matvec, b: 0.9 * b, rtol=rtol) for rtol in (0.2, 0.05))
    assert loose.solve(lambda v: v, torch.ones(3)).outcome is Outcome.CONVERGED
    assert tight.solve(lambda v: v, torch.ones(3)).outcome is Outcome.ITERATION_LIMIT
    assert tight.solve(lambda v: v, torch.zeros(3)).residual == 0
    scale = torch.tensor([[1.0], [2.0], [4.0]], dtype=F64)
    solution = CallableSolver(lambda matvec, b: b / scale).solve(lambda v: scale * v, normal(3, 4))
    assert solution.converged.tolist() == [True] * 3
