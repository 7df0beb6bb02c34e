"""Linear systems, and what every solver promises for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from hgms.contrib import LancBiO, RecycledCG, Roulette
from hgms.solvers import CG, MINRES, FixedPoint, Identity, Neumann, NystromCG
from hgms_core import CallableSolver, LinearSolver, MatVec

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


def dense(matvec: MatVec, b: Tensor) -> Tensor:
    """Every column of the operator, then a factorisation: exact to rounding, and unlike anything
    in the package.
    """
    columns = torch.stack([matvec(column) for column in torch.eye(len(b), dtype=b.dtype)], 1)
    return torch.linalg.solve(columns, b)


def newton(loss: Callable[[Tensor], Tensor], x: Tensor, steps: int = 8) -> Tensor:
    """The minimiser of a loss that is strongly convex, from near it."""
    for _ in range(steps):
        slope = torch.func.grad(loss)(x)
        x = x - torch.linalg.solve(torch.func.hessian(loss)(x), slope)
    return x


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
    assert (solution.value.shape, solution.value.dtype) == (b.shape, b.dtype)
    assert (
        solution.codes.shape
        == solution.residual.shape
        == solution.iterations.shape
        == solution.curvature.shape
        == b.shape[:-1]
    )
    assert solution.codes.dtype == torch.int64
    assert torch.cat([solution.value, solution.residual[..., None]], -1).isfinite().all()
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


quick = settings(max_examples=6, deadline=None)


EVERY = [*SOLVERS, RecycledCG(), LancBiO(), Roulette(), CallableSolver(lambda _, b: b)]
