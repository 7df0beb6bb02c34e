"""`hypergradient` against closed forms and differences; its outcomes and costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from support.helpers import (
    F64,
    assert_same,
    finite_differences,
    network_problem,
    normal,
    rejects,
    spd,
)
from torch import Tensor

from hgms.integrations.lower_solution import lower_solution
from hgms_core import (
    CallableSolver,
    ConfigError,
    Cost,
    Outcome,
    Tree,
    cross_product,
    curvature,
    hypergradient,
)
from hgms_core.hypergrad import implicit

STRATEGIES = ("vjp", "jvp", "difference")


every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


PROBLEM = network_problem()


THETA = PROBLEM.theta0


WHOLE = PROBLEM.lower_data.whole


def lower(x: Tree) -> Tensor:
    return PROBLEM.g(THETA, x, WHOLE)


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
    value, _ = scipy.sparse.linalg.cg(operator, b.numpy(), rtol=1e-12)
    return torch.from_numpy(value)


def fixed_point(matvec: Callable[[Tensor], Tensor], b: Tensor, **_options: Any) -> Tensor:
    """The calling convention of JAXopt and TorchOpt: solve(matvec, b, **options)."""
    v = torch.zeros_like(b)
    for _ in range(300):
        v = v + 0.2 * (b - matvec(v))
    return v


def ones(_: Tensor, x: Tensor) -> Tensor:
    return 0.5 * (x - 1).square().sum()


@every_strategy
@pytest.mark.parametrize("solver", [dense, scipy_cg, fixed_point])
def test_the_hypergradient_is_the_closed_form_with_any_callable(strategy: Any, solver: Any) -> None:
    theta = normal(3, seed=3)
    x, expected = exact(theta)
    found = hypergradient(
        quadratic_upper, quadratic_lower, theta, x, solver=solver, strategy=strategy
    )
    assert_same(found.value, expected, rtol=1e-6 if strategy == "difference" else 1e-10)
    assert found.outcome is Outcome.CONVERGED
    assert found.residual is not None
    assert found.residual < 1e-6
    assert found.lower_gradient_norm is not None
    assert found.lower_gradient_norm < 1e-12
    assert_same(found.upper_loss, quadratic_upper(theta, x), rtol=1e-15)


def test_dictionaries_come_back_as_they_were_given() -> None:
    theta = normal(3, seed=3)
    names = ("first", "second")
    x, expected = exact(theta)
    upper = {"first": theta[:1], "second": theta[1:]}

    def join(t: Tree) -> Tensor:
        return torch.cat([t[name] for name in names])

    found = hypergradient(
        lambda t, p: quadratic_upper(join(t), p["p"]),
        lambda t, p: quadratic_lower(join(t), p["p"]),
        upper,
        {"p": x},
        solver=dense,
    )
    assert_same(join(found.value), expected, rtol=1e-12)
    assert tuple(found.value) == names


def test_only_one_of_the_two_may_be_a_dictionary() -> None:
    theta = normal(3, seed=3)
    x, expected = exact(theta)
    found = hypergradient(
        lambda t, p: quadratic_upper(t["t"], p),
        lambda t, p: quadratic_lower(t["t"], p),
        {"t": theta},
        x,
        solver=dense,
    )
    assert_same(found.value, {"t": expected}, rtol=1e-12)


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


def test_an_upper_loss_without_x_leaves_the_direct_term() -> None:
    theta = normal(3)
    found = hypergradient(
        lambda t, x: (t**2).sum(), quadratic_lower, theta, normal(5), solver=dense
    )
    assert_same(found.value, 2 * theta)


def test_an_upper_loss_without_theta_leaves_the_implicit_term() -> None:
    theta = normal(3, seed=3)
    x, expected = exact(theta)
    found = hypergradient(
        lambda t, p: 0.5 * (p - C).square().sum(), quadratic_lower, theta, x, solver=dense
    )
    assert_same(found.value, expected - 0.1 * theta, rtol=1e-12)


def test_a_lower_loss_without_theta_leaves_the_direct_term() -> None:
    theta = normal(3)
    found = hypergradient(
        quadratic_upper, lambda t, x: 0.5 * x @ A @ x, theta, normal(5), solver=dense
    )
    assert_same(found.value, 0.1 * theta)


def test_a_linear_lower_loss_is_a_zero_system() -> None:
    theta = normal(3)
    found = hypergradient(
        quadratic_upper, lambda t, x: x @ B @ t, theta, normal(5), solver=lambda matvec, b: b
    )
    assert found.residual == 1.0
    assert found.outcome is Outcome.ITERATION_LIMIT


def test_the_arguments_are_not_changed() -> None:
    theta = normal(3).requires_grad_()
    x = normal(5)
    before = theta.detach().clone(), x.clone()
    hypergradient(quadratic_upper, quadratic_lower, theta, x, solver=dense)
    assert_same([theta.detach(), x], list(before))
    assert theta.requires_grad
    assert theta.grad is None
    assert not x.requires_grad


def test_the_cost_is_what_was_called() -> None:
    theta = normal(3)
    found = implicit(
        lambda t, x: quadratic_upper(t["t"], x["x"]),
        lambda t, x: quadratic_lower(t["t"], x["x"]),
        {"t": theta},
        {"x": normal(5)},
        dense,
        rows=(7, 11),
    )
    # five columns and one product to check the answer
    expected = Cost(
        upper_gradients=1, lower_gradients=1, products=6, cross_products=1, rows=7 + 11 * 8
    )
    assert found.cost == expected


def test_an_unknown_strategy_names_the_nearest() -> None:
    theta = {"t": normal(3)}
    x = {"x": normal(5)}

    def g(t: Tree, p: Tree) -> Tensor:
        return quadratic_lower(t["t"], p["x"])

    strategy: Any = "vpj"
    calls: list[Callable[[], object]] = [
        lambda: curvature(lambda p: g(theta, p), x, strategy),
        lambda: cross_product(g, theta, x, x, strategy),
        lambda: hypergradient(g, g, theta, x, solver=dense, strategy=strategy),
        lambda: lower_solution(g, theta, x, solver=dense, strategy=strategy),
    ]
    for call in calls:
        with rejects("unknown-choice", "strategy", of=ConfigError) as caught:
            call()
        assert caught.value.did_you_mean == ("vjp",)
        assert caught.value.hint == "available: difference, jvp, vjp"


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
    assert not (
        torch.isfinite(found.value).all()
        and torch.isfinite(found.lower_gradient_norm or torch.tensor(0.0))
    )


def test_a_callable_that_returns_nan_is_reported_and_not_passed_on() -> None:
    theta = normal(3)
    found = hypergradient(
        quadratic_upper, quadratic_lower, theta, normal(5), solver=lambda matvec, b: b * torch.nan
    )
    assert found.outcome is Outcome.NONFINITE
    assert torch.isfinite(found.value).all()


def test_a_callable_that_stops_early_is_told_apart() -> None:
    solver = CallableSolver(lambda matvec, b: 0.9 * b, rtol=0.05)
    assert solver.solve(lambda v: v, torch.ones(3)).outcome is Outcome.ITERATION_LIMIT
    assert (
        CallableSolver(lambda matvec, b: 0.9 * b, rtol=0.2)
        .solve(lambda v: v, torch.ones(3))
        .outcome
        is Outcome.CONVERGED
    )
    assert solver.solve(lambda v: v, torch.zeros(3)).residual == 0


def test_a_callable_may_solve_a_batch() -> None:
    scale = torch.tensor([[1.0], [2.0], [4.0]], dtype=F64)
    solution = CallableSolver(lambda matvec, b: b / scale).solve(lambda v: scale * v, normal(3, 4))
    assert bool(solution.converged.all())
    assert solution.codes.shape == (3,)
