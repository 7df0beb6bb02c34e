"""SciPy's and GPyTorch's solvers as linear solvers: the kit's checks for each method, and their
own answers beside ours.
"""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from attrs import evolve
from support.conformance import faults
from support.helpers import F64, assert_same, normal, spd
from support.solver_systems import Operator

from hgms.adapters import hypergradient
from hgms.solvers import CG, ScipySolver
from hgms.solvers.scipy_solver import Method
from hgms.testing import Check, parametrize_with_checks
from hgms_core import Outcome

METHODS = get_args(Method)
EVERY = [ScipySolver(method=method, max_steps=200) for method in METHODS]
every_solver = pytest.mark.parametrize(
    "solver", EVERY, ids=lambda each: getattr(each, "method", each.name)
)
every_method = pytest.mark.parametrize("method", METHODS)


@pytest.mark.extended
@pytest.mark.parametrize("solver", [EVERY[0], EVERY[-1]], ids=lambda each: each.name)
def test_it_passes_the_checks_of_the_kit(solver: Any) -> None:
    assert faults(solver) == {}


@pytest.mark.extended
@parametrize_with_checks(EVERY)
def test_conformance(component: Any, check: Check) -> None:
    check(component)


@every_method
def test_it_is_scipys_own_answer(method: Any) -> None:
    """The same iteration, called as SciPy documents it, on an indefinite system where the method
    is for those.
    """
    matrix = spd(20, seed=1) - (0.6 if method == "minres" else 0.0) * torch.eye(20, dtype=F64)
    b = normal(20, seed=2)
    operator = scipy.sparse.linalg.aslinearoperator(matrix.numpy())
    own, _ = getattr(scipy.sparse.linalg, method)(operator, b.numpy(), rtol=1e-10, maxiter=500)
    found = ScipySolver(method=method, rtol=1e-10, max_steps=500).solve(Operator(matrix), b)
    assert found.outcome is Outcome.CONVERGED
    np.testing.assert_allclose(found.value.numpy(), own, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.value, torch.linalg.solve(matrix, b), rtol=1e-7, atol=1e-8)


@every_solver
def test_converged_is_by_the_true_residual(solver: Any) -> None:
    """Condition 1e8 at a tolerance where recursions have drifted: either the claim holds or
    there is none.
    """
    values = torch.logspace(-4, 4, 60, dtype=F64)
    b = normal(60, seed=3)
    found = evolve(solver, rtol=1e-12, max_steps=400).solve(lambda v: values * v, b)
    true = float((b - values * found.value).norm() / b.norm())
    assert float(found.residual) == pytest.approx(true, rel=1e-3, abs=1e-13)
    assert (found.outcome is Outcome.CONVERGED) == (true <= 1e-12)


@every_solver
@pytest.mark.parametrize("limit", [7, 24])
def test_the_limit_counts_products_and_what_was_reached_is_kept(solver: Any, limit: int) -> None:
    """However the limit falls into a method's cycles or double steps."""
    operator = Operator(spd(40, seed=4, low=1e-3))
    found = evolve(solver, max_steps=limit, rtol=1e-12).solve(operator, normal(40, seed=5))
    assert found.outcome is Outcome.ITERATION_LIMIT
    assert int(found.iterations) <= limit
    assert found.products == operator.calls <= limit + 3
    # whose residual jumps far above the first one's on the way
    jumps = limit < 21 or getattr(solver, "method", "") == "cgs"
    assert float(found.residual) <= (1 if jumps else 0.9)


def test_conjugate_gradients_stop_before_negative_curvature() -> None:
    """The iterate before it, also where its residual is larger than the first."""
    matrix = spd(8, seed=1) - 0.6 * torch.eye(8, dtype=F64)
    b = normal(8, seed=11)
    solvers = (ScipySolver(method="cg"), CG(rtol=1e-6))
    found, ours = (each.solve(Operator(matrix), b) for each in solvers)
    assert found.outcome is ours.outcome is Outcome.NEGATIVE_CURVATURE
    torch.testing.assert_close(found.value, ours.value, rtol=1e-8, atol=1e-10)
    assert float(found.residual) == pytest.approx(
        float((b - matrix @ found.value).norm() / b.norm()), rel=1e-9
    )
    assert float(found.curvature) < 0


@every_solver
def test_hypergradients_of_a_ridge_regression(solver: Any) -> None:
    """x*(θ) = (AᵀA + e^θ I)⁻¹Aᵀy, differentiated by hand."""
    a = normal(12, 5)
    y = normal(12, seed=1)
    target = normal(5, seed=2)
    theta = torch.tensor(0.3, dtype=F64)
    inverse = torch.linalg.inv(a.T @ a + theta.exp() * torch.eye(5, dtype=F64))
    x = inverse @ a.T @ y
    found = hypergradient(
        lambda _, x: 0.5 * (x - target).square().sum(),
        lambda theta, x: 0.5 * (a @ x - y).square().sum() + 0.5 * theta.exp() * x.square().sum(),
        theta,
        x,
        solver=solver,
    )
    expected = -(x - target) @ inverse @ (theta.exp() * x)
    assert_same(found.value, expected, rtol=1e-4)


@every_solver
def test_a_singular_inconsistent_system_gets_no_vector_without_bound(solver: Any) -> None:
    """H has no negative curvature. Numbers of 1e158 came back, and that outcome."""
    h = torch.tensor([1.0, 2.0, 0.0], dtype=F64)
    solution = solver.solve(lambda v: h * v, torch.ones(3, dtype=F64))
    assert solution.outcome in (Outcome.STAGNATED, Outcome.ITERATION_LIMIT, Outcome.NONFINITE)
    assert float(solution.residual) <= 1
    assert float(solution.value.norm()) < 100
    if getattr(solver, "method", "") == "lgmres":  # a short correction, as far as the range goes
        torch.testing.assert_close(solution.value[:2], torch.tensor([1.0, 0.5], dtype=F64))
        assert float(solution.residual) == pytest.approx(3**-0.5)


def test_no_hypergradient_is_made_of_a_direction_without_curvature() -> None:
    estimate = hypergradient(
        lambda theta, x: x.sum(),
        lambda theta, x: 0.5 * (x[0] - theta[0]) ** 2 + (x[1] - theta[1]) ** 2,
        torch.ones(2, dtype=F64),
        torch.tensor([1.0, 1.0, 0.0], dtype=F64),
        solver=ScipySolver(method="cg"),
    )
    assert estimate.outcome is Outcome.STAGNATED
    assert float(estimate.value.norm()) < 10


@pytest.mark.parametrize(("rtol", "sign"), [(0.1, 1), (0.01, -1), (1e-3, 1)])
def test_a_method_that_stops_early_is_called_again(rtol: float, sign: int) -> None:
    """SciPy's MINRES stops by ‖r‖/(‖A‖‖x‖), and its own first test problem was STAGNATED."""
    side = torch.ones(39, dtype=F64)
    matrix = 2 * torch.eye(40, dtype=F64) - torch.diag(side, 1) - torch.diag(side, -1)
    b = torch.arange(40, dtype=F64)
    solution = ScipySolver(rtol=rtol, max_steps=400).solve(lambda v: sign * matrix @ v, b)
    assert solution.outcome is Outcome.CONVERGED
    assert float((b - sign * matrix @ solution.value).norm() / b.norm()) <= rtol
