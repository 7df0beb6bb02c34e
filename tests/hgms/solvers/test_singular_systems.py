"""What the linear solvers promise: value, outcome and true residual, on the systems where others
fail too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.solver_systems import (
    DIAGONAL,
    KRYLOV,
    Operator,
    eigenvalues,
    every_krylov,
    every_solver,
    normal,
    promises,
    quick,
    relative_residual,
    seeds,
    symmetric,
    vector,
)
from torch import Tensor

from hgms.solvers import CG, MINRES, FixedPoint, Neumann, NystromCG
from hgms_core import Outcome


class TestSingularAndIndefinite:
    @every_solver
    @pytest.mark.parametrize(
        "b",
        [(1.0, 1.0, 1.0, 0.0), (1.0, 1.0, 0.0, 1.0), (1.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0)],
    )
    def test_the_promises_hold(self, solver, b):
        promises(solver, torch.diag(DIAGONAL), vector(*b))

    def solve(self, solver, *b: float):
        return promises(solver, torch.diag(DIAGONAL), vector(*b))

    def test_cg_outside_the_range(self):
        """b has a component in the null space: p becomes a null vector, and the best iterate
        before that is returned.
        """
        solution = self.solve(CG(max_steps=1000), 1, 1, 1, 0)
        assert solution.outcome is Outcome.STAGNATED
        torch.testing.assert_close(solution.value, vector(1, 1, 1, 0))
        torch.testing.assert_close(solution.residual, vector(2 / 3).sqrt().squeeze())

    def test_cg_at_negative_curvature_returns_the_current_iterate(self):
        """b = (1,1,0,1): one step of 3/2.5 along b; then p = r + (r·r/3)p has r =
        (-0.2,-1.4,0,1.6) and pᵀAp < 0.
        """
        solution = self.solve(CG(), 1, 1, 0, 1)
        assert solution.outcome is Outcome.NEGATIVE_CURVATURE
        assert solution.iterations == 1
        torch.testing.assert_close(solution.value, vector(1.2, 1.2, 0, 1.2))
        r = vector(-0.2, -1.4, 0, 1.6)
        p = r + r.dot(r) / 3 * vector(1, 1, 0, 1)
        torch.testing.assert_close(solution.curvature, (p * DIAGONAL * p).sum() / p.dot(p))
        assert solution.curvature < 0

    def test_cg_at_negative_curvature_from_the_start(self):
        solution = CG().solve(lambda v: -v, vector(1, 2))
        assert solution.outcome is Outcome.NEGATIVE_CURVATURE
        assert torch.equal(solution.value, vector(0, 0))
        assert solution.residual == 1
        assert solution.iterations == 0

    def test_cg_inside_the_range_of_an_indefinite_matrix(self):
        solution = self.solve(CG(), 1, 1, 0, 0)
        assert solution.outcome is Outcome.CONVERGED
        torch.testing.assert_close(solution.value, vector(1, 0.5, 0, 0))

    def test_minres_solves_indefinite_systems(self):
        solution = self.solve(MINRES(rtol=1e-12), 1, 1, 0, 1)
        assert solution.outcome is Outcome.CONVERGED
        torch.testing.assert_close(solution.value, vector(1, 0.5, 0, -2))

    def test_minres_finds_a_least_squares_solution(self):
        solution = self.solve(MINRES(), 1, 1, 1, 0)
        assert solution.outcome is Outcome.STAGNATED
        torch.testing.assert_close(solution.value[[0, 1, 3]], vector(1, 0.5, 0))
        torch.testing.assert_close(solution.residual, vector(1 / 3).sqrt().squeeze())

    def test_the_zero_matrix(self):
        for solver in (CG(), NystromCG(), MINRES()):
            solution = promises(solver, torch.zeros(3, 3, dtype=torch.float64), vector(1, 2, 3))
            assert solution.outcome is Outcome.STAGNATED
            assert torch.equal(solution.value, vector(0, 0, 0))

    @every_krylov
    @quick
    @given(spectrum=eigenvalues, null=st.integers(1, 4), seed=seeds)
    def test_singular_and_consistent(self, solver, spectrum, null, seed):
        matrix = symmetric(torch.cat([torch.zeros(null, dtype=torch.float64), spectrum]), seed)
        # in the range, so it is the least-norm solution
        exact = matrix @ normal(len(matrix), seed=seed + 1)
        solution = promises(solver, matrix, matrix @ exact)
        assert solution.outcome is Outcome.CONVERGED
        # a preconditioner moves the iterates out of the range
        if not isinstance(solver, NystromCG):
            assert (solution.value - exact).norm() <= 1.1e-6 * float(
                1 / spectrum.min()
            ) * exact.norm() + 1e-12

    @every_krylov
    @quick
    @given(spectrum=eigenvalues, null=st.integers(1, 4), seed=seeds)
    def test_singular_and_inconsistent(self, solver, spectrum, null, seed):
        matrix = symmetric(torch.cat([torch.zeros(null, dtype=torch.float64), spectrum]), seed)
        b = normal(len(matrix), seed=seed + 1)
        solution = promises(solver, matrix, b)
        distance = (
            b - matrix @ torch.linalg.lstsq(matrix, b, rcond=1e-9, driver="gelsd").solution
        ).norm() / b.norm()
        if distance > 1e-3:
            assert solution.outcome in (Outcome.STAGNATED, Outcome.NEGATIVE_CURVATURE)
            assert solution.residual >= distance * (1 - 1e-9)
        if isinstance(solver, MINRES):
            torch.testing.assert_close(solution.residual, distance, rtol=1e-5, atol=2e-6)

    @every_solver
    @quick
    @given(
        spectrum=st.lists(st.floats(-1, 1), min_size=2, max_size=12).map(
            lambda some: vector(*some)
        ),
        seed=seeds,
    )
    def test_any_symmetric_matrix_keeps_the_promises(self, solver, spectrum, seed):
        solution = promises(solver, symmetric(spectrum, seed), normal(len(spectrum), seed=seed + 1))
        if solution.outcome is Outcome.NEGATIVE_CURVATURE:
            assert solution.curvature < 0
            assert spectrum.min() < 0

    def test_divergence_returns_the_best_iterate(self):
        for solver in (FixedPoint(lr=1.5), Neumann(lr=1.5, steps=40)):
            solution = promises(solver, torch.diag(vector(1, 2)), vector(1, 0.01))
            assert solution.outcome is Outcome.DIVERGED
            assert 0 < solution.residual < 1
            iterates = [
                Neumann(lr=1.5, steps=k).solve(Operator(torch.diag(vector(1, 2))), vector(1, 0.01))
                for k in (1, 2, 3, 4)
            ]
            assert solution.residual <= min(each.residual for each in iterates)

    def test_slow_divergence_is_called_so(self):
        solution = FixedPoint(lr=1e-3).solve(lambda v: vector(1, -0.01) * v, vector(1e-6, 1))
        assert solution.outcome is Outcome.DIVERGED

    def test_a_solution_within_the_tolerance_has_not_diverged_whatever_noise_the_operator_has(self):
        scale = torch.linspace(0.5, 1.5, 6, dtype=torch.float64)
        noise = 1e-9 * normal(6, seed=2)

        # as an operator by differences: its noise does not shrink with v's last digits
        def noisy(v: Tensor) -> Tensor:
            nonlocal noise
            noise = noise.roll(1) * -1
            return scale * v + noise

        solution = Neumann(lr=0.8, steps=60).solve(noisy, torch.ones(6, dtype=torch.float64))
        assert solution.outcome is Outcome.CONVERGED
        assert solution.residual <= 1e-6
        torch.testing.assert_close(solution.value, 1 / scale, rtol=1e-6, atol=0)
        tight = Neumann(lr=0.8, steps=60, rtol=1e-12).solve(
            noisy, torch.ones(6, dtype=torch.float64)
        )
        assert tight.outcome is not Outcome.CONVERGED

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_ill_conditioned_singular_systems_do_not_blow_up(self, dtype):
        spectrum = torch.logspace(-4, 0, 60, dtype=torch.float64)
        spectrum[:10] = 0
        matrix = symmetric(spectrum, 0).to(dtype)
        b = normal(60, seed=1).to(dtype)
        for solver in (CG(max_steps=2000), NystromCG(max_steps=2000), MINRES(max_steps=2000)):
            solution = solver.solve(Operator(matrix), b)
            assert solution.outcome is Outcome.STAGNATED
            assert solution.residual <= 1
            assert solution.value.norm() < 1e5 * b.norm()


class TestPrecision:
    @every_krylov
    def test_a_thousand_iterations_past_convergence(self, solver):
        matrix = symmetric(torch.linspace(1, 10, 20, dtype=torch.float64), 1)
        b = normal(20, seed=2)
        solution = promises(type(solver)(rtol=1e-300, max_steps=1000), matrix, b)
        assert solution.outcome in (Outcome.STAGNATED, Outcome.CONVERGED)
        torch.testing.assert_close(
            solution.value, torch.linalg.solve(matrix, b), rtol=1e-12, atol=1e-12
        )

    @every_krylov
    def test_a_tolerance_below_single_precision(self, solver):
        matrix = symmetric(torch.logspace(-4, 0, 50, dtype=torch.float64), 1).float()
        b = normal(50, seed=2).float()
        solution = type(solver)(rtol=1e-12, max_steps=2000).solve(Operator(matrix), b)
        assert solution.outcome is Outcome.STAGNATED
        direct = relative_residual(matrix.double(), solution.value.double(), b.double()).float()
        torch.testing.assert_close(solution.residual, direct, rtol=0.5, atol=0)
        assert solution.residual < 1e-3

    @every_krylov
    def test_converged_in_single_precision_is_true(self, solver):
        for seed in range(10):
            matrix = symmetric(torch.logspace(-2, 0, 50, dtype=torch.float64), seed).float()
            b = normal(50, seed=seed + 100).float()
            solution = type(solver)(rtol=1e-5, max_steps=500).solve(Operator(matrix), b)
            assert solution.outcome is Outcome.CONVERGED
            assert (
                relative_residual(matrix.double(), solution.value.double(), b.double()) <= 1.05e-5
            )


class TestNonFinite:
    @every_solver
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_right_hand_side(self, solver, bad):
        solution = promises(solver, torch.eye(3, dtype=torch.float64), vector(1, bad, 0))
        assert solution.outcome is Outcome.NONFINITE
        assert torch.equal(solution.value, vector(0, 0, 0))
        assert solution.residual == 1

    @every_solver
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_operator(self, solver, bad):
        solution = promises(solver, torch.diag(vector(1, bad, 1)), vector(1, 1, 0))
        assert solution.outcome is Outcome.NONFINITE

    @pytest.mark.parametrize(
        "solver",
        [CG(max_steps=3), MINRES(max_steps=3), FixedPoint(), Neumann()],
        ids=lambda s: s.name,
    )
    def test_the_last_finite_iterate_is_returned(self, solver):
        matrix = symmetric(vector(1, 2, 3, 4), 0)
        b = normal(4, seed=1)
        calls = []

        def breaks_at_the_third(v: Tensor) -> Tensor:
            calls.append(v)
            return matrix @ v * (float("nan") if len(calls) >= 3 else 1)

        solution = solver.solve(breaks_at_the_third, b)
        assert solution.outcome is Outcome.NONFINITE
        assert solution.iterations == 2
        torch.testing.assert_close(solution.residual, relative_residual(matrix, solution.value, b))
        assert solution.residual < 1

    @every_solver
    def test_a_start_that_is_not_finite_is_dropped(self, solver):
        b = vector(1, 2, 3)
        solution = promises(
            solver, torch.eye(3, dtype=torch.float64), b, x0=vector(float("nan"), 0, 0)
        )
        torch.testing.assert_close(solution.value, solver.solve(lambda v: v, b).value)


class TestZero:
    @every_solver
    def test_zero_right_hand_side(self, solver):
        solution = promises(solver, symmetric(vector(1, 2, -3), 0), vector(0, 0, 0))
        assert solution.outcome is Outcome.CONVERGED
        assert torch.equal(solution.value, vector(0, 0, 0))
        assert solution.iterations == 0
        assert solution.residual == 0
        if solver in KRYLOV:
            assert solution.products == 0

    @every_solver
    def test_zero_right_hand_side_drops_the_start(self, solver):
        solution = solver.solve(lambda v: v, vector(0, 0), vector(1, 1))
        assert torch.equal(solution.value, vector(0, 0))
        assert solution.outcome is Outcome.CONVERGED
