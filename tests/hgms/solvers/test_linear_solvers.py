"""What the linear solvers promise: value, outcome and true residual, on positive definite
systems.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from attrs import evolve
from hypothesis import given
from support.helpers import F64
from support.solver_systems import (
    KRYLOV,
    Operator,
    eigenvalues,
    every_krylov,
    every_solver,
    normal,
    promises,
    quick,
    seeds,
    symmetric,
    vector,
)
from torch import Tensor

from hgms.solvers import CG, MINRES, FixedPoint, Neumann
from hgms_core import Outcome

SPREAD = torch.linspace(0.5, 4, 7, dtype=F64)


@every_solver
@quick
@given(spectrum=eigenvalues, seed=seeds)
def test_converged_means_solved(solver: Any, spectrum: Tensor, seed: int) -> None:
    matrix = symmetric(spectrum, seed)
    b = normal(len(spectrum), seed=seed + 1)
    solution = promises(solver, matrix, b)
    exact = torch.linalg.solve(matrix, b)
    if solution.outcome is Outcome.CONVERGED:
        error = (solution.value - exact).norm() / exact.norm()
        assert error <= 1e-6 * float(spectrum.max() / spectrum.min()) * 1.01
    else:
        assert solver not in KRYLOV
        assert solution.outcome in (Outcome.ITERATION_LIMIT, Outcome.NOT_SOLVED)
    assert solution.curvature > 0


@every_krylov
def test_it_agrees_with_torch_and_scipy(solver: Any) -> None:
    matrix = symmetric(torch.logspace(-3, 0, 40, dtype=F64), 3)
    b = normal(40, seed=4)
    value = evolve(solver, rtol=1e-12).solve(Operator(matrix), b).value
    torch.testing.assert_close(value, torch.linalg.solve(matrix, b), rtol=1e-8, atol=1e-8)
    reference = getattr(scipy.sparse.linalg, "minres" if solver.name == "minres" else "cg")
    theirs, info = reference(matrix.numpy(), b.numpy(), rtol=1e-12, maxiter=500)
    assert info == 0
    np.testing.assert_allclose(value.numpy(), theirs, rtol=1e-6, atol=1e-6)


# --- the iterates themselves, against the exact minimiser over span{b, Ab, …}


def krylov(matrix: Tensor, start: Tensor, steps: int) -> Tensor:
    powers = [torch.linalg.matrix_power(matrix, k) @ start for k in range(steps)]
    return torch.linalg.qr(torch.stack(powers, 1)).Q


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("behind", [False, True], ids=["plain", "preconditioned"])
def test_cg_minimises_the_energy(steps: int, warm: bool, behind: bool) -> None:
    matrix = symmetric(SPREAD, 5)
    b = normal(7, seed=6)
    inverse = 1 / torch.linspace(1, 3, 7, dtype=F64) if behind else torch.ones(7, dtype=F64)
    x0 = torch.linalg.solve(matrix, b) + 0.1 * normal(7, seed=7) if warm else torch.zeros_like(b)
    r = b - matrix @ x0
    basis = krylov(inverse[:, None] * matrix, inverse * r, steps)
    exact = x0 + basis @ torch.linalg.solve(basis.T @ matrix @ basis, basis.T @ r)
    solver = CG(max_steps=steps, preconditioner=(lambda r: inverse * r) if behind else None)
    solution = solver.solve(Operator(matrix), b, x0 if warm else None)
    torch.testing.assert_close(solution.value, exact, rtol=1e-12, atol=1e-12)
    assert (solution.outcome, int(solution.iterations)) == (Outcome.ITERATION_LIMIT, steps)
    assert solution.products == steps + warm  # a solve that is cut short checks no claim


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_minres_minimises_the_residual(steps: int) -> None:
    matrix = symmetric(vector(-3, -1, -0.5, 1, 2, 4, 6), 5)
    b = normal(7, seed=6)
    basis = krylov(matrix, b, steps)
    exact = basis @ torch.linalg.lstsq(matrix @ basis, b).solution
    solution = MINRES(max_steps=steps).solve(Operator(matrix), b)
    torch.testing.assert_close(solution.value, exact, rtol=1e-11, atol=1e-11)


def test_cg_takes_as_many_steps_as_there_are_eigenvalues() -> None:
    matrix = symmetric(vector(1, 1, 1, 2, 2, 5, 5, 5), 0)
    assert CG(rtol=1e-10).solve(Operator(matrix), normal(8, seed=1)).iterations == 3
    diagonal = torch.logspace(-8, 0, 20, dtype=F64)
    exact = CG(preconditioner=lambda r: r / diagonal)
    solution = exact.solve(lambda v: diagonal * v, normal(20, seed=0))
    assert (solution.outcome, int(solution.iterations)) == (Outcome.CONVERGED, 1)


def test_an_indefinite_preconditioner_is_noticed() -> None:
    solution = CG(preconditioner=lambda r: -r).solve(lambda v: v * vector(1, 2, 3), vector(1, 1, 1))
    assert solution.outcome is Outcome.STAGNATED
    assert torch.isfinite(solution.value).all()


def test_neumann_and_fixed_point_are_the_series() -> None:
    matrix = symmetric(vector(0.1, 0.5, 1, 2), 8)
    b = normal(4, seed=9)
    eye = torch.eye(4, dtype=F64)
    factor = eye - 0.4 * (matrix + 0.3 * eye)
    series = 0.4 * sum(torch.linalg.matrix_power(factor, k) @ b for k in range(7))
    solution = Neumann(lr=0.4, steps=7, ridge=0.3).solve(Operator(matrix), b)
    torch.testing.assert_close(solution.value, series, rtol=1e-13, atol=1e-13)
    assert solution.products == solution.iterations == 7
    assert solution.outcome is Outcome.ITERATION_LIMIT
    until = FixedPoint(lr=0.4, rtol=1e-3).solve(Operator(matrix), b)
    assert until.outcome is Outcome.CONVERGED
    before, same = (
        Neumann(lr=0.4, steps=int(until.iterations) - k).solve(Operator(matrix), b) for k in (1, 0)
    )
    assert torch.equal(same.value, until.value)
    assert before.residual > 1e-3
