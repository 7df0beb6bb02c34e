"""The dynamic Lanczos process: Krylov iterates on a fixed matrix, the equations on a moving one,
and a resumed run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import moving_hessian
from support.field_problems import run, tuned_penalty
from support.helpers import F64, assert_same, finite_differences, normal
from torch import Tensor

from hgms.contrib import LancBiO
from hgms.hypergradients import Implicit
from hgms.runs import RunConfig
from hgms.solvers import CG
from hgms_core import Outcome, Pipeline, Problem, Solution, Tree

SIZE = 40
RIDGE = 0.1
M = 6
EYE = torch.eye(SIZE, dtype=F64)


def matrix(step: int = 0, by: float = 0.0) -> Tensor:
    """Positive definite, with eigenvalues from 0.3 to 10 and eigenvectors that turn from step to
    step.
    """
    one, other = (normal(SIZE, SIZE, seed=seed) for seed in (1, 2))
    turn = torch.linalg.matrix_exp(one - one.T + step * by * (other - other.T) / SIZE**0.5)
    return turn * torch.logspace(-0.5, 1, SIZE, dtype=F64) @ turn.T


H = matrix()
B = normal(SIZE, seed=3)


def steps_on(
    solver: LancBiO, matrices: list[Tensor], rhs: list[Tensor], memory: Tree | None = None
) -> list[tuple[Solution, Tree]]:
    """What the solver answers to each system, and what it remembers after it."""
    answers: list[tuple[Solution, Tree]] = []
    memory = memory or {}
    for h, b in zip(matrices, rhs, strict=True):
        kept = {name: leaf.clone() for name, leaf in memory.items()}
        solution, following = solver.solve_from(h.matmul, b, None, memory)
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


# --- a fixed matrix


def test_on_a_fixed_matrix_its_steps_are_those_of_restarted_conjugate_gradients() -> None:
    answers = steps_on(LancBiO(restart=M, ridge=RIDGE), [H] * (2 * M), [B] * (2 * M))
    anchor = torch.zeros(SIZE, dtype=F64)
    for k, (solution, _) in enumerate(answers):
        j = k % M + 1
        exact = krylov(H + RIDGE * EYE, B, anchor, j)
        torch.testing.assert_close(solution.value, exact, rtol=1e-10, atol=1e-11)
        cg = CG(ridge=RIDGE, max_steps=j, rtol=1e-12).solve(H.matmul, B, anchor if k >= M else None)
        torch.testing.assert_close(solution.value, cg.value, rtol=1e-9, atol=1e-10)
        true = (B - H @ exact - RIDGE * exact).norm() / B.norm()
        torch.testing.assert_close(solution.residual, true, rtol=1e-9, atol=0)
        assert solution.outcome is Outcome.ITERATION_LIMIT
        if j == M:
            anchor = exact
    # The w of the second epoch is one product more; that of the first is zero.
    assert [solution.products for solution, _ in answers] == [1] * M + [2] + [1] * (M - 1)


@pytest.mark.parametrize("start", [None, normal(SIZE, seed=4) / 10])
def test_a_solve_without_memory_is_its_m_steps(start: Tensor | None) -> None:
    calls: list[Tensor] = []

    def product(v: Tensor) -> Tensor:
        calls.append(v)
        return H @ v

    solution = LancBiO(restart=M, ridge=RIDGE).solve(product, B, start)
    assert int(solution.iterations) == M
    assert solution.products == len(calls) == M + (start is not None)
    plain = CG(ridge=RIDGE, max_steps=M).solve(H.matmul, B, start)
    torch.testing.assert_close(solution.value, plain.value, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(solution.residual, plain.residual, rtol=1e-8, atol=0)


# --- a moving matrix


def test_on_a_moving_matrix_each_step_is_that_of_the_equations() -> None:
    """v̄ + Q T⁻¹ Qᵀ(b − w) with α_j, β_j and q_{j+1} of the matrix of step j, and w of the first
    of the epoch.
    """
    hs = [matrix(step, by=0.05) for step in range(2 * M)]
    bs = [normal(SIZE, seed=6) + 0.1 * normal(SIZE, seed=7 + k) for k in range(2 * M)]
    v = torch.zeros(SIZE, dtype=F64)
    for k, (solution, _) in enumerate(steps_on(LancBiO(restart=M, ridge=RIDGE), hs, bs)):
        h = hs[k] + RIDGE * EYE
        b = bs[k]
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
        torch.testing.assert_close(solution.residual, expected.norm() / b.norm(), rtol=1e-8, atol=0)
        q = torch.cat([q, (u / u.norm()).unsqueeze(1)], 1)


def test_it_follows_the_solution_closer_than_one_warm_step_of_cg() -> None:
    """For 1 + 1/m products a system, against two."""
    hs = [matrix(step, by=1e-3) for step in range(40)]
    answers = steps_on(LancBiO(restart=10, ridge=RIDGE), hs, [B] * 40)
    last = None
    errors = []
    for h, (ours, _) in zip(hs, answers, strict=True):
        last = CG(ridge=RIDGE, max_steps=1).solve(h.matmul, B, last).value
        exact = torch.linalg.solve(h + RIDGE * EYE, B)
        errors.append([float((v - exact).norm() / exact.norm()) for v in (ours.value, last)])
    late = [sum(column) for column in zip(*errors[20:], strict=True)]
    assert late[0] < 0.2 * late[1]


# --- outcomes


def test_negative_curvature_gives_the_iterate_before_it_and_another_epoch() -> None:
    indefinite = H - 0.5 * EYE
    answers = steps_on(LancBiO(restart=30), [indefinite] * 30, [B] * 30)
    outcomes = [solution.outcome for solution, _ in answers]
    first = outcomes.index(Outcome.NEGATIVE_CURVATURE)
    assert first > 0
    found, memory = answers[first]
    assert_same(found.value, answers[first - 1][0].value, rtol=1e-10, atol=1e-12)
    true = (B - indefinite @ found.value).norm() / B.norm()
    torch.testing.assert_close(found.residual, true, rtol=1e-8, atol=0)
    assert set(memory) == {"v"}
    plain = CG(max_steps=30).solve(indefinite.matmul, B)
    assert plain.outcome is Outcome.NEGATIVE_CURVATURE
    torch.testing.assert_close(plain.value, found.value, rtol=1e-8, atol=1e-9)


@pytest.mark.extended
def test_residuals_may_rise_but_from_epoch_to_epoch_the_error_falls() -> None:
    h = torch.logspace(-3, 1, SIZE, dtype=F64).diag()
    answers = steps_on(LancBiO(restart=15), [h] * 300, [B] * 300)
    assert max(float(solution.residual) for solution, _ in answers) > 1
    errors = [solution.value - B / h.diagonal() for solution, _ in answers[14::15]]
    energies = [float(error @ h @ error) for error in errors]
    assert energies == sorted(energies, reverse=True)
    assert energies[-1] < 0.3 * energies[0]
    assert sum(solution.products for solution, _ in answers) == 300 + 19


# --- in an estimator, and as a method


@pytest.mark.extended
def test_at_a_theta_that_stays_it_becomes_the_slope_of_the_value_function() -> None:
    estimator = Implicit(solver=LancBiO(restart=4))
    found, _ = moving_hessian.estimates(
        estimator, estimator.init(moving_hessian.PROBLEM), range(60)
    )
    slope = finite_differences(moving_hessian.upper_value, moving_hessian.theta_of(60))
    assert_same(found[-1].value, slope, rtol=1e-5, atol=1e-6)
    assert sum(estimate.cost.products for estimate in found) <= 60 * (1 + 1 / 4)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    moving_hessian.check_resumes(Implicit(solver=LancBiO(restart=4)), [2, 4, 5], tmp_path)


def method(**parts: Any) -> Pipeline:
    parts = {"name": "lancbio", "max_curvature": "none", **parts}
    table = {"task": "quadratic", "method": parts, "budget": "1 steps"}
    composed = RunConfig.from_dict(table).method
    assert isinstance(composed, Pipeline)
    return composed


def test_a_step_of_the_method_by_hand() -> None:
    """g = x² − θx, f = ½(x − 3)²: x: 5 → 3 → 2 at θ = 2, v = (x − 3)/(2 + γ) and h = v."""
    problem = Problem(
        theta0={"t": torch.full((1,), 2.0, dtype=F64)},
        x0={"x": torch.full((1,), 5.0, dtype=F64)},
        g=lambda t, x, _: (x["x"].square() - t["t"] * x["x"]).sum(),
        f=lambda t, x, _: (0.5 * (x["x"] - 3).square()).sum(),
    )
    composed = method(generator={"steps": 2, "optimizer": {"lr": 0.25}}, outer={"lr": 0.5})
    state, record = composed.step(problem, composed.init(problem, 0))
    assert float(state["x"]["x"]) == 2.0
    assert float(state["theta"]["t"]) == pytest.approx(2 - 0.5 * (-1 / 2.02))
    assert record["cost_products"] == 2  # a step, and the check of a solution


@pytest.mark.extended
def test_the_method_reaches_the_closed_form_optimum() -> None:
    problem, exact, best = tuned_penalty()
    composed = method(
        generator={"optimizer": {"lr": 0.8}, "steps": 8},
        hypergradient={"solver": {"ridge": 0.0}},
        outer={"lr": 2},
    )
    theta, x, _ = run(composed, problem, 30)
    assert float(theta["log_penalty"]) == pytest.approx(best, abs=0.01)
    assert_same(x, exact.solution(theta), rtol=1e-2, atol=1e-2)
