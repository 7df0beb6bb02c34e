"""What the linear solvers promise: value, outcome and true residual, on the systems where others
fail too.
"""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import rejects
from torch import Tensor

from hgms.contrib import LancBiO, RecycledCG, Roulette
from hgms.solvers import CG, MINRES, FixedPoint, Identity, Neumann, NystromCG, ScipySolver
from hgms_core import CallableSolver, Inexact, LinearSolver, LinearSystem, Outcome

EPS = torch.finfo(torch.float64).eps
KRYLOV = (CG(max_steps=500), NystromCG(rank=4, max_steps=500), MINRES(max_steps=500))
SOLVERS = (*KRYLOV, FixedPoint(lr=0.4, max_steps=150), Neumann(lr=0.4, steps=60), Identity())
ids = [solver.name for solver in SOLVERS]
every_solver = pytest.mark.parametrize("solver", SOLVERS, ids=ids)
every_krylov = pytest.mark.parametrize("solver", KRYLOV, ids=ids[:3])
DIAGONAL = torch.tensor([1.0, 2.0, 0.0, -0.5], dtype=torch.float64)


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def symmetric(eigenvalues: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = len(eigenvalues)
    q = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator)).Q
    matrix = (q * eigenvalues) @ q.T
    return (matrix + matrix.T) / 2


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Operator:
    """A·v for one matrix or a batch of them, counting its calls."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.calls = 0

    def __call__(self, v: Tensor) -> Tensor:
        self.calls += 1
        return (self.matrix @ v[..., None]).squeeze(-1)


def relative_residual(matrix: Tensor, solution_value: Tensor, b: Tensor) -> Tensor:
    return (b - Operator(matrix)(solution_value)).norm(dim=-1) / b.norm(dim=-1)


def promises(
    solver: LinearSolver, matrix: Tensor, b: Tensor, x0: Tensor | None = None, rtol: float = 1e-6
):
    """Solve and check what holds for every system: finite, the inputs untouched, true residual,
    honest counts.
    """
    operator = Operator(matrix)
    before = (matrix.clone(), b.clone(), None if x0 is None else x0.clone())
    solution = solver.solve(operator, b, x0)
    for was, now in zip(before, (matrix, b, x0), strict=True):
        assert was is now is None or torch.equal(was.nan_to_num(9e9), now.nan_to_num(9e9))
    assert solution.value.shape == b.shape
    assert solution.value.dtype == b.dtype
    assert (
        solution.codes.shape
        == solution.residual.shape
        == solution.iterations.shape
        == solution.curvature.shape
        == b.shape[:-1]
    )
    assert solution.codes.dtype == torch.int64
    assert torch.isfinite(solution.value).all()
    assert torch.isfinite(solution.residual).all()
    assert solution.products == operator.calls
    if torch.isfinite(matrix).all() and torch.isfinite(b).all():
        direct = torch.where(b.norm(dim=-1) > 0, relative_residual(matrix, solution.value, b), 0.0)
        scale = 1 + torch.linalg.matrix_norm(matrix, 2) * solution.value.norm(dim=-1) / b.norm(
            dim=-1
        ).clamp_min(1e-300)
        torch.testing.assert_close(
            solution.residual, direct, rtol=1e-9, atol=float((100 * EPS * scale).max())
        )
        assert (solution.residual[solution.converged] <= rtol).all()
    return solution


eigenvalues = st.lists(st.floats(1e-3, 1.0), min_size=2, max_size=12).map(
    lambda some: vector(1.0, *some)
)
seeds = st.integers(0, 2**16)
quick = settings(max_examples=10, deadline=None)


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


class TestOptions:
    @pytest.mark.parametrize("solver", SOLVERS[:4], ids=ids[:4])
    def test_a_start_at_the_solution_takes_no_step(self, solver):
        matrix = symmetric(vector(1, 2, 3, 4), 0)
        b = normal(4, seed=1)
        exact = torch.linalg.solve(matrix, b)
        solution = promises(solver, matrix, b, x0=exact)
        assert solution.iterations == 0
        assert solution.outcome is Outcome.CONVERGED
        torch.testing.assert_close(solution.value, exact, rtol=1e-15, atol=0)
        if not isinstance(solver, NystromCG):
            assert solution.products == 1

    @every_krylov
    def test_a_good_start_saves_steps(self, solver):
        matrix = symmetric(torch.logspace(-3, 0, 40, dtype=torch.float64), 0)
        b = normal(40, seed=1)
        cold = promises(solver, matrix, b)
        warm = promises(solver, matrix, b + 1e-4 * matrix @ normal(40, seed=2), x0=cold.value)
        assert warm.iterations < cold.iterations

    @every_krylov
    def test_a_start_worse_than_zero_is_dropped(self, solver):
        matrix = symmetric(vector(1, 2, 3, 4), 0)
        b = normal(4, seed=1)
        cold = solver.solve(Operator(matrix), b)
        warm = solver.solve(Operator(matrix), b, 100 * normal(4, seed=2))
        assert torch.equal(cold.value, warm.value)

    @pytest.mark.parametrize(
        ("plain", "ridged"),
        [
            (CG(), CG(ridge=0.3)),
            (MINRES(), MINRES(ridge=0.3)),
            (FixedPoint(lr=0.2), FixedPoint(lr=0.2, ridge=0.3)),
            (Neumann(lr=0.2), Neumann(lr=0.2, ridge=0.3)),
            (Identity(), Identity(ridge=0.3)),
        ],
        ids=lambda s: s.name,
    )
    def test_a_ridge_is_added_to_the_matrix(self, plain, ridged):
        matrix = symmetric(vector(0, 1, 2, 3), 0)
        b = normal(4, seed=1)
        one = ridged.solve(Operator(matrix), b)
        other = plain.solve(Operator(matrix + 0.3 * torch.eye(4, dtype=torch.float64)), b)
        torch.testing.assert_close(one.value, other.value)
        torch.testing.assert_close(one.residual, other.residual, rtol=1e-6, atol=1e-12)
        assert torch.equal(one.codes, other.codes)

    def test_a_ridge_with_nystrom(self):
        matrix = symmetric(vector(0, 1, 2, 3), 0)
        b = normal(4, seed=1)
        value = NystromCG(rank=2, ridge=0.3, rtol=1e-12).solve(Operator(matrix), b).value
        torch.testing.assert_close(
            value, torch.linalg.solve(matrix + 0.3 * torch.eye(4, dtype=torch.float64), b)
        )

    @pytest.mark.parametrize("solver", [CG(clip=0.25), NystromCG(clip=0.25)], ids=lambda s: s.name)
    def test_clip(self, solver):
        matrix = torch.stack([torch.eye(2, dtype=torch.float64)] * 2)
        b = torch.stack([vector(3, 4), vector(0.03, 0.04)])
        solution = solver.solve(Operator(matrix), b)
        torch.testing.assert_close(
            solution.value, torch.stack([vector(0.15, 0.2), vector(0.03, 0.04)])
        )
        assert (solution.residual < 1e-12).all()  # that of the unclipped solution
        assert solution.outcome is Outcome.CONVERGED

    @every_krylov
    def test_absolute_tolerance(self, solver):
        matrix = symmetric(torch.logspace(-3, 0, 40, dtype=torch.float64), 0)
        b = 100 * normal(40, seed=1)
        solution = type(solver)(rtol=1e-12, atol=0.5, max_steps=500).solve(Operator(matrix), b)
        assert solution.outcome is Outcome.CONVERGED
        size = (b - matrix @ solution.value).norm()
        assert 0.01 < size <= 0.5

    def test_identity_scale_and_residual(self):
        solution = promises(Identity(scale=0.25), torch.diag(vector(2, 4)), vector(3, 4))
        assert torch.equal(solution.value, vector(0.75, 1))
        torch.testing.assert_close(solution.residual, vector(0.3).squeeze())
        assert solution.outcome is Outcome.NOT_SOLVED
        assert Identity(scale=0.5).solve(lambda v: 2 * v, vector(1, 2)).outcome is Outcome.CONVERGED

    @pytest.mark.parametrize(
        ("build", "code", "field"),
        [
            (lambda: CG(rtol=-1.0), "out-of-range", "rtol"),
            (lambda: CG(ridge=-1e-3), "out-of-range", "ridge"),
            (lambda: CG(max_steps=0), "out-of-range", "max_steps"),
            (lambda: CG(atol=-1.0), "out-of-range", "atol"),
            (lambda: CG(clip=0.0), "out-of-range", "clip"),
            (lambda: NystromCG(rank=0), "out-of-range", "rank"),
            (lambda: NystromCG(rtol=-1.0), "out-of-range", "rtol"),
            (lambda: MINRES(rtol=0.0), "out-of-range", "rtol"),
            (lambda: Neumann(lr=0.0), "out-of-range", "lr"),
            (lambda: Neumann(steps=0), "out-of-range", "steps"),
            (lambda: FixedPoint(rtol=float("nan")), "not-finite", "rtol"),
            (lambda: Identity(scale=-2.0), "out-of-range", "scale"),
        ],
    )
    def test_bad_numbers_are_refused(self, build, code, field):
        with rejects(code, field):
            build()

    @pytest.mark.parametrize("build", [CG, NystromCG, MINRES, FixedPoint])
    def test_a_fraction_of_a_step_is_refused(self, build):
        with rejects("wrong-type", "max_steps"):
            build(max_steps=3.9)


class TestBatch:
    """N systems with N operators are N separate solves."""

    matrices = torch.stack(
        [
            symmetric(spectrum, seed)
            for seed, spectrum in enumerate(
                (
                    torch.ones(40, dtype=torch.float64),
                    torch.linspace(0.9, 1.1, 40, dtype=torch.float64),
                    torch.linspace(0.1, 1, 40, dtype=torch.float64),
                    torch.cat(
                        [
                            torch.full((20,), -0.5, dtype=torch.float64),
                            torch.linspace(0.8, 1, 20, dtype=torch.float64),
                        ]
                    ),
                    torch.cat(
                        [
                            torch.zeros(4, dtype=torch.float64),
                            torch.linspace(0.5, 1, 36, dtype=torch.float64),
                        ]
                    ),
                    torch.ones(40, dtype=torch.float64),
                    torch.ones(40, dtype=torch.float64),
                    torch.linspace(0.3, 1, 40, dtype=torch.float64),
                )
            )
        ]
    )

    def systems(self) -> tuple[Tensor, Tensor]:
        b = normal(8, 40, seed=3)
        b[5], b[6, 2] = 0, float("nan")
        matrices = self.matrices.clone()
        matrices[7, 3, 3] = float("inf")
        return matrices, b

    @every_solver
    @pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
    def test_equals_separate_solves(self, solver, warm):
        matrices, b = self.systems()
        x0 = 0.1 * normal(8, 40, seed=4) if warm else None
        together = promises(solver, matrices, b, x0)
        for i in range(8):
            alone = solver.solve(Operator(matrices[i]), b[i], None if x0 is None else x0[i])
            assert together.outcomes[i] is alone.outcome
            # how soon rounding is noticed depends on the order of the additions
            if alone.outcome is Outcome.STAGNATED:
                torch.testing.assert_close(
                    together.residual[i], alone.residual, rtol=1e-6, atol=1e-6
                )
                continue
            assert together.iterations[i] == alone.iterations
            torch.testing.assert_close(together.value[i], alone.value, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(together.residual[i], alone.residual, rtol=1e-6, atol=1e-10)
            torch.testing.assert_close(together.curvature[i], alone.curvature, rtol=1e-6, atol=1e-9)

    def test_the_outcomes_differ(self):
        outcomes = CG().solve(Operator(self.systems()[0]), self.systems()[1]).outcomes
        assert {Outcome.CONVERGED, Outcome.NEGATIVE_CURVATURE, Outcome.NONFINITE} <= set(outcomes)
        steps = CG().solve(Operator(self.matrices), normal(8, 40, seed=3)).iterations.tolist()
        assert len(set(steps)) > 3

    @every_krylov
    def test_a_finished_system_does_not_change(self, solver):
        """The slow system runs on for many steps; the fast one is what it was, bit for bit."""
        slow = torch.logspace(-2, 0, 12, dtype=torch.float64)
        slower = torch.logspace(-4, 0, 12, dtype=torch.float64)
        b = normal(2, 12, seed=5)
        results = []
        for spectrum in (slow, slower):
            matrices = torch.stack(
                [
                    symmetric(torch.linspace(1, 2, 12, dtype=torch.float64), 1),
                    symmetric(spectrum, 2),
                ]
            )
            results.append(solver.solve(Operator(matrices), b))
        assert results[0].iterations[0] == results[1].iterations[0]
        assert torch.equal(results[0].value[0], results[1].value[0])
        assert torch.equal(results[0].residual[0], results[1].residual[0])

    def test_the_loop_stops_when_all_are_done(self):
        operator = Operator(torch.stack([torch.eye(3, dtype=torch.float64)] * 4))
        CG(max_steps=1000).solve(operator, normal(4, 3, seed=0))
        assert operator.calls == 2  # one step, one check


class TestNystrom:
    def test_fewer_products_in_all_on_a_decaying_spectrum(self):
        spectrum = 1e3 * torch.arange(1, 401, dtype=torch.float64) ** -3
        b = normal(400, seed=1)
        counts = {}
        for solver in (
            CG(ridge=1e-3, max_steps=3000),
            NystromCG(rank=60, ridge=1e-3, max_steps=3000),
        ):
            solution = solver.solve(lambda v: spectrum * v, b)
            assert solution.outcome is Outcome.CONVERGED
            torch.testing.assert_close(solution.value, b / (spectrum + 1e-3), rtol=1e-3, atol=1e-3)
            counts[solver.name] = solution.products
        assert counts["nystrom"] <= counts["cg"] / 2

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_solved_too(self, dtype):
        scale = torch.linspace(0.5, 2.0, 30, dtype=dtype)
        solution = NystromCG(rank=5, rtol=2e-2).solve(
            lambda v: scale * v, torch.ones(30, dtype=dtype)
        )
        assert solution.outcome is Outcome.CONVERGED
        assert solution.value.dtype == dtype
        torch.testing.assert_close(solution.value.double(), 1 / scale.double(), rtol=0.1, atol=0.05)

    def test_full_rank_takes_one_step(self):
        matrix = symmetric(torch.logspace(-1, 2, 15, dtype=torch.float64), 0)
        b = normal(15, seed=1)
        solution = NystromCG(rank=50, ridge=0.1).solve(Operator(matrix), b)
        assert solution.iterations == 1
        assert solution.products == 15 + 2  # the sketch stops at the dimension; one step, one check

    def test_the_same_seed_gives_the_same_numbers_and_leaves_the_global_generator_alone(self):
        matrix = symmetric(torch.logspace(-3, 0, 40, dtype=torch.float64), 0)
        b = normal(40, seed=1)
        before = torch.get_rng_state()
        one, two = (NystromCG(rank=5, seed=3).solve(Operator(matrix), b) for _ in range(2))
        assert torch.equal(before, torch.get_rng_state())
        assert torch.equal(one.value, two.value)
        assert not torch.equal(
            one.value, NystromCG(rank=5, seed=4).solve(Operator(matrix), b).value
        )


class TestWhatIsNotCurvature:
    """Products with an error of their own, and steps behind a preconditioner."""

    H = vector(1.0, 0.5, 0.0)
    B = vector(1.0, 1.0, 1.0)

    @pytest.mark.parametrize("solver", [CG(), MINRES(), NystromCG(rank=2), RecycledCG(), LancBiO()])
    @pytest.mark.parametrize("seed", range(5))
    def test_the_error_of_the_products_is_not(self, solver: LinearSolver, seed: int) -> None:
        """MINRES returned 2e10 along the direction that H does not see."""
        noise = 1e-8 * normal(3, 3, seed=seed)
        product = Inexact(lambda v: self.H * v + noise @ v, 1e-7)
        solution = solver.solve(product, self.B)
        assert solution.outcome is Outcome.STAGNATED
        assert float(solution.residual) <= (2 if isinstance(solver, LancBiO) else 1)
        assert float(solution.value.norm()) < 20
        if isinstance(solver, MINRES):
            assert float(solution.residual) == pytest.approx(3**-0.5, rel=1e-4)

    def test_a_long_step_behind_a_preconditioner_is_not_kept(self) -> None:
        """The residual was 435 times that of zero."""
        h = vector(1.0, 0.01, -0.001)
        solution = NystromCG(rank=2).solve(lambda v: h * v, self.B)
        assert solution.outcome is Outcome.NEGATIVE_CURVATURE
        assert float(solution.residual) <= 1

    def test_an_exact_operator_has_the_precision_of_its_numbers(self) -> None:
        for dtype in (torch.float32, torch.float64):
            system = LinearSystem.of(lambda v: v, torch.ones(2, dtype=dtype))
            assert system.precision == torch.finfo(dtype).eps


EVERY = [
    *SOLVERS,
    RecycledCG(),
    LancBiO(),
    Roulette(),
    ScipySolver(),
    CallableSolver(lambda _, b: b),
]


@pytest.mark.parametrize("solver", EVERY, ids=lambda each: each.name)
@pytest.mark.parametrize("dtype", [torch.complex128, torch.int64])
def test_a_right_hand_side_must_be_real(solver: LinearSolver, dtype: torch.dtype) -> None:
    with rejects("wrong-dtype", "b"):
        solver.solve(lambda v: v, torch.ones(2, dtype=dtype))
    with rejects("wrong-shape", "b"):
        solver.solve(lambda v: v, torch.ones(0))


@pytest.mark.parametrize(
    ("component", "option"),
    [(CG, "ridge"), (CG, "rtol"), (CG, "clip"), (Neumann, "lr"), (FixedPoint, "lr")],
)
def test_settings_are_finite(component: type, option: str) -> None:
    for value in (float("inf"), -float("inf")):
        with rejects("out-of-range", option):
            component(**{option: value})
