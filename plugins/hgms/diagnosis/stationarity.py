"""The distance of x from a lower minimiser, and its effect on the hypergradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from hgms_core import (
    Batch,
    MatVec,
    Problem,
    Ravel,
    Strategy,
    Tree,
    cross_product,
    curvature,
    upper_gradients,
)

SOLVE = 100
"""Maximum number of iterations of a solve."""
EXACT = 1e-10
"""Relative residual at which a solve stops."""


def solved(matvec: MatVec, b: Tensor, ridge: float) -> tuple[Tensor, float, int]:
    """Compute (H + ridge·I)⁻¹ b by MINRES.

    The result includes the relative residual and the number of products.

    MINRES needs no positive curvature and does not change the null space of H.
    """
    products = 0

    def product(v: np.ndarray) -> np.ndarray:
        nonlocal products
        products += 1
        vector = torch.from_numpy(np.ascontiguousarray(v.reshape(-1))).to(b.device, b.dtype)
        return (matvec(vector).detach() + ridge * vector).double().cpu().numpy()

    right = b.double().cpu().numpy()
    size = float(np.linalg.norm(right))
    if size == 0:
        return torch.zeros_like(b), 0.0, 0
    from scipy.sparse.linalg import LinearOperator, minres  # only for a diagnosis

    operator = LinearOperator((len(right), len(right)), matvec=product, dtype=np.float64)
    value, _ = minres(operator, right, rtol=EXACT, maxiter=SOLVE)
    residual = float(np.linalg.norm(right - product(value))) / size
    return torch.from_numpy(value).to(b.device, b.dtype), residual, products


@frozen(eq=False)
class Reference:
    """The implicit hypergradient at any x, by one rule for every method.

    The rule is equation (3) of the paper on fixed rows, with MINRES and the ridge of the method's
    solve.
    """

    problem: Problem
    theta: Tree
    below: Batch
    above: Batch
    ridge: float
    strategy: Strategy

    def at(self, x: Tree) -> tuple[Tensor, int]:
        """Return h as a flat vector, and the number of Hessian products."""
        spec = Ravel.of(x)
        f = self.problem.f
        g = self.problem.g
        _, direct, slope = upper_gradients(lambda theta, x: f(theta, x, self.above), self.theta, x)
        v, _, products = solved(self.matvec(x), spec.ravel(slope), self.ridge)
        mixed = cross_product(
            lambda theta, x: g(theta, x, self.below),
            self.theta,
            x,
            spec.unravel(v),
            self.strategy,
            precision=self.problem.precision,
        )
        return flat(direct) - flat(mixed), products

    def matvec(self, x: Tree) -> MatVec:
        g = self.problem.g
        theta = self.theta
        return curvature(
            lambda x: g(theta, x, self.below), x, self.strategy, precision=self.problem.precision
        ).matvec


def flat(tree: Tree) -> Tensor:
    """Concatenate all leaves into one float64 vector."""
    return (
        torch.cat([leaf.reshape(-1).double() for leaf in tree.values()])
        if tree
        else torch.zeros(0, dtype=torch.float64)
    )


def compared(a: Tensor, b: Tensor) -> tuple[float | None, float | None]:
    """Compute (cosine, ‖a‖/‖b‖) of two vectors.

    Both are ``None`` if a vector is zero or not finite, because the angle is then undefined.

    >>> compared(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]))
    (1.0, 2.0)
    """
    a = a.double()
    b = b.double()
    sizes = float(torch.linalg.vector_norm(a)), float(torch.linalg.vector_norm(b))
    if not all(0 < size < math.inf for size in sizes):
        return None, None
    cosine = float((a / sizes[0]) @ (b / sizes[1]))
    return max(-1.0, min(1.0, cosine)), sizes[0] / sizes[1]


def bias(reference: Reference, x: Tree, gradient: Tensor) -> tuple[dict[str, Any], int]:
    """Measure the first-order effect of ∇ₓg ≠ 0 on the hypergradient.

    The measure compares h after the Newton step δ = −(H + γI)⁻¹∇ₓg with h before the step.
    ``newton_step`` is ‖δ‖, an estimate of the distance to S(θ). ``bias`` is ‖h(x) − h(x + δ)‖ /
    ‖h(x + δ)‖, and ``bias_cosine`` is the cosine of the two.
    """
    spec = Ravel.of(x)
    step, residual, products = solved(reference.matvec(x), -gradient, reference.ridge)
    moved = spec.unravel(spec.ravel(x) + step)
    here, one = reference.at(x)
    there, two = reference.at(moved)
    cosine, _ = compared(here, there)
    size = float(torch.linalg.vector_norm(there))
    shift = float(torch.linalg.vector_norm(here - there)) / size if size else None
    row = {
        "newton_step": float(torch.linalg.vector_norm(step)),
        "newton_residual": residual,
        "bias": shift,
        "bias_cosine": cosine,
    }
    return row, products + one + two
