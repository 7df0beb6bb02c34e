"""The dynamic Lanczos process: Krylov iterates on a fixed matrix, the equations on a moving one,
and a resumed run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.field_problems import run, tuned_penalty
from support.helpers import F64, KEY, assert_same, finite_differences, normal
from torch import Tensor

from hgms.contrib import LancBiO
from hgms.hypergradients import Implicit
from hgms.runs import RunConfig
from hgms.runs.checkpoint import load_state, save_state
from hgms.solvers import CG, MINRES
from hgms_core import Branch, Estimate, Outcome, Pipeline, Problem, Solution, State, Tree

SIZE = 40
RIDGE = 0.1
M = 6
EYE = torch.eye(SIZE, dtype=F64)


def matrix(step: int = 0, by: float = 0.0) -> Tensor:
    """Positive definite, with eigenvalues from 0.3 to 10 and eigenvectors that turn from step to
    step.
    """
    skew = normal(SIZE, SIZE, seed=1) - normal(SIZE, SIZE, seed=1).T
    turn = torch.linalg.matrix_exp(
        skew + step * by * (normal(SIZE, SIZE, seed=2) - normal(SIZE, SIZE, seed=2).T) / SIZE**0.5
    )
    return turn * torch.logspace(-0.5, 1, SIZE, dtype=F64) @ turn.T


def steps_on(
    solver: LancBiO, matrices: list[Tensor], rhs: list[Tensor], memory: Tree | None = None
) -> list[tuple[Solution, Tree]]:
    """What the solver answers to each system, and what it remembers after it."""
    answers: list[tuple[Solution, Tree]] = []
    memory = memory or {}
    for h, b in zip(matrices, rhs, strict=True):
        kept = {name: leaf.clone() for name, leaf in memory.items()}
        solution, following = solver.solve_from(lambda v, h=h: h @ v, b, None, memory)
        assert_same(memory, kept)  # never changed in place
        memory = following
        answers.append((solution, memory))
    return answers


def krylov(h: Tensor, b: Tensor, start: Tensor, count: int) -> Tensor:
    """The point of start + span{r, Hr, …} whose residual is orthogonal to that span: the iterate
    of conjugate gradients.
    """
    r = b - h @ start
    columns = [r / r.norm()]
    for _ in range(count - 1):
        following = h @ columns[-1]
        for column in columns * 2:
            following = following - (column @ following) * column
        columns.append(following / following.norm())
    q = torch.stack(columns, 1)
    return start + q @ torch.linalg.solve(q.T @ h @ q, q.T @ r)


class TestFixed:
    H = matrix()
    B = normal(SIZE, seed=3)

    def test_its_steps_are_those_of_restarted_conjugate_gradients(self) -> None:
        answers = steps_on(LancBiO(restart=M, ridge=RIDGE), [self.H] * (2 * M), [self.B] * (2 * M))
        anchor = torch.zeros(SIZE, dtype=F64)
        for k, (solution, _) in enumerate(answers):
            j = k % M + 1
            exact = krylov(self.H + RIDGE * EYE, self.B, anchor, j)
            torch.testing.assert_close(solution.value, exact, rtol=1e-10, atol=1e-11)
            cg = CG(ridge=RIDGE, max_steps=j, rtol=1e-12).solve(
                lambda v: self.H @ v, self.B, anchor if k >= M else None
            )
            torch.testing.assert_close(solution.value, cg.value, rtol=1e-9, atol=1e-10)
            true = (self.B - self.H @ exact - RIDGE * exact).norm() / self.B.norm()
            torch.testing.assert_close(solution.residual, true, rtol=1e-9, atol=0)
            assert solution.outcome is Outcome.ITERATION_LIMIT
            if j == M:
                anchor = exact
        # The w of the second epoch is one product more; that of the first is zero.
        assert [solution.products for solution, _ in answers] == [1] * M + [2] + [1] * (M - 1)

    @pytest.mark.parametrize("start", [None, normal(SIZE, seed=4) / 10])
    def test_a_solve_without_memory_is_its_m_steps(self, start: Tensor | None) -> None:
        calls = 0

        def product(v: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return self.H @ v

        solution = LancBiO(restart=M, ridge=RIDGE).solve(product, self.B, start)
        plain = CG(ridge=RIDGE, max_steps=M).solve(product, self.B, start)
        torch.testing.assert_close(solution.value, plain.value, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(solution.residual, plain.residual, rtol=1e-8, atol=0)
        assert int(solution.iterations) == M
        assert (solution.products, calls) == (
            M + (start is not None),
            2 * (M + (start is not None)),
        )

    def test_enough_steps_solve_as_minres_does(self) -> None:
        ours, other = (
            solver.solve(lambda v: self.H @ v, self.B)
            for solver in (
                LancBiO(restart=SIZE, ridge=RIDGE, rtol=1e-10),
                MINRES(ridge=RIDGE, rtol=1e-10),
            )
        )
        assert ours.outcome is other.outcome is Outcome.CONVERGED
        exact = torch.linalg.solve(self.H + RIDGE * EYE, self.B)
        for solution in (ours, other):
            torch.testing.assert_close(solution.value, exact, rtol=1e-7, atol=1e-8)
        assert int(ours.iterations) <= SIZE

    def test_a_solved_system_costs_a_check_and_goes_on_from_its_solution(self) -> None:
        h = torch.tensor([1.0, 3.0], dtype=F64).repeat(SIZE // 2).diag()
        b = self.B
        answers = steps_on(LancBiO(), [h] * 3, [b] * 3)
        assert [solution.outcome.label for solution, _ in answers] == [
            "iteration-limit",
            "converged",
            "converged",
        ]
        assert [solution.products for solution, _ in answers] == [1, 2, 1]
        assert [int(solution.iterations) for solution, _ in answers] == [1, 1, 0]
        torch.testing.assert_close(answers[-1][0].value, b / h.diagonal(), rtol=1e-12, atol=0)

    def test_several_systems_at_once_are_solved_without_memory(self) -> None:
        b = normal(3, SIZE, seed=5)
        together, memory = LancBiO(restart=M).solve_from(lambda v: v @ self.H, b, None, {})
        assert memory == {}
        for i in range(3):
            alone = LancBiO(restart=M).solve(lambda v: self.H @ v, b[i])
            torch.testing.assert_close(together.value[i], alone.value, rtol=1e-8, atol=1e-9)


class TestMoving:
    HS = tuple(matrix(step, by=0.05) for step in range(2 * M))
    BS = tuple(normal(SIZE, seed=6) + 0.1 * normal(SIZE, seed=7 + k) for k in range(2 * M))

    def test_each_step_is_that_of_the_equations(self) -> None:
        """v̄ + Q T⁻¹ Qᵀ(b − w) with α_j, β_j and q_{j+1} of the matrix of step j, and w of the
        first of the epoch.
        """
        answers = steps_on(LancBiO(restart=M, ridge=RIDGE), self.HS, self.BS)
        v = torch.zeros(SIZE, dtype=F64)
        for k, (solution, _) in enumerate(answers):
            h = self.HS[k] + RIDGE * EYE
            b = self.BS[k]
            j = k % M
            if not j:
                anchor = v
                w = h @ v
                q = ((b - w) / (b - w).norm()).unsqueeze(1)
                t = torch.zeros(M + 1, M + 1, dtype=F64)
            u = h @ q[:, j]
            t[j, j] = q[:, j] @ u
            y = torch.linalg.solve(t[: j + 1, : j + 1], q.T @ (b - w))
            v = anchor + q @ y
            torch.testing.assert_close(solution.value, v, rtol=1e-9, atol=1e-10)
            u = u - q @ torch.linalg.lstsq(q, u.unsqueeze(1)).solution.squeeze(1)
            t[j, j + 1] = t[j + 1, j] = u.norm()
            expected = b - w - q @ (t[: j + 1, : j + 1] @ y) - u * y[-1]
            torch.testing.assert_close(
                solution.residual, expected.norm() / b.norm(), rtol=1e-8, atol=0
            )
            q = torch.cat([q, (u / u.norm()).unsqueeze(1)], 1)

    def test_it_follows_the_solution_closer_than_one_warm_step_of_cg(self) -> None:
        """For 1 + 1/m products a system, against two."""
        hs = [matrix(step, by=1e-3) for step in range(40)]
        b = self.BS[0]
        ours = [
            solution.value
            for solution, _ in steps_on(LancBiO(restart=10, ridge=RIDGE), hs, [b] * 40)
        ]
        last = None
        warm = []
        for h in hs:
            last = CG(ridge=RIDGE, max_steps=1).solve(lambda v, h=h: h @ v, b, last).value
            warm.append(last)
        exact = [torch.linalg.solve(h + RIDGE * EYE, b) for h in hs]
        errors = [
            sum(float((v - e).norm() / e.norm()) for v, e in zip(vs[20:], exact[20:], strict=True))
            for vs in (ours, warm)
        ]
        assert errors[0] < 0.2 * errors[1]


class TestOutcomes:
    B = normal(SIZE, seed=8)

    def test_negative_curvature_gives_the_iterate_before_it_and_another_epoch(self) -> None:
        indefinite = matrix() - 0.5 * EYE
        answers = steps_on(LancBiO(restart=30), [indefinite] * 30, [self.B] * 30)
        bad = [
            k
            for k, (solution, _) in enumerate(answers)
            if solution.outcome is Outcome.NEGATIVE_CURVATURE
        ]
        first = bad[0]
        assert first > 0
        assert_same(answers[first][0].value, answers[first - 1][0].value, rtol=1e-10, atol=1e-12)
        true = (self.B - indefinite @ answers[first][0].value).norm() / self.B.norm()
        torch.testing.assert_close(answers[first][0].residual, true, rtol=1e-8, atol=0)
        assert set(answers[first][1]) == {"v"}
        plain = CG(max_steps=30).solve(lambda v: indefinite @ v, self.B)
        assert plain.outcome is Outcome.NEGATIVE_CURVATURE
        torch.testing.assert_close(plain.value, answers[first][0].value, rtol=1e-8, atol=1e-9)

    def test_a_singular_system_stagnates(self) -> None:
        flat = torch.cat([torch.ones(3, dtype=F64), torch.zeros(SIZE - 3, dtype=F64)]).diag()
        solution = LancBiO(restart=5).solve(lambda v: flat @ v, torch.ones(SIZE, dtype=F64))
        assert solution.outcome is Outcome.STAGNATED
        assert bool(torch.isfinite(solution.value).all())

    @pytest.mark.parametrize("steps", [0, 1, 3])
    def test_a_product_that_is_not_finite_ends_the_epoch_with_the_last_v(self, steps: int) -> None:
        solver = LancBiO(restart=5)
        answers = steps_on(solver, [matrix()] * steps, [self.B] * steps)
        before, memory = answers[-1] if answers else (None, {})
        solution, after = solver.solve_from(lambda v: v * torch.nan, self.B, None, memory)
        assert solution.outcome is Outcome.NONFINITE
        expected = torch.zeros(SIZE, dtype=F64) if before is None else before.value
        assert_same(solution.value, expected, rtol=1e-12, atol=1e-13)
        again, _ = solver.solve_from(lambda v: matrix() @ v, self.B, None, after)
        assert again.outcome is Outcome.ITERATION_LIMIT

    def test_a_right_hand_side_that_is_not_finite_or_zero(self) -> None:
        solver = LancBiO(restart=5)
        memory = steps_on(solver, [matrix()] * 2, [self.B] * 2)[-1][1]
        solution, after = solver.solve_from(
            lambda v: matrix() @ v, torch.full_like(self.B, torch.nan), None, memory
        )
        assert solution.outcome is Outcome.NONFINITE
        assert not solution.value.any()
        assert after is memory
        solution, _ = solver.solve_from(
            lambda v: matrix() @ v, torch.zeros_like(self.B), None, memory
        )
        assert (solution.outcome, bool(solution.value.any())) == (Outcome.CONVERGED, False)

    def test_residuals_may_rise_but_from_epoch_to_epoch_the_error_falls(self) -> None:
        h = torch.logspace(-3, 1, SIZE, dtype=F64).diag()
        answers = steps_on(LancBiO(restart=15), [h] * 300, [self.B] * 300)
        assert max(float(solution.residual) for solution, _ in answers) > 1
        errors = [solution.value - self.B / h.diagonal() for solution, _ in answers[14::15]]
        energies = [float(error @ h @ error) for error in errors]
        assert energies == sorted(energies, reverse=True)
        assert energies[-1] < 0.3 * energies[0]
        assert sum(solution.products for solution, _ in answers) == 300 + 19

    def test_an_anchor_that_is_worse_than_zero_is_dropped(self) -> None:
        far = {"v": 1e3 * self.B}
        solution, _ = LancBiO().solve_from(lambda v: matrix() @ v, self.B, None, far)
        fresh, _ = LancBiO().solve_from(lambda v: matrix() @ v, self.B, None, {})
        assert_same(solution.value, fresh.value)
        assert solution.products == fresh.products + 1

    def test_clip_bounds_what_is_returned_but_not_what_goes_on(self) -> None:
        hs = [matrix()] * 8
        bs = [self.B] * 8
        free = steps_on(LancBiO(restart=4), hs, bs)
        bound = steps_on(LancBiO(restart=4, clip=0.1), hs, bs)
        for (a, kept), (b, same) in zip(free, bound, strict=True):
            assert float(b.value.norm()) == pytest.approx(0.1)
            assert_same(kept, same)
            assert float(a.value.norm()) > 0.1


def curved(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    """A strongly convex lower level whose Hessian changes with x."""
    return (
        torch.logspace(-1, 1, SIZE, dtype=F64) * x["x"] ** 2 / 2 + x["x"] ** 4 / 12
    ).sum() - theta["t"] @ x["x"]


def value(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    return ((x["x"] - 1) ** 2).sum() / 2


def lower_solution(theta: Tree) -> Tree:
    x = torch.zeros(SIZE, dtype=F64)
    for _ in range(60):
        slope = torch.func.grad(lambda x: curved(theta, {"x": x}, {}))(x)
        x = x - slope / (torch.logspace(-1, 1, SIZE, dtype=F64) + x**2)
    return {"x": x}


class TestImplicit:
    PROBLEM = Problem(
        theta0={"t": normal(SIZE, seed=9)},
        x0={"x": torch.zeros(SIZE, dtype=F64)},
        g=curved,
        f=value,
    )
    ESTIMATOR = Implicit(solver=LancBiO(restart=4))

    def run(self, state: State, steps: range) -> tuple[list[Estimate], State]:
        estimates = []
        for step in steps:
            theta = {"t": self.PROBLEM.theta0["t"] + 1e-3 * min(step, 20)}
            estimate, state = self.ESTIMATOR.estimate(
                self.PROBLEM, theta, Branch(x=lower_solution(theta)), KEY, state
            )
            estimates.append(estimate)
        return estimates, state

    @pytest.mark.extended
    def test_at_a_theta_that_stays_it_becomes_the_slope_of_the_value_function(self) -> None:
        estimates, _ = self.run(self.ESTIMATOR.init(self.PROBLEM), range(80))
        theta = {"t": self.PROBLEM.theta0["t"] + 0.02}
        slope = finite_differences(lambda at: value(at, lower_solution(at), {}), theta)
        torch.testing.assert_close(estimates[-1].value["t"], slope["t"], rtol=1e-5, atol=1e-6)
        assert sum(estimate.cost.products for estimate in estimates) <= 80 * (1 + 1 / 4)

    @pytest.mark.parametrize("cut", [2, 4, 5])
    def test_a_resumed_run_is_the_uninterrupted_one(self, tmp_path: Path, cut: int) -> None:
        whole, end = self.run(self.ESTIMATOR.init(self.PROBLEM), range(7))
        _, half = self.run(self.ESTIMATOR.init(self.PROBLEM), range(cut))
        save_state(tmp_path / "state.safetensors", half)
        rest, again = self.run(load_state(tmp_path / "state.safetensors"), range(cut, 7))
        assert_same(
            [estimate.value for estimate in rest], [estimate.value for estimate in whole[cut:]]
        )
        assert_same(again, end)


def method(**parts: Any) -> Pipeline:
    table = {"task": "quadratic", "method": {"name": "lancbio", **parts}, "budget": "1 steps"}
    composed = RunConfig.from_dict(table).method
    assert isinstance(composed, Pipeline)
    return composed


class TestMethod:
    def test_by_hand(self) -> None:
        """g = x² − θx, f = ½(x − 3)²: x: 5 → 3 → 2 at θ = 2, v = (x − 3)/(2 + γ) and h = v."""
        problem = Problem(
            theta0={"t": torch.full((1,), 2.0, dtype=F64)},
            x0={"x": torch.full((1,), 5.0, dtype=F64)},
            g=lambda t, x, _: (x["x"].square() - t["t"] * x["x"]).sum(),
            f=lambda t, x, _: (0.5 * (x["x"] - 3).square()).sum(),
        )
        composed = method(generator={"steps": 2, "lr": 0.25}, outer={"lr": 0.5})
        state, record = composed.step(problem, composed.init(problem, 0))
        assert float(state["x"]["x"]) == 2.0
        assert float(state["theta"]["t"]) == pytest.approx(2 - 0.5 * (-1 / 2.02))
        assert record["cost_products"] == 2  # a step, and the check of a solution

    def test_it_reaches_the_closed_form_optimum(self) -> None:
        problem, exact, best = tuned_penalty()
        parts = {"lr": 0.8, "steps": 8}
        theta, x, _ = run(
            method(generator=parts, hypergradient={"solver": {"ridge": 0.0}}, outer={"lr": 2.0}),
            problem,
            200,
        )
        assert float(theta["log_penalty"]) == pytest.approx(best, abs=0.01)
        assert_same(x, exact.solution(theta), rtol=1e-2, atol=1e-2)
