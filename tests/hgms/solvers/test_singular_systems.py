"""What the linear solvers promise on singular and indefinite systems, and where numbers end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from support.helpers import F64
from support.solver_systems import (
    DIAGONAL,
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

EYE = torch.eye(3, dtype=F64)
ANY = float("nan")  # along a direction that the matrix does not see


@pytest.mark.parametrize(
    ("solver", "b", "outcome", "expected"),
    [
        # b has a component in the null space: p becomes a null vector, and the best iterate before
        # that is returned
        (CG(max_steps=1000), (1, 1, 1, 0), Outcome.STAGNATED, (1, 1, 1, 0)),
        (CG(), (1, 1, 0, 0), Outcome.CONVERGED, (1, 0.5, 0, 0)),
        (CG(), (1, 1, 0, 1), Outcome.NEGATIVE_CURVATURE, (1.2, 1.2, 0, 1.2)),
        (MINRES(rtol=1e-12), (1, 1, 0, 1), Outcome.CONVERGED, (1, 0.5, 0, -2)),
        # a least-squares solution
        (MINRES(), (1, 1, 1, 0), Outcome.STAGNATED, (1, 0.5, ANY, 0)),
    ],
)
def test_solutions_by_hand(solver: Any, b: Any, outcome: Outcome, expected: Any) -> None:
    solution = promises(solver, torch.diag(DIAGONAL), vector(*b))
    assert solution.outcome is outcome
    wanted = vector(*expected)
    known = ~wanted.isnan()
    torch.testing.assert_close(solution.value[known], wanted[known])
    if outcome is Outcome.NEGATIVE_CURVATURE:
        # one step of 3/2.5 along b; then p = r + (r·r/3)p has pᵀAp < 0
        assert solution.iterations == 1
        r = vector(-0.2, -1.4, 0, 1.6)
        p = r + r.dot(r) / 3 * vector(1, 1, 0, 1)
        torch.testing.assert_close(solution.curvature, (p * DIAGONAL * p).sum() / p.dot(p))
        assert solution.curvature < 0


def test_zero_is_returned_where_no_step_helps() -> None:
    for solver in (CG(), NystromCG(), MINRES()):
        solution = promises(solver, 0 * EYE, vector(1, 2, 3))
        assert solution.outcome is Outcome.STAGNATED
        assert not solution.value.any()
    negative = CG().solve(lambda v: -v, vector(1, 2))
    assert negative.outcome is Outcome.NEGATIVE_CURVATURE
    assert not negative.value.any()
    assert (float(negative.residual), int(negative.iterations)) == (1, 0)


@every_krylov
@quick
@given(spectrum=eigenvalues, null=st.integers(1, 4), seed=seeds)
def test_singular_systems_are_solved_or_said_to_be_inconsistent(
    solver: Any, spectrum: Tensor, null: int, seed: int
) -> None:
    matrix = symmetric(torch.cat([torch.zeros(null, dtype=F64), spectrum]), seed)
    b = normal(len(matrix), seed=seed + 1)
    # in the range, so it is the least-norm solution
    exact = matrix @ b
    solution = promises(solver, matrix, matrix @ exact)
    assert solution.outcome is Outcome.CONVERGED
    # a preconditioner moves the iterates out of the range
    if not isinstance(solver, NystromCG):
        error = (solution.value - exact).norm()
        assert error <= 1.1e-6 * float(1 / spectrum.min()) * exact.norm() + 1e-12
    outside = promises(solver, matrix, b)
    nearest = torch.linalg.lstsq(matrix, b, rcond=1e-9, driver="gelsd").solution
    distance = (b - matrix @ nearest).norm() / b.norm()
    if distance > 1e-3:
        assert outside.outcome in (Outcome.STAGNATED, Outcome.NEGATIVE_CURVATURE)
        assert outside.residual >= distance * (1 - 1e-9)
    if isinstance(solver, MINRES):
        torch.testing.assert_close(outside.residual, distance, rtol=1e-5, atol=2e-6)


@every_solver
@quick
@given(
    spectrum=st.lists(st.floats(-1, 1), min_size=2, max_size=12).map(lambda some: vector(*some)),
    seed=seeds,
)
def test_any_symmetric_matrix_keeps_the_promises(solver: Any, spectrum: Tensor, seed: int) -> None:
    solution = promises(solver, symmetric(spectrum, seed), normal(len(spectrum), seed=seed + 1))
    if solution.outcome is Outcome.NEGATIVE_CURVATURE:
        assert solution.curvature < 0
        assert spectrum.min() < 0


def test_divergence_returns_the_best_iterate() -> None:
    matrix, b = torch.diag(vector(1, 2)), vector(1, 0.01)
    iterates = [Neumann(lr=1.5, steps=k).solve(Operator(matrix), b) for k in (1, 2, 3, 4)]
    for solver in (FixedPoint(lr=1.5), Neumann(lr=1.5, steps=40)):
        solution = promises(solver, matrix, b)
        assert solution.outcome is Outcome.DIVERGED
        assert 0 < solution.residual < 1
        assert solution.residual <= min(each.residual for each in iterates)
    slow = FixedPoint(lr=1e-3).solve(lambda v: vector(1, -0.01) * v, vector(1e-6, 1))
    assert slow.outcome is Outcome.DIVERGED


def test_a_solution_within_the_tolerance_has_not_diverged_whatever_noise_the_operator_has() -> None:
    scale = torch.linspace(0.5, 1.5, 6, dtype=F64)
    noise = 1e-9 * normal(6, seed=2)

    # as an operator by differences: its noise does not shrink with v's last digits
    def noisy(v: Tensor) -> Tensor:
        nonlocal noise
        noise = noise.roll(1) * -1
        return scale * v + noise

    solution, tight = (
        Neumann(lr=0.8, steps=60, rtol=rtol).solve(noisy, torch.ones(6, dtype=F64))
        for rtol in (1e-6, 1e-12)
    )
    assert solution.outcome is Outcome.CONVERGED is not tight.outcome
    assert solution.residual <= 1e-6
    torch.testing.assert_close(solution.value, 1 / scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ill_conditioned_singular_systems_do_not_blow_up(dtype: torch.dtype) -> None:
    spectrum = torch.logspace(-4, 0, 60, dtype=F64)
    spectrum[:10] = 0
    matrix, b = symmetric(spectrum, 0).to(dtype), normal(60, seed=1).to(dtype)
    for solver in (CG(max_steps=2000), NystromCG(max_steps=2000), MINRES(max_steps=2000)):
        solution = solver.solve(Operator(matrix), b)
        assert solution.outcome is Outcome.STAGNATED
        assert solution.residual <= 1
        assert solution.value.norm() < 1e5 * b.norm()


# --- precision


@every_krylov
def test_a_thousand_iterations_past_convergence(solver: Any) -> None:
    matrix = symmetric(torch.linspace(1, 10, 20, dtype=F64), 1)
    b = normal(20, seed=2)
    solution = promises(evolve(solver, rtol=1e-300, max_steps=1000), matrix, b)
    assert solution.outcome in (Outcome.STAGNATED, Outcome.CONVERGED)
    exact = torch.linalg.solve(matrix, b)
    torch.testing.assert_close(solution.value, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.extended
@every_krylov
def test_what_single_precision_reaches_is_true_and_what_it_cannot_is_not_claimed(
    solver: Any,
) -> None:
    def direct(matrix: Tensor, value: Tensor, b: Tensor) -> Tensor:
        return relative_residual(matrix.double(), value.double(), b.double()).float()

    for seed in range(4):
        matrix = symmetric(torch.logspace(-2, 0, 50, dtype=F64), seed).float()
        b = normal(50, seed=seed + 100).float()
        solution = evolve(solver, rtol=1e-5).solve(Operator(matrix), b)
        assert solution.outcome is Outcome.CONVERGED
        assert direct(matrix, solution.value, b) <= 1.05e-5
    matrix, b = (
        symmetric(torch.logspace(-4, 0, 50, dtype=F64), 1).float(),
        normal(50, seed=2).float(),
    )
    below = evolve(solver, rtol=1e-12, max_steps=2000).solve(Operator(matrix), b)
    assert below.outcome is Outcome.STAGNATED
    true = direct(matrix, below.value, b)
    torch.testing.assert_close(below.residual, true, rtol=0.5, atol=0)
    assert below.residual < 1e-3


# --- what is not finite, and starts


@pytest.mark.parametrize(
    "solver", [CG(max_steps=3), MINRES(max_steps=3), FixedPoint(), Neumann()], ids=lambda s: s.name
)
def test_the_last_finite_iterate_is_returned(solver: Any) -> None:
    matrix = symmetric(vector(1, 2, 3, 4), 0)
    b = normal(4, seed=1)
    operator = Operator(matrix)

    def breaks_at_the_third(v: Tensor) -> Tensor:
        return operator(v) * (float("nan") if operator.calls >= 3 else 1)

    solution = solver.solve(breaks_at_the_third, b)
    assert (solution.outcome, int(solution.iterations)) == (Outcome.NONFINITE, 2)
    torch.testing.assert_close(solution.residual, relative_residual(matrix, solution.value, b))
    assert solution.residual < 1


@every_solver
def test_a_start_that_is_of_no_use_is_dropped(solver: Any) -> None:
    b = vector(1, 2, 3)
    started = promises(solver, EYE, b, x0=vector(float("nan"), 0, 0))
    torch.testing.assert_close(started.value, solver.solve(lambda v: v, b).value)
    zero = solver.solve(lambda v: v, 0 * b, b)
    assert (zero.outcome, bool(zero.value.any())) == (Outcome.CONVERGED, False)
