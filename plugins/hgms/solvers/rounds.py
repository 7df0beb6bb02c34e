"""Iterative refinement around an external solver, based on the true residual.

The solver proposes a correction, and this module computes the true residual. It requests further
corrections while they help.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import frozen
from torch import Tensor

from hgms_core import LinearSystem, Outcome, Solution

CONVERGED = Outcome.CONVERGED.code
LIMIT = Outcome.ITERATION_LIMIT.code


@frozen(kw_only=True)
class Correction:
    """A solver's correction for A d = r, per system.

    ``steps`` is the number of products used. ``codes`` is the reason for a failure (CONVERGED if
    there is none). ``curvature`` and ``largest`` are the smallest and the largest Rayleigh quotient
    seen. ``value`` may be any vector: :func:`in_rounds` decides whether to add it.
    """

    value: Tensor
    steps: Tensor
    codes: Tensor
    curvature: Tensor
    largest: Tensor


Corrector = Callable[[Tensor, Tensor, Tensor], Correction]
"""``(r, tolerance, left)``: return d with ‖r − A d‖ ≤ tolerance·‖r‖ if possible, in at most
``left`` products per system. A system with r = 0 needs no work.
"""


def in_rounds(
    system: LinearSystem, x0: Tensor | None, max_steps: int, correct: Corrector
) -> Solution:
    """Refine x ← x + d with A d = r = b − A x until the true residual is at most the target.

    ``correct`` computes d. Solvers stop by residuals that they update instead of computing (MINRES
    uses another criterion), so the true residual may be larger. The next round then starts from the
    remaining residual, with a smaller tolerance.

    Outcomes: ITERATION_LIMIT if the products are used up; STAGNATED if a round at the smallest
    tolerance has not halved the residual; otherwise the solver's reason, if it returned a reason.

    A correction is dropped in two cases. It does not shrink the residual (an iterate before
    negative curvature is kept). Or it is so long that the error of a product with it exceeds its
    gain: it lies along a direction without curvature.
    """
    x, r = system.start(x0)
    size = system.norm(r)
    codes = torch.where(
        size <= system.target,
        system.codes(Outcome.CONVERGED),
        system.codes(Outcome.ITERATION_LIMIT),
    )
    active = codes == LIMIT
    steps = torch.zeros_like(codes)
    curvature = torch.full_like(size, torch.inf)
    largest = torch.zeros_like(size)
    ease = torch.full_like(size, 0.9)
    while active.any():
        open_ = torch.where(system.rows(active), r, torch.zeros_like(r))
        tolerance = ease * system.target / torch.where(active, size, torch.ones_like(size))
        tolerance = tolerance.clamp_min(system.precision)
        correction = correct(open_, tolerance, torch.where(active, max_steps - steps, 0))
        steps = steps + correction.steps * active
        curvature = torch.minimum(curvature, correction.curvature)
        moved = torch.where(system.rows(active), x + correction.value, x)
        fresh = system.rhs - system.apply(moved)
        true = system.norm(fresh)
        stuck = ~(true <= 0.5 * size)
        largest = torch.maximum(largest, correction.largest)
        # Conjugate gradients that met negative curvature have decreased the quadratic, even if the
        # residual grew.
        descent = correction.codes == Outcome.NEGATIVE_CURVATURE.code
        gain = torch.where(descent, system.norm(fresh - r), size - true)
        error = 10 * system.precision * largest * system.norm(correction.value)
        better = active & torch.isfinite(true) & (gain > 0) & (error <= gain)
        last = (tolerance <= system.precision) | (correction.steps == 0) | ~better
        x = torch.where(system.rows(better), moved, x)
        r = torch.where(system.rows(better), fresh, r)
        size = torch.where(better, true, size)
        why = torch.where(
            size <= system.target,
            CONVERGED,
            torch.where(
                correction.codes != CONVERGED,
                correction.codes,
                torch.where(
                    steps >= max_steps,
                    LIMIT,
                    torch.where(stuck & last, Outcome.STAGNATED.code, CONVERGED),
                ),
            ),
        )
        ended = (size <= system.target) | (why != CONVERGED)
        codes = torch.where(active & ended, why, codes)
        active = active & ~ended
        ease = ease * torch.where(stuck, 1e-3, 0.1)
    return system.solution(x, size, codes, steps, curvature)
