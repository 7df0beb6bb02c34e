"""The conjugate gradients of GPyTorch's linear_operator."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms.packages import optional_module
from hgms.solvers.rounds import Correction, in_rounds
from hgms_core import LinearSystem, MatVec, Outcome, Solution, component, hookimpl
from hgms_core.validators import at_least, not_negative, positive

TINY = 1e-30
"""Curvature that linear_cg treats as zero. Its default 1e-10 would end a solve at a relative
residual of about 1e-5.
"""


@final
@component
class LinearOperatorSolver:
    """(H + γI) v = b by the batched conjugate gradients of ``linear_operator``, used by GPyTorch.

    Use when a program already uses this solver and should have a single solver, or to compare.
    Avoid for short solves: it takes 11 steps before it checks the tolerance. The method is the same
    as ``cg``.

    Arguments:
        ridge: γ ≥ 0, in the units of H.
        rtol: relative residual to reach, > 0.
        max_steps: iteration limit.

    Outcomes: CONVERGED, by the true residual; ITERATION_LIMIT; NEGATIVE_CURVATURE, with the iterate
    before it; STAGNATED (no progress at the precision of the numbers, or b is outside the range of
    a singular H); NONFINITE. Rows of a batch that end early keep their values until the others end.

    Errors: MissingExtra without the package.

    Cost: one product per iteration (for the whole batch), one to check, one for a warm start.
    Memory: 6 vectors.

    >>> H = torch.tensor([2.0, 1.0, 4.0], dtype=torch.float64)
    >>> solution = LinearOperatorSolver(ridge=1.0).solve(
    ...     lambda v: H * v, torch.ones(3, dtype=torch.float64)
    ... )
    >>> solution.outcome.label, (1e6 * solution.value).round().div(1e6).tolist()
    ('converged', [0.333333, 0.5, 0.2])

    Source: Gardner, Pleiss, Bindel, Weinberger, Wilson, "GPyTorch", NeurIPS 2018 (without its
        preconditioner, which needs rows of the matrix).
    """

    name: ClassVar[str] = "linear-operator"

    ridge: float = field(default=0.0, validator=not_negative)
    rtol: float = field(default=1e-6, validator=positive)
    max_steps: int = field(default=100, validator=at_least(1))

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        linear_cg = _linear_cg()
        system = LinearSystem.of(matvec, b, ridge=self.ridge, rtol=self.rtol)

        def correct(r: Tensor, tolerance: Tensor, left: Tensor) -> Correction:
            codes = torch.full_like(left, Outcome.CONVERGED.code)
            steps = torch.zeros_like(left)
            curvature = torch.full_like(tolerance, torch.inf)
            largest = torch.zeros_like(tolerance)
            going = left > 0
            first = True

            def product(column: Tensor) -> Tensor:
                nonlocal codes, steps, curvature, largest, going, first
                v = column.squeeze(-1)
                if first or not going.any():  # the first is a product with 0
                    first = False
                    return torch.zeros_like(column)
                image = system.apply(v)
                size = system.dot(v, v)
                quotient = system.dot(v, image) / torch.where(size > 0, size, torch.ones_like(size))
                finite = torch.isfinite(image).all(-1)
                met = going & finite & (size > 0)
                largest = torch.where(met, torch.maximum(largest, quotient.abs()), largest)
                zero = 10 * system.precision * largest
                ended = going & (size > 0) & ~(finite & (quotient > zero))
                for outcome, where in (
                    (Outcome.NEGATIVE_CURVATURE, finite & (quotient < -zero)),
                    (Outcome.STAGNATED, finite & (quotient >= -zero)),
                    (Outcome.NONFINITE, ~finite),
                ):
                    codes = codes.masked_fill(ended & where, outcome.code)
                curvature = torch.where(met, torch.minimum(curvature, quotient), curvature)
                steps = steps + going
                going = going & ~ended
                # A product of 0 gives no curvature, and linear_cg does not move along such a
                # direction.
                return torch.where(system.rows(going), image, torch.zeros_like(image)).unsqueeze(-1)

            wanted = float(tolerance[left > 0].min())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the outcome reports non-convergence
                limits = {
                    "tolerance": wanted,
                    "stop_updating_after": wanted,
                    "max_iter": int(left.max()),
                }
                value = linear_cg(product, r.unsqueeze(-1), eps=TINY, max_tridiag_iter=0, **limits)
            return Correction(
                value=value.squeeze(-1),
                steps=steps,
                codes=codes,
                curvature=curvature,
                largest=largest,
            )

        return in_rounds(system, x0, self.max_steps, correct)


def _linear_cg() -> Callable[..., Any]:
    module = "linear_operator.utils.linear_cg"
    found = optional_module(module, "the solver linear-operator", "gpytorch", place=("solver",))
    solver: Callable[..., Any] = found.linear_cg
    return solver


@hookimpl
def hgms_register_linear_solvers() -> list[type]:
    return [LinearOperatorSolver]
