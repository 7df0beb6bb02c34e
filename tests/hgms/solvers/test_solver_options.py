"""Options of the linear solvers: starts, ridges, tolerances, several systems at once, and
preconditioners from a sketch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, rejects
from support.solver_systems import (
    EVERY,
    Operator,
    every_krylov,
    every_solver,
    normal,
    promises,
    symmetric,
    vector,
)
from torch import Tensor

from hgms.contrib import LancBiO, RecycledCG
from hgms.solvers import CG, MINRES, NystromCG
from hgms_core import Inexact, LinearSolver, LinearSystem, Outcome

FOUR = symmetric(vector(1, 2, 3, 4), 0)
DECAYING = symmetric(torch.logspace(-3, 0, 40, dtype=F64), 0)
B = normal(40, seed=1)


@every_krylov
def test_a_good_start_saves_steps_and_one_worse_than_zero_is_dropped(solver: Any) -> None:
    cold = promises(solver, DECAYING, B)
    warm = promises(solver, DECAYING, B + 1e-4 * DECAYING @ normal(40, seed=2), x0=cold.value)
    assert warm.iterations < cold.iterations
    b = normal(4, seed=1)
    ends = [solver.solve(Operator(FOUR), b, x0).value for x0 in (None, 100 * normal(4, seed=2))]
    assert torch.equal(*ends)


@pytest.mark.parametrize("solver", [CG(clip=0.25), NystromCG(clip=0.25)], ids=lambda s: s.name)
def test_clip(solver: Any) -> None:
    matrix = torch.stack([torch.eye(2, dtype=F64)] * 2)
    solution = solver.solve(Operator(matrix), torch.stack([vector(3, 4), vector(0.03, 0.04)]))
    expected = torch.stack([vector(0.15, 0.2), vector(0.03, 0.04)])
    torch.testing.assert_close(solution.value, expected)
    assert (solution.residual < 1e-12).all()  # that of the unclipped solution
    assert solution.outcome is Outcome.CONVERGED


@every_krylov
def test_absolute_tolerance(solver: Any) -> None:
    solution = evolve(solver, rtol=1e-12, atol=0.5).solve(Operator(DECAYING), 100 * B)
    assert solution.outcome is Outcome.CONVERGED
    assert 0.01 < (100 * B - DECAYING @ solution.value).norm() <= 0.5


# --- N systems with N operators are N separate solves


def spectrum(*parts: tuple[float, float, int]) -> Tensor:
    return torch.cat([torch.linspace(*part, dtype=F64) for part in parts])


MATRICES = torch.stack(
    [
        symmetric(values, seed)
        for seed, values in enumerate(
            (
                spectrum((1, 1, 40)),
                spectrum((0.9, 1.1, 40)),
                spectrum((0.1, 1, 40)),
                spectrum((-0.5, -0.5, 20), (0.8, 1, 20)),
                spectrum((0, 0, 4), (0.5, 1, 36)),
                spectrum((1, 1, 40)),
                spectrum((1, 1, 40)),
                spectrum((0.3, 1, 40)),
            )
        )
    ]
)


@every_solver
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_several_systems_at_once_are_separate_solves(solver: Any, warm: bool) -> None:
    b = normal(8, 40, seed=3)
    b[5], b[6, 2] = 0, float("nan")
    matrices = MATRICES.clone()
    matrices[7, 3, 3] = float("inf")
    x0 = 0.1 * normal(8, 40, seed=4) if warm else None
    together = promises(solver, matrices, b, x0)
    outcomes = [list(Outcome)[code] for code in together.codes.tolist()]
    for i in range(8):
        alone = solver.solve(Operator(matrices[i]), b[i], None if x0 is None else x0[i])
        assert outcomes[i] is alone.outcome
        # how soon rounding is noticed depends on the order of the additions
        if alone.outcome is Outcome.STAGNATED:
            torch.testing.assert_close(together.residual[i], alone.residual, rtol=1e-6, atol=1e-6)
            continue
        assert together.iterations[i] == alone.iterations
        torch.testing.assert_close(together.value[i], alone.value, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(together.residual[i], alone.residual, rtol=1e-6, atol=1e-10)
        torch.testing.assert_close(together.curvature[i], alone.curvature, rtol=1e-6, atol=1e-9)
    if solver.name == "cg":
        differ = {Outcome.CONVERGED, Outcome.NEGATIVE_CURVATURE, Outcome.NONFINITE}
        assert differ <= set(outcomes)
        assert len(set(together.iterations.tolist())) > 3


# --- a preconditioner from a sketch


def test_a_sketch_takes_fewer_products_in_all_on_a_decaying_spectrum() -> None:
    values = 1e3 * torch.arange(1, 401, dtype=F64) ** -3
    b = normal(400, seed=1)
    limits: Any = {"ridge": 1e-3, "max_steps": 3000}
    plain, sketched = (
        solver.solve(lambda v: values * v, b)
        for solver in (CG(**limits), NystromCG(rank=60, **limits))
    )
    for solution in (plain, sketched):
        assert solution.outcome is Outcome.CONVERGED
        torch.testing.assert_close(solution.value, b / (values + 1e-3), rtol=1e-3, atol=1e-3)
    assert sketched.products <= plain.products / 2


def test_a_seed_decides_the_sketch_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    one, two, other = (
        NystromCG(rank=5, seed=seed).solve(Operator(DECAYING), B).value for seed in (3, 3, 4)
    )
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


class TestWhatIsNotCurvature:
    """Products with an error of their own, and steps behind a preconditioner."""

    H = vector(1.0, 0.5, 0.0)
    B = vector(1.0, 1.0, 1.0)

    @pytest.mark.parametrize("solver", [CG(), MINRES(), NystromCG(rank=2), RecycledCG(), LancBiO()])
    @pytest.mark.parametrize("seed", range(3))
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


@pytest.mark.parametrize("solver", EVERY, ids=lambda each: each.name)
def test_a_right_hand_side_must_be_real(solver: LinearSolver) -> None:
    for dtype in (torch.complex128, torch.int64):
        with rejects("wrong-dtype", "b"):
            solver.solve(lambda v: v, torch.ones(2, dtype=dtype))
    with rejects("wrong-shape", "b"):
        solver.solve(lambda v: v, torch.ones(0))
