"""Chebyshev's iteration as a linear solver for HGMS: a complete plugin in one module."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms_core import (
    ConfigError,
    LinearSolver,
    LinearSystem,
    MatVec,
    Outcome,
    Solution,
    component,
    hookimpl,
)
from hgms_core.validators import at_least, not_negative, positive


@final
@component
class ChebyshevSolver:
    """Chebyshev's iteration: CG's rate without inner products, for a spectrum with known ends.

    Iterate k has the residual T_k((c − A)/e) b / T_k(c/e), A = H + γI, c = (high + low)/2, e =
    (high − low)/2, with T_k the Chebyshev polynomial of degree k: for every spectrum in [low, high]
    the best that k products can promise.

    Use when the ends of the spectrum are known (low is at least the ridge) and inner products are
    dear, as between machines. Avoid when they are not known: an eigenvalue above ``high`` or below
    0 makes the iteration grow (``cg`` needs no bounds).

    Outcomes: CONVERGED; ITERATION_LIMIT; DIVERGED (the spectrum leaves [low, high]) with the best
        iterate; NONFINITE.

    Parameters
    ----------
    low, high
        Bounds on the eigenvalues of H + γI, 0 < low < high, in the units of H.
    ridge
        γ ≥ 0, in the units of H.
    rtol
        Relative residual to reach, > 0.
    max_steps
        Iteration limit.

    Notes
    -----
    Cost: one product an iteration, and one for a warm start. Memory: 5 vectors.

    Source: Golub & Varga (1961); Saad, "Iterative Methods for Sparse Linear Systems" (2003),
    section 12.3.

    Examples
    --------
    >>> A = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    >>> solution = ChebyshevSolver(low=1.0, high=4.0).solve(
    ...     lambda v: v @ A, torch.ones(3, dtype=torch.float64)
    ... )
    >>> solution.outcome.label, bool(torch.allclose(solution.value, 1 / A.diagonal(), rtol=1e-5))
    ('converged', True)
    """

    name: ClassVar[str] = "chebyshev"

    low: float = field(default=0.1, validator=positive)
    high: float = field(default=10.0, validator=positive)
    ridge: float = field(default=0.0, validator=not_negative)
    rtol: float = field(default=1e-6, validator=positive)
    max_steps: int = field(default=200, validator=at_least(1))

    def __attrs_post_init__(self) -> None:
        if self.high <= self.low:
            raise ConfigError(
                "out-of-range",
                f"high={self.high} must be greater than low={self.low}",
                place=("high",),
            )

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        system = LinearSystem.of(matvec, b, ridge=self.ridge, rtol=self.rtol)
        center = (self.high + self.low) / 2
        half = (self.high - self.low) / 2
        x, r = system.start(x0)
        direction = r / center
        ratio = half / center
        size = system.norm(r)
        best = x
        smallest = size
        codes = torch.where(
            size <= system.target,
            system.codes(Outcome.CONVERGED),
            system.codes(Outcome.ITERATION_LIMIT),
        )
        count = torch.zeros_like(codes)
        curvature = torch.full_like(size, torch.inf)
        for _ in range(self.max_steps):
            # a system that is done keeps its x; its direction is zero
            active = codes == Outcome.ITERATION_LIMIT.code
            if not active.any():
                break
            direction = torch.where(system.rows(active), direction, 0.0)
            product = system.apply(direction)
            x = x + direction
            r = r - product
            length = system.dot(direction, direction)
            curvature = torch.where(
                active, torch.minimum(curvature, system.dot(direction, product) / length), curvature
            )
            count = count + active
            size = system.norm(r)
            following = 1 / (2 * center / half - ratio)
            direction = following * ratio * direction + 2 * following / half * r
            ratio = following
            better = active & (size < smallest)
            best = torch.where(system.rows(better), x, best)
            smallest = torch.where(better, size, smallest)
            codes = torch.where(active & (size > 10 * system.size), Outcome.DIVERGED.code, codes)
            codes = torch.where(active & ~torch.isfinite(size), Outcome.NONFINITE.code, codes)
            codes = torch.where(active & (size <= system.target), Outcome.CONVERGED.code, codes)
        curvature = torch.where(torch.isnan(curvature), torch.inf, curvature)
        return system.solution(best, smallest, codes, count, curvature)


@hookimpl
def hgms_register_linear_solvers() -> list[type[LinearSolver]]:
    return [ChebyshevSolver]
