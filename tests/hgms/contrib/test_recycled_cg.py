"""Conjugate gradients that remember: the model against its formula, sequences of systems, and a
resumed run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import moving_hessian
from support.helpers import F64, assert_same, finite_differences, normal
from torch import Tensor

from hgms.contrib import RecycledCG
from hgms.contrib.recycled_cg import inverse, update_model
from hgms.hypergradients import Implicit
from hgms.solvers import CG, NystromCG
from hgms_core import Outcome, Tree

SIZE = 60
RIDGE = 1e-3
EYE = torch.eye(SIZE, dtype=F64)
SPECTRUM = torch.logspace(-4, 0, SIZE, dtype=F64)


def drifting(step: int, by: float = 0.01, spectrum: Tensor = SPECTRUM) -> Tensor:
    """Matrices with the same eigenvalues whose eigenvectors turn from step to step."""
    skew = normal(SIZE, SIZE, seed=1) - normal(SIZE, SIZE, seed=1).T
    turn = torch.linalg.matrix_exp(step * by * skew / SIZE**0.5)
    return turn * spectrum @ turn.T


def model(memory: Tree) -> Tensor:
    """B, dense."""
    basis = memory["basis"]
    return memory["rest"] * EYE + basis.T * (memory["values"] - memory["rest"]) @ basis


def pairs_of(matrix: Tensor, count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    return [(v, matrix @ v) for v in normal(count, SIZE, seed=seed)]


# --- the model


def test_uncut_the_model_is_the_block_formula_and_its_inverse_preconditions() -> None:
    """B⁺ = B − BP (PᵀBP)⁻¹ PᵀB + Y (PᵀY)⁻¹ Yᵀ on span[U, P], twice in a row, the second time
    with another matrix.
    """
    memory = update_model({}, pairs_of(drifting(0), 5, seed=2), RIDGE, 50)
    before = model(memory)
    pairs = pairs_of(drifting(1), 4, seed=3)
    p = torch.stack([v for v, _ in pairs], 1)
    y = torch.stack([image for _, image in pairs], 1) + RIDGE * p
    whole = (
        before
        - before @ p @ torch.linalg.solve(p.T @ before @ p, p.T @ before)
        + y @ torch.linalg.solve(p.T @ y, y.T)
    )
    frame = torch.linalg.qr(torch.cat([memory["basis"].T, p], 1)).Q
    following = update_model(memory, pairs, RIDGE, 50)
    after = model(following)
    torch.testing.assert_close(
        frame.T @ after @ frame, frame.T @ whole @ frame, rtol=1e-8, atol=1e-9
    )
    # its curvature along new directions is the matrix's
    torch.testing.assert_close(p.T @ after @ p, p.T @ y, rtol=1e-8, atol=1e-10)
    r = normal(SIZE, seed=6)
    torch.testing.assert_close(
        inverse(following)(r), following["rest"] * torch.linalg.solve(after, r)
    )


def test_the_model_keeps_the_largest_and_stays_positive_definite_and_orthonormal() -> None:
    memory: Tree = {}
    for step in range(4):
        memory = update_model(memory, pairs_of(drifting(step), 10, seed=step), RIDGE, 15)
        kept = min(15, 10 * (step + 1))
        assert memory["basis"].shape == (kept, SIZE)
        torch.testing.assert_close(
            memory["basis"] @ memory["basis"].T, torch.eye(kept, dtype=F64), rtol=0, atol=1e-9
        )
        assert torch.linalg.eigvalsh(model(memory))[0] > 0


# --- sequences of systems


def test_a_solve_is_that_of_a_dense_solver_and_counts_its_products() -> None:
    solver = RecycledCG(ridge=RIDGE, rtol=1e-10, rank=20, max_steps=500)
    memory: Tree = {}
    for step in range(4):
        matrix = drifting(step, by=0.3)
        b = normal(SIZE, seed=20 + step)
        kept = {name: leaf.clone() for name, leaf in memory.items()}
        calls: list[Tensor] = []

        def product(v: Tensor, at: Tensor = matrix, calls: list[Tensor] = calls) -> Tensor:
            calls.append(v)
            return at @ v

        solution, following = solver.solve_from(product, b, None, memory)
        assert_same(memory, kept)  # never changed in place
        memory = following
        assert solution.outcome is Outcome.CONVERGED
        assert solution.products == len(calls)
        exact = torch.linalg.solve(matrix + RIDGE * EYE, b)
        torch.testing.assert_close(solution.value, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.extended
def test_it_takes_fewer_products_than_cg_warm_starts_and_a_sketch() -> None:
    limits: dict[str, Any] = {"ridge": RIDGE, "max_steps": 1000}
    recycled = RecycledCG(rank=30, **limits)
    products = dict.fromkeys(("cg", "warm", "nystrom", "recycled"), 0)
    b = normal(SIZE, seed=9)
    memory, warm, v = {}, None, None
    for step in range(5):
        matrix = drifting(step)
        b = b + 0.02 * normal(SIZE, seed=30 + step)
        product = matrix.matmul
        found = {
            "cg": CG(**limits).solve(product, b),
            "warm": CG(**limits).solve(product, b, warm),
            "nystrom": NystromCG(rank=20, **limits).solve(product, b),
        }
        found["recycled"], memory = recycled.solve_from(product, b, v, memory)
        warm, v = found["warm"].value, found["recycled"].value
        if step:  # the first has nothing to remember
            for name, solution in found.items():
                products[name] += solution.products
    assert products["recycled"] < 0.4 * products["cg"]
    assert products["recycled"] < 0.7 * min(products["warm"], products["nystrom"])


def test_without_memory_it_is_cg_and_so_are_several_systems_at_once() -> None:
    b = normal(3, SIZE, seed=12)
    matrix = drifting(1)
    plain = CG(ridge=RIDGE, max_steps=50).solve(lambda v: v @ matrix, b)
    solver = RecycledCG(ridge=RIDGE, max_steps=50)
    assert_same(solver.solve(lambda v: v @ matrix, b).value, plain.value)
    together, memory = solver.solve_from(lambda v: v @ matrix, b, None, {})
    assert_same((together.value, memory), (plain.value, {}))


# --- in an estimator


def test_an_estimator_remembers_and_finds_the_slope_of_the_value_function(tmp_path: Path) -> None:
    estimator = Implicit(solver=RecycledCG(rank=8, rtol=1e-10, max_steps=200), warm_start=True)
    found, state = moving_hessian.estimates(
        estimator, estimator.init(moving_hessian.PROBLEM), range(3)
    )
    assert state["memory"]["basis"].shape == (8, moving_hessian.SIZE)
    assert found[2].cost.products < found[0].cost.products
    slope = finite_differences(moving_hessian.upper_value, moving_hessian.theta_of(2))
    assert_same(found[2].value, slope, rtol=1e-5, atol=1e-7)
    moving_hessian.check_resumes(estimator, [3], tmp_path)


def test_a_solver_without_a_memory_has_none_in_the_state() -> None:
    _, state = moving_hessian.estimates(Implicit(solver=CG()), {"v": None}, range(1))
    assert state == {"v": None}
