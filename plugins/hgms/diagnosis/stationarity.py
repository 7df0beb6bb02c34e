"""The distance of x from a lower minimiser, and its effect on the hypergradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from hgms_core import Cost, Linearization, MatVec, Ravel, Tree, as_solver

SOLVE = 100
"""Maximum number of iterations of a solve."""
EXACT = 1e-10
"""Relative residual at which a solve stops."""


def minimum_residual(matvec: MatVec, b: Tensor) -> Tensor:
    """Compute H⁻¹b by SciPy's MINRES in float64.

    MINRES needs no positive curvature and does not change the null space of H.
    """
    from scipy.sparse.linalg import LinearOperator, minres  # only for a diagnosis

    def product(v: np.ndarray) -> np.ndarray:
        vector = torch.from_numpy(np.ascontiguousarray(v.reshape(-1))).to(b.device, b.dtype)
        return matvec(vector).detach().double().cpu().numpy()

    operator = LinearOperator((len(b), len(b)), matvec=product, dtype=np.float64)
    value, _ = minres(operator, b.double().cpu().numpy(), rtol=EXACT, maxiter=SOLVE)
    return torch.from_numpy(value).to(b.device, b.dtype)


def flat(tree: Tree) -> Tensor:
    """Concatenate all leaves into one float64 vector."""
    return (
        torch.cat([leaf.reshape(-1).double() for leaf in tree.values()])
        if tree
        else torch.zeros(0, dtype=torch.float64)
    )


def cosine_and_ratio(a: Tensor, b: Tensor) -> tuple[float | None, float | None]:
    """Compute (cosine, ‖a‖/‖b‖) of two vectors.

    Both are ``None`` if a vector is zero or not finite, because the angle is then undefined.

    Examples
    --------
    >>> cosine_and_ratio(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]))
    (1.0, 2.0)
    """
    a = a.double()
    b = b.double()
    sizes = float(torch.linalg.vector_norm(a)), float(torch.linalg.vector_norm(b))
    if not all(0 < size < math.inf for size in sizes):
        return None, None
    cosine = float((a / sizes[0]) @ (b / sizes[1]))
    return max(-1.0, min(1.0, cosine)), sizes[0] / sizes[1]


def bias(
    linearize: Callable[[Tree], Linearization],
    x: Tree,
    gradient: Tensor,
    ridge: float,
    rows: tuple[int, int],
) -> tuple[dict[str, Any], Cost]:
    """Measure the first-order effect of ∇ₓg ≠ 0 on the hypergradient.

    The measure compares h after the Newton step δ = −(H + γI)⁻¹∇ₓg with h before the step.
    ``newton_step`` is ‖δ‖, an estimate of the distance to S(θ). ``bias`` is ‖h(x) − h(x + δ)‖ /
    ‖h(x + δ)‖, and ``bias_cosine`` is the cosine of the two. h is equation (3) of the paper, by
    MINRES, which needs no positive curvature. ``rows`` are the rows of (f, g), for the cost.
    """
    solver = as_solver(minimum_residual)
    spec = Ravel.of(x)

    def with_ridge(x: Tree) -> Linearization:
        here = linearize(x)
        return attrs.evolve(here, matvec=lambda v: here.matvec(v) + ridge * v)

    start = with_ridge(x)
    step = solver.solve(start.matvec, -gradient)
    before = start.hypergradient(solver, rows=rows)
    after = with_ridge(spec.unravel(spec.ravel(x) + step.value)).hypergradient(solver, rows=rows)
    here = flat(before.value)
    there = flat(after.value)
    size = float(torch.linalg.vector_norm(there))
    row = {
        "newton_step": float(torch.linalg.vector_norm(step.value)),
        "newton_residual": float(step.residual),
        "bias": float(torch.linalg.vector_norm(here - there)) / size if size else None,
        "bias_cosine": cosine_and_ratio(here, there)[0],
    }
    steps = Cost(products=step.products, rows=step.products * rows[1])
    return row, before.cost + after.cost + steps
