"""SciPy's solvers as functions `solve(matvec, b) -> v`: their values, the derivatives that are made
of them, and the outcomes that HGMS measures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from support.helpers import F64, assert_same, normal, rejects, spd
from support.solver_systems import Operator
from torch import Tensor

from hgms.adapters import hypergradient
from hgms.hypergradients import Implicit
from hgms.integrations import lower_solution
from hgms.solvers import CG
from hgms_core import CallableSolver, MatVec, Outcome, as_solver

METHODS = ["bicg", "bicgstab", "cg", "cgs", "gcrotmk", "gmres", "lgmres", "minres", "qmr", "tfqmr"]
every_method = pytest.mark.parametrize("method", METHODS)


def scipy_solver(method: str, **options: Any) -> Callable[[MatVec, Tensor], Tensor]:
    """The recipe of docs/how-to/compose-in-python.md for any method."""

    def solve(matvec: MatVec, b: Tensor) -> Tensor:
        def product(v: Any) -> Any:
            return matvec(torch.tensor(v.ravel()).to(b)).numpy()

        operator = scipy.sparse.linalg.LinearOperator(
            (len(b), len(b)), matvec=product, rmatvec=product, dtype=b.numpy().dtype
        )
        with np.errstate(all="ignore"):
            v, _ = getattr(scipy.sparse.linalg, method)(operator, b.numpy(), **options)
        return torch.tensor(v).to(b)

    return solve


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_it_is_scipys_own_answer(method: str, dtype: torch.dtype) -> None:
    """On an indefinite system where the method is for those."""
    shift = 0.6 if method == "minres" and dtype == F64 else 0.0
    matrix = (spd(20, seed=1) - shift * torch.eye(20, dtype=F64)).to(dtype)
    b = normal(20, seed=2).to(dtype)
    operator = scipy.sparse.linalg.aslinearoperator(matrix.numpy())
    rtol = 1e-10 if dtype == F64 else 1e-5
    own, _ = getattr(scipy.sparse.linalg, method)(operator, b.numpy(), rtol=rtol, maxiter=500)
    counted = Operator(matrix)
    found = as_solver(scipy_solver(method, rtol=rtol, maxiter=500)).solve(counted, b)
    assert found.outcome is Outcome.CONVERGED
    assert found.value.dtype == dtype
    assert found.products == counted.calls == int(found.iterations) + 1
    close = {"rtol": 1e-6, "atol": 1e-8} if dtype == F64 else {"rtol": 1e-2, "atol": 1e-3}
    np.testing.assert_allclose(found.value.numpy(), own, **close)
    torch.testing.assert_close(found.value, torch.linalg.solve(matrix, b), **close)


@every_method
def test_converged_is_by_the_true_residual(method: str) -> None:
    """Condition 1e8 at a tolerance where recursions have drifted: either the claim holds or
    there is none.
    """
    values = torch.logspace(-4, 4, 60, dtype=F64)
    b = normal(60, seed=3)
    solver = CallableSolver(scipy_solver(method, rtol=1e-12, maxiter=400), rtol=1e-12)
    found = solver.solve(lambda v: values * v, b)
    true = float((b - values * found.value).norm() / b.norm())
    assert float(found.residual) == pytest.approx(true, rel=1e-3, abs=1e-13)
    assert (found.outcome is Outcome.CONVERGED) == (true <= 1e-12)


@pytest.mark.parametrize(("rtol", "sign"), [(0.1, 1), (0.01, -1), (1e-3, 1)])
def test_a_method_that_stops_early_is_not_converged(rtol: float, sign: int) -> None:
    """SciPy's MINRES stops by ‖r‖/(‖A‖‖x‖), here its first test problem."""
    side = torch.ones(39, dtype=F64)
    matrix = 2 * torch.eye(40, dtype=F64) - torch.diag(side, 1) - torch.diag(side, -1)
    b = torch.arange(40, dtype=F64)
    loose, tight = (
        CallableSolver(scipy_solver("minres", rtol=ask, maxiter=400), rtol=rtol).solve(
            lambda v: sign * matrix @ v, b
        )
        for ask in (rtol, 1e-10)
    )
    assert loose.outcome is Outcome.ITERATION_LIMIT
    assert float(loose.residual) > rtol
    assert tight.outcome is Outcome.CONVERGED
    assert float((b - sign * matrix @ tight.value).norm() / b.norm()) <= rtol


@every_method
def test_a_singular_inconsistent_system_is_not_solved(method: str) -> None:
    """H has no negative curvature. SciPy returns numbers of 1e158, or none."""
    h = torch.tensor([1.0, 2.0, 0.0], dtype=F64)
    found = as_solver(scipy_solver(method, maxiter=200)).solve(
        lambda v: h * v, torch.ones(3, dtype=F64)
    )
    assert found.outcome in (Outcome.ITERATION_LIMIT, Outcome.NONFINITE)
    assert bool(torch.isfinite(found.value).all())
    assert float(found.residual) >= 3**-0.5 - 1e-9


def ridge_regression() -> tuple[Any, Any, Tensor, Tensor, Tensor]:
    """(f, g, θ, x*, ∇F): x*(θ) = (AᵀA + e^θ I)⁻¹Aᵀy, differentiated by hand."""
    a = normal(12, 5)
    y = normal(12, seed=1)
    target = normal(5, seed=2)
    theta = torch.tensor(0.3, dtype=F64)
    inverse = torch.linalg.inv(a.T @ a + theta.exp() * torch.eye(5, dtype=F64))
    x = inverse @ a.T @ y

    def upper(_: Tensor, x: Tensor) -> Tensor:
        return 0.5 * (x - target).square().sum()

    def lower(theta: Tensor, x: Tensor) -> Tensor:
        return 0.5 * (a @ x - y).square().sum() + 0.5 * theta.exp() * x.square().sum()

    return upper, lower, theta, x, -(x - target) @ inverse @ (theta.exp() * x)


@every_method
def test_hypergradients_of_a_ridge_regression(method: str) -> None:
    upper, lower, theta, x, expected = ridge_regression()
    found = hypergradient(upper, lower, theta, x, solver=scipy_solver(method, rtol=1e-8))
    assert found.outcome is Outcome.CONVERGED
    assert_same(found.value, expected, rtol=1e-4)


def test_the_lower_solution_of_a_ridge_regression_is_differentiated() -> None:
    upper, lower, theta, x, expected = ridge_regression()
    solver = scipy_solver("gmres", rtol=1e-8)
    solution = lower_solution(lower, theta.requires_grad_(), x, solver=solver)
    upper(theta, solution).backward()
    assert_same(theta.grad, expected, rtol=1e-4)


def test_a_component_takes_it_as_a_callable_solver() -> None:
    solver = CallableSolver(scipy_solver("lgmres", rtol=1e-8), rtol=1e-6)
    assert Implicit(solver=solver).solver is solver


def test_the_pair_that_scipy_returns_is_no_solution() -> None:
    upper, lower, theta, x, _ = ridge_regression()
    with rejects("wrong-result", "solver"):
        hypergradient(
            upper,
            lower,
            theta,
            x,
            solver=lambda matvec, b: scipy.sparse.linalg.cg(
                scipy.sparse.linalg.LinearOperator(
                    (5, 5), matvec=lambda v: matvec(torch.tensor(v)).numpy()
                ),
                b.numpy(),
            ),
        )


def test_no_hypergradient_is_made_of_a_direction_without_curvature() -> None:
    estimate = hypergradient(
        lambda theta, x: x.sum(),
        lambda theta, x: 0.5 * (x[0] - theta[0]) ** 2 + (x[1] - theta[1]) ** 2,
        torch.ones(2, dtype=F64),
        torch.tensor([1.0, 1.0, 0.0], dtype=F64),
        solver=CG(),
    )
    assert estimate.outcome is Outcome.STAGNATED
    assert float(estimate.value.norm()) < 10
