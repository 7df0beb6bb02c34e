"""Conjugate gradients that remember: the model against its formula, sequences of systems, and a
resumed run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import F64, KEY, assert_same, finite_differences, normal
from torch import Tensor

from hgms.contrib import RecycledCG
from hgms.contrib.recycled import inverse, updated
from hgms.hypergradients import Implicit
from hgms.runs.checkpoint import load_state, save_state
from hgms.solvers import CG, NystromCG
from hgms_core import Branch, Estimate, Outcome, Problem, State, Tree

SIZE = 120
RIDGE = 1e-3
SPECTRUM = torch.logspace(-4, 0, SIZE, dtype=F64)


def drifting(step: int, by: float = 0.01) -> Tensor:
    """Matrices with the same eigenvalues whose eigenvectors turn from step to step."""
    turn = torch.linalg.matrix_exp(
        step * by * (normal(SIZE, SIZE, seed=1) - normal(SIZE, SIZE, seed=1).T) / SIZE**0.5
    )
    return turn * SPECTRUM @ turn.T


def symmetric_flip(matrix: Tensor) -> Tensor:
    """The same eigenvectors with the eigenvalues in the opposite order."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.flip(0) @ vectors.T


def model(memory: Tree) -> Tensor:
    """B, dense."""
    basis = memory["basis"]
    return (
        memory["rest"] * torch.eye(SIZE, dtype=F64)
        + basis.T * (memory["values"] - memory["rest"]) @ basis
    )


def pairs_of(matrix: Tensor, count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    directions = normal(count, SIZE, seed=seed)
    return [(v, matrix @ v) for v in directions]


class TestModel:
    def test_uncut_it_is_the_block_formula(self) -> None:
        """B⁺ = B − BP (PᵀBP)⁻¹ PᵀB + Y (PᵀY)⁻¹ Yᵀ on span[U, P], twice in a row, the second time
        with another matrix.
        """
        memory = updated({}, pairs_of(drifting(0), 5, seed=2), RIDGE, 50)
        before = model(memory)
        basis = memory["basis"]
        pairs = pairs_of(drifting(1), 4, seed=3)
        p = torch.stack([v for v, _ in pairs], 1)
        y = torch.stack([image for _, image in pairs], 1) + RIDGE * p
        whole = (
            before
            - before @ p @ torch.linalg.solve(p.T @ before @ p, p.T @ before)
            + y @ torch.linalg.solve(p.T @ y, y.T)
        )
        frame = torch.linalg.qr(torch.cat([basis.T, p], 1)).Q
        after = model(updated(memory, pairs, RIDGE, 50))
        torch.testing.assert_close(
            frame.T @ after @ frame, frame.T @ whole @ frame, rtol=1e-8, atol=1e-9
        )

    def test_its_curvature_along_new_directions_is_the_matrix_s(self) -> None:
        pairs = pairs_of(drifting(0), 6, seed=4)
        after = model(updated({}, pairs, RIDGE, 50))
        p = torch.stack([v for v, _ in pairs], 1)
        torch.testing.assert_close(
            p.T @ after @ p, p.T @ (drifting(0) @ p + RIDGE * p), rtol=1e-8, atol=1e-10
        )

    def test_it_keeps_the_largest_and_stays_positive_definite_and_orthonormal(self) -> None:
        memory: Tree = {}
        for step in range(6):
            memory = updated(memory, pairs_of(drifting(step), 20, seed=step), RIDGE, 30)
            kept = min(30, 20 * (step + 1))
            assert memory["basis"].shape == (kept, SIZE)
            torch.testing.assert_close(
                memory["basis"] @ memory["basis"].T, torch.eye(kept, dtype=F64), rtol=0, atol=1e-9
            )
            assert torch.linalg.eigvalsh(model(memory))[0] > 0

    def test_its_inverse_is_what_preconditions(self) -> None:
        memory = updated({}, pairs_of(drifting(0), 8, seed=5), RIDGE, 6)
        r = normal(SIZE, seed=6)
        torch.testing.assert_close(
            inverse(memory)(r), memory["rest"] * torch.linalg.solve(model(memory), r)
        )

    def test_what_has_no_positive_curvature_teaches_nothing(self) -> None:
        v = normal(SIZE, seed=7)
        useless = [(v, -v), (v, torch.full_like(v, torch.nan)), (torch.zeros_like(v), v)]
        assert updated({}, useless, 0.0, 10) == {}
        memory = updated({}, pairs_of(drifting(0), 3, seed=8), 0.0, 10)
        assert updated(memory, useless, 0.0, 10) is memory


class TestSequence:
    def test_a_solve_is_that_of_a_dense_solver_whatever_it_remembers(self) -> None:
        solver = RecycledCG(ridge=RIDGE, rtol=1e-10, rank=20, max_steps=500)
        memory = {}
        for step in range(4):
            matrix = drifting(step, by=0.3)
            b = normal(SIZE, seed=20 + step)
            kept = {name: leaf.clone() for name, leaf in memory.items()}
            solution, following = solver.solve_from(lambda v, at=matrix: at @ v, b, None, memory)
            assert_same(memory, kept)  # never changed in place
            memory = following
            assert solution.outcome is Outcome.CONVERGED
            exact = torch.linalg.solve(matrix + RIDGE * torch.eye(SIZE, dtype=F64), b)
            torch.testing.assert_close(solution.value, exact, rtol=1e-6, atol=1e-6)

    def test_it_takes_fewer_products_than_cg_warm_starts_and_a_sketch(self) -> None:
        limits: dict[str, Any] = {"ridge": RIDGE, "max_steps": 1000}
        recycled = RecycledCG(rank=40, **limits)
        memory = {}
        products = {"cg": 0, "warm": 0, "nystrom": 0, "recycled": 0}
        b = normal(SIZE, seed=9)
        warm = None
        v = None
        for step in range(6):
            matrix = drifting(step)
            b = b + 0.02 * normal(SIZE, seed=30 + step)
            plain, again, sketched = (
                solver.solve(lambda v, at=matrix: at @ v, b, x0)
                for solver, x0 in (
                    (CG(**limits), None),
                    (CG(**limits), warm),
                    (NystromCG(rank=20, **limits), None),
                )
            )
            ours, memory = recycled.solve_from(lambda v, at=matrix: at @ v, b, v, memory)
            warm = again.value
            v = ours.value
            if step:  # the first has nothing to remember
                for name, solution in (
                    ("cg", plain),
                    ("warm", again),
                    ("nystrom", sketched),
                    ("recycled", ours),
                ):
                    products[name] += solution.products
        assert products["recycled"] < 0.4 * products["cg"]
        assert products["recycled"] < 0.7 * min(products["warm"], products["nystrom"])

    def test_the_same_system_again_takes_few_steps(self) -> None:
        few = torch.tensor([1.0, 2.0, 30.0, 400.0], dtype=F64).repeat(30)
        solver = RecycledCG(ridge=1.0, rank=10)
        b = normal(SIZE, seed=10)
        first, memory = solver.solve_from(lambda v: few * v, b, None, {})
        second, _ = solver.solve_from(lambda v: few * v, b, None, memory)
        # the start B⁻¹b is the solution
        assert (int(first.iterations), int(second.iterations)) == (4, 0)

    def test_it_forgets_what_is_of_no_use(self) -> None:
        """After a jump of the matrix the memory would mislead: it costs one product more than
        none, and is a new one then.
        """
        solver = RecycledCG(ridge=RIDGE, rank=20, max_steps=500)
        b = normal(SIZE, seed=14)
        _, memory = solver.solve_from(lambda v: drifting(0) @ v, b, None, {})
        elsewhere = 3 * symmetric_flip(drifting(0))
        plain = CG(ridge=RIDGE, max_steps=500).solve(lambda v: elsewhere @ v, b)
        solution, after = solver.solve_from(lambda v: elsewhere @ v, b, None, memory)
        assert solution.outcome is Outcome.CONVERGED
        assert solution.products <= plain.products + 2  # the start, and its check
        anew = solver.solve_from(lambda v: elsewhere @ v, b, None, {})[1]
        torch.testing.assert_close(after["rest"], anew["rest"], rtol=0.2, atol=0)
        assert float(after["rest"]) != float(memory["rest"])

    def test_products_are_counted(self) -> None:
        calls = 0

        def product(v: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return drifting(0) @ v

        solver = RecycledCG(ridge=RIDGE, rank=5)
        memory = {}
        for _ in range(2):
            calls = 0
            solution, memory = solver.solve_from(product, normal(SIZE, seed=11), None, memory)
            assert solution.products == calls

    def test_without_memory_it_is_cg_and_so_are_several_systems_at_once(self) -> None:
        b = normal(3, SIZE, seed=12)
        plain = CG(ridge=RIDGE, max_steps=50).solve(lambda v: v @ drifting(0), b)
        solver = RecycledCG(ridge=RIDGE, max_steps=50)
        assert_same(solver.solve(lambda v: v @ drifting(0), b).value, plain.value)
        together, memory = solver.solve_from(lambda v: v @ drifting(0), b, None, {})
        assert_same(together.value, plain.value)
        assert memory == {}


def curved(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    """A strongly convex lower level whose Hessian changes with x."""
    scale = torch.logspace(-2, 1, 40, dtype=F64)
    return (scale * (x["x"] ** 2) / 2 + (x["x"] ** 4) / 12).sum() - theta["t"] @ x["x"]


def value(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    return ((x["x"] - 1) ** 2).sum() / 2


def lower_solution(theta: Tree) -> Tree:
    x = torch.zeros(40, dtype=F64)
    for _ in range(60):
        slope = torch.func.grad(lambda x: curved(theta, {"x": x}, {}))(x)
        x = x - slope / (torch.logspace(-2, 1, 40, dtype=F64) + x**2)
    return {"x": x}


class TestImplicit:
    PROBLEM = Problem(
        theta0={"t": normal(40, seed=13)}, x0={"x": torch.zeros(40, dtype=F64)}, g=curved, f=value
    )
    ESTIMATOR = Implicit(solver=RecycledCG(rank=30, rtol=1e-10, max_steps=200), warm_start=True)

    def run(self, state: State, steps: range) -> tuple[list[Estimate], State]:
        estimates = []
        for step in steps:
            theta = {"t": self.PROBLEM.theta0["t"] + 0.01 * step}
            x = lower_solution(theta)
            estimate, state = self.ESTIMATOR.estimate(self.PROBLEM, theta, Branch(x=x), KEY, state)
            estimates.append(estimate)
        return estimates, state

    @pytest.mark.extended
    def test_it_remembers_and_is_the_slope_of_the_value_function(self) -> None:
        estimates, state = self.run(self.ESTIMATOR.init(self.PROBLEM), range(3))
        assert state["memory"]["basis"].shape == (30, 40)
        counts = [estimate.cost.products for estimate in estimates]
        assert counts[2] < counts[0]
        theta = {"t": self.PROBLEM.theta0["t"] + 0.02}
        slope = finite_differences(lambda at: value(at, lower_solution(at), {}), theta)
        torch.testing.assert_close(estimates[2].value["t"], slope["t"], rtol=1e-5, atol=1e-7)

    def test_a_resumed_run_is_the_uninterrupted_one(self, tmp_path: Path) -> None:
        whole, end = self.run(self.ESTIMATOR.init(self.PROBLEM), range(5))
        _, half = self.run(self.ESTIMATOR.init(self.PROBLEM), range(3))
        save_state(tmp_path / "state.safetensors", half)
        rest, again = self.run(load_state(tmp_path / "state.safetensors"), range(3, 5))
        assert_same(
            [estimate.value for estimate in rest], [estimate.value for estimate in whole[3:]]
        )
        assert_same(again, end)

    def test_a_solver_without_a_memory_has_none_in_the_state(self) -> None:
        estimator = Implicit(solver=CG())
        _, state = estimator.estimate(
            self.PROBLEM, self.PROBLEM.theta0, Branch(x=self.PROBLEM.x0), KEY, {"v": None}
        )
        assert state == {"v": None}
