"""The step that the Neumann series and the fixed-point iteration share."""

from __future__ import annotations

import torch
from torch import Tensor

from hgms_core import LinearSystem, Outcome, Solution

PATIENCE = 10


def richardson(system: LinearSystem, x0: Tensor | None, lr: float, steps: int, until_target: bool) -> Solution:
    """v ← v + lr·(b − (H + ridge·I) v), at most ``steps`` times, with the true residual after every step.

    For symmetric H the residual norm is a sum of geometric sequences, so it is log-convex in the iteration: once it grows it
    never falls again. Growing twofold therefore means divergence, and ``PATIENCE`` steps without a smaller residual mean that
    it diverges slowly or, where the growth is within rounding, that the numbers can do no better.
    """
    norm, pick = system.norm, system.pick
    eps = torch.finfo(system.rhs.dtype).eps
    x, r = system.start(x0)
    size = norm(r)
    best, smallest = x, size
    codes = torch.where(size <= system.target, system.codes(Outcome.CONVERGED), system.codes(Outcome.ITERATION_LIMIT))
    active = (codes == Outcome.ITERATION_LIMIT.code) if until_target else (system.finite & (system.size > 0))
    count, idle = torch.zeros_like(codes), torch.zeros_like(codes)
    curvature = torch.full_like(size, torch.inf)

    for _ in range(steps):
        if not active.any():
            break
        step = pick(active, r, r.new_zeros(()).expand_as(r))
        trial = torch.add(x, step, alpha=lr)
        fresh = system.rhs - system.apply(trial)
        length = norm(fresh)
        finite = torch.isfinite(length)
        # r − fresh = lr·(H + ridge·I) r, so the Rayleigh quotient along r is free, until r drowns in rounding.
        quotient = system.dot(step, r - fresh) / (lr * size**2)
        seen = active & finite & (size > eps**0.5 * system.size)
        curvature = torch.where(seen, torch.minimum(curvature, quotient), curvature)
        codes = torch.where(active & ~finite, Outcome.NONFINITE.code, codes)
        active = active & finite
        x, r = pick(active, trial, x), pick(active, fresh, r)
        size, count = torch.where(active, length, size), count + active

        better = active & (size < smallest)
        best, smallest = pick(better, x, best), torch.where(better, size, smallest)
        idle = torch.where(better, 0, idle + 1)
        noise = 10 * eps * (system.size + 2 * norm(x) / lr)
        grown = (size > 2 * smallest) & (size > smallest + noise)
        stalled = (idle >= PATIENCE) & ~grown
        stalled_code = torch.where(size > smallest + noise, Outcome.DIVERGED.code, Outcome.STAGNATED.code)
        codes = torch.where(active & grown, Outcome.DIVERGED.code, torch.where(active & stalled, stalled_code, codes))
        active = active & ~grown & ~stalled
        if until_target:
            done = active & (size <= system.target)
            codes, active = torch.where(done, Outcome.CONVERGED.code, codes), active & ~done

    # Running out of steps (or terms) while growing is divergence too; what was best is the answer.
    left = codes == Outcome.ITERATION_LIMIT.code
    rising = left & (size > smallest + 10 * eps * (system.size + 2 * norm(x) / lr))
    codes = torch.where(rising, Outcome.DIVERGED.code, codes)
    failed = (codes == Outcome.DIVERGED.code) | (codes == Outcome.STAGNATED.code)
    x, size = pick(failed, best, x), torch.where(failed, smallest, size)
    reached = (left | (codes == Outcome.STAGNATED.code)) & (size <= system.target)
    codes = torch.where(reached, Outcome.CONVERGED.code, codes)
    return system.solution(x, size, codes, count, curvature)
