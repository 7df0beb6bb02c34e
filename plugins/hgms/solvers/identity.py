"""The inverse Hessian approximated by a multiple of the identity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms_core import LinearSystem, MatVec, Outcome, Solution, component, hookimpl
from hgms_core.validators import not_negative, positive


@final
@component
class Identity:
    """v = scale·b: the first-order estimate that replaces (H + γI)⁻¹ by scale·I.

    Use when a solve with Hessian products is too expensive, or as an ablation that shows the gain
    from solving. Avoid when curvature differs much between directions: only the sign pattern of the
    hypergradient may then be trusted.

    Outcomes: CONVERGED if the residual happens to be at most ``rtol``, else NOT_SOLVED (there was
    no iteration); NONFINITE. ``x0`` is not used.

    Parameters
    ----------
    scale
        > 0, in the units of 1/H. With the inner step size, the estimate is one unrolled step of the
        lower level.
    ridge
        γ ≥ 0, in the units of H; affects only the residual.
    rtol
        Maximum relative residual for the outcome CONVERGED, > 0.

    Notes
    -----
    Cost: one product, to report the true residual ‖b − (H + γI) v‖/‖b‖.

    Source: the T1–T2 approximation of Luketina et al. (2016); the first-order variant of DARTS (Liu
    et al., 2019) is similar.

    Examples
    --------
    >>> solution = Identity(scale=0.5).solve(lambda v: 2 * v, torch.ones(3))
    >>> solution.value, solution.outcome.label
    (tensor([0.5000, 0.5000, 0.5000]), 'converged')
    """

    name: ClassVar[str] = "identity"
    testing_failures: ClassVar[Mapping[str, str]] = {
        "dense-solve": "it solves nothing: v = scale·b is its definition"
    }

    scale: float = field(default=1.0, validator=positive)
    ridge: float = field(default=0.0, validator=not_negative)
    rtol: float = field(default=1e-6, validator=positive)

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        system = LinearSystem.of(matvec, b, ridge=self.ridge, rtol=self.rtol)
        return solution_of(system, self.scale * system.rhs)


def solution_of(system: LinearSystem, x: Tensor, clip: float | None = None) -> Solution:
    """Return x as a solution without iterations, with its residual: one product."""
    product = system.apply(x)
    residual = system.norm(system.rhs - product)
    curvature = system.dot(x, product) / system.dot(x, x)
    finite = torch.isfinite(residual)
    codes = torch.where(
        residual <= system.target, system.codes(Outcome.CONVERGED), system.codes(Outcome.NOT_SOLVED)
    )
    return system.solution(
        x,
        torch.where(finite, residual, system.size),
        codes.masked_fill(~finite, Outcome.NONFINITE.code),
        torch.zeros_like(codes),
        curvature.masked_fill(~torch.isfinite(curvature), torch.inf),
        clip,
    )


@hookimpl
def hgms_register_linear_solvers() -> list[type]:
    return [Identity]
