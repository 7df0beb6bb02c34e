"""What the linear solvers promise: value, outcome and true residual, on the systems where others
fail too."""

from __future__ import annotations

import pytest
import torch
from support.helpers import rejects
from support.solver_systems import (
    EVERY,
    SOLVERS,
    Operator,
    every_krylov,
    every_solver,
    ids,
    normal,
    promises,
    symmetric,
    vector,
)
from torch import Tensor

from hgms.contrib import LancBiO, RecycledCG
from hgms.solvers import CG, MINRES, FixedPoint, Identity, Neumann, NystromCG
from hgms_core import Inexact, LinearSolver, LinearSystem, Outcome


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
