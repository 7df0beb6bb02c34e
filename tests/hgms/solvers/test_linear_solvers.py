"""What the linear solvers promise: value, outcome and true residual, on the systems where others
fail too."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
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

from hgms.solvers import CG, MINRES, FixedPoint, Identity, Neumann
from hgms_core import Outcome


class TestPositiveDefinite:
    @every_solver
    @quick
    @given(spectrum=eigenvalues, seed=seeds)
    def test_converged_means_solved(self, solver, spectrum, seed):
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
    @quick
    @given(spectrum=eigenvalues, seed=seeds, exponent=st.integers(-30, 30))
    def test_the_scale_of_the_system_does_not_matter(self, solver, spectrum, seed, exponent):
        matrix = symmetric(spectrum, seed)
        b = normal(len(spectrum), seed=seed + 1)
        ours = solver.solve(Operator(matrix), b * 10.0**exponent)
        theirs = solver.solve(Operator(matrix), b)
        assert ours.outcome is Outcome.CONVERGED
        assert ours.iterations == theirs.iterations
        torch.testing.assert_close(ours.value / 10.0**exponent, theirs.value, rtol=1e-9, atol=1e-9)

    @every_krylov
    def test_single_precision_neither_overflows_nor_vanishes(self, solver):
        for scale in (1e-30, 1e30):
            b = torch.tensor([1.0, -2.0, 3.0]) * scale
            solution = solver.solve(lambda v: 2 * v, b)
            assert solution.outcome is Outcome.CONVERGED
            torch.testing.assert_close(solution.value / scale, torch.tensor([0.5, -1.0, 1.5]))

    @every_krylov
    def test_agrees_with_torch_and_scipy(self, solver):
        matrix = symmetric(torch.logspace(-3, 0, 40, dtype=torch.float64), 3)
        b = normal(40, seed=4)
        tight = type(solver)(rtol=1e-12, max_steps=500)
        value = tight.solve(Operator(matrix), b).value
        torch.testing.assert_close(value, torch.linalg.solve(matrix, b), rtol=1e-8, atol=1e-8)
        reference = (
            scipy.sparse.linalg.minres if solver.name == "minres" else scipy.sparse.linalg.cg
        )
        theirs, info = reference(matrix.numpy(), b.numpy(), rtol=1e-12, maxiter=500)
        assert info == 0
        np.testing.assert_allclose(value.numpy(), theirs, rtol=1e-6, atol=1e-6)

    @every_solver
    def test_twice_the_identity(self, solver):
        """The first iterate is the solution; a solver that returns the one before it returns 0."""
        b = vector(1.0, -2.0, 3.0)
        solution = promises(solver, 2 * torch.eye(3, dtype=torch.float64), b)
        if isinstance(solver, Identity):
            assert solution.outcome is Outcome.NOT_SOLVED
            assert torch.equal(solution.value, b)
        else:
            assert solution.outcome is Outcome.CONVERGED
            torch.testing.assert_close(solution.value, b / 2, rtol=2e-6, atol=0)
        if solver.name in ("cg", "minres"):
            assert solution.iterations == 1
            torch.testing.assert_close(solution.value, b / 2, rtol=1e-15, atol=0)

    def test_cg_solves_in_as_many_steps_as_there_are_eigenvalues(self):
        matrix = symmetric(vector(1, 1, 1, 2, 2, 5, 5, 5), 0)
        assert CG(rtol=1e-10).solve(Operator(matrix), normal(8, seed=1)).iterations == 3


class TestKrylov:
    """The iterates themselves, against the exact minimiser over span{b, Ab, …}."""

    @pytest.mark.parametrize("steps", [1, 2, 3])
    @pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
    def test_cg_minimises_the_energy(self, steps, warm):
        matrix = symmetric(torch.linspace(0.5, 4, 7, dtype=torch.float64), 5)
        b = normal(7, seed=6)
        x0 = (
            torch.linalg.solve(matrix, b) + 0.1 * normal(7, seed=7)
            if warm
            else torch.zeros(7, dtype=torch.float64)
        )
        r = b - matrix @ x0
        basis = torch.linalg.qr(
            torch.stack([torch.linalg.matrix_power(matrix, k) @ r for k in range(steps)], 1)
        ).Q
        exact = x0 + basis @ torch.linalg.solve(basis.T @ matrix @ basis, basis.T @ r)
        solution = CG(max_steps=steps).solve(Operator(matrix), b, x0 if warm else None)
        torch.testing.assert_close(solution.value, exact, rtol=1e-12, atol=1e-12)
        assert solution.outcome is Outcome.ITERATION_LIMIT
        assert solution.iterations == steps
        assert solution.products == steps + warm  # a solve that is cut short checks no claim

    @pytest.mark.parametrize("steps", [1, 2, 3, 4])
    def test_minres_minimises_the_residual(self, steps):
        matrix = symmetric(vector(-3, -1, -0.5, 1, 2, 4, 6), 5)
        b = normal(7, seed=6)
        basis = torch.linalg.qr(
            torch.stack([torch.linalg.matrix_power(matrix, k) @ b for k in range(steps)], 1)
        ).Q
        exact = basis @ torch.linalg.lstsq(matrix @ basis, b).solution
        solution = MINRES(max_steps=steps).solve(Operator(matrix), b)
        torch.testing.assert_close(solution.value, exact, rtol=1e-11, atol=1e-11)

    def test_preconditioned_cg_minimises_over_the_preconditioned_space(self):
        matrix = symmetric(torch.linspace(0.5, 4, 7, dtype=torch.float64), 5)
        b = normal(7, seed=6)
        inverse = 1 / torch.linspace(1, 3, 7, dtype=torch.float64)
        m = torch.diag(inverse)
        basis = torch.linalg.qr(torch.stack([m @ b, m @ matrix @ m @ b], 1)).Q
        exact = basis @ torch.linalg.solve(basis.T @ matrix @ basis, basis.T @ b)
        solution = CG(max_steps=2, preconditioner=lambda r: inverse * r).solve(Operator(matrix), b)
        torch.testing.assert_close(solution.value, exact, rtol=1e-12, atol=1e-12)

    def test_the_exact_preconditioner_takes_one_step(self):
        diagonal = torch.logspace(-8, 0, 20, dtype=torch.float64)
        solution = CG(preconditioner=lambda r: r / diagonal).solve(
            lambda v: diagonal * v, normal(20, seed=0)
        )
        assert solution.iterations == 1
        assert solution.outcome is Outcome.CONVERGED

    def test_an_indefinite_preconditioner_is_noticed(self):
        solution = CG(preconditioner=lambda r: -r).solve(
            lambda v: v * vector(1, 2, 3), vector(1, 1, 1)
        )
        assert solution.outcome is Outcome.STAGNATED
        assert torch.isfinite(solution.value).all()

    def test_neumann_is_the_series(self):
        matrix = symmetric(vector(0.1, 0.5, 1, 2), 8)
        b = normal(4, seed=9)
        factor = torch.eye(4, dtype=torch.float64) - 0.4 * (
            matrix + 0.3 * torch.eye(4, dtype=torch.float64)
        )
        series = 0.4 * sum(torch.linalg.matrix_power(factor, k) @ b for k in range(7))
        solution = Neumann(lr=0.4, steps=7, ridge=0.3).solve(Operator(matrix), b)
        torch.testing.assert_close(solution.value, series, rtol=1e-13, atol=1e-13)
        assert solution.products == solution.iterations == 7
        assert solution.outcome is Outcome.ITERATION_LIMIT

    def test_fixed_point_is_the_series_until_the_tolerance(self):
        matrix = symmetric(vector(0.5, 1, 2), 8)
        b = normal(3, seed=9)
        solution = FixedPoint(lr=0.4, rtol=1e-3).solve(Operator(matrix), b)
        assert solution.outcome is Outcome.CONVERGED
        series = Neumann(lr=0.4, steps=int(solution.iterations)).solve(Operator(matrix), b)
        assert torch.equal(series.value, solution.value)
        assert (
            Neumann(lr=0.4, steps=int(solution.iterations) - 1).solve(Operator(matrix), b).residual
            > 1e-3
        )
