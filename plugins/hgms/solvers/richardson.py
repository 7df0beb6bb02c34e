"""The step that the Neumann series and the fixed-point iteration share."""

from __future__ import annotations

import torch
from torch import Tensor

from hgms.solvers.iteration import iterate
from hgms_core import LinearSystem, Outcome, Solution, Tree

norm = LinearSystem.norm
pick = LinearSystem.pick
PATIENCE = 10


def richardson(
    system: LinearSystem, x0: Tensor | None, lr: float, steps: int, until_target: bool
) -> Solution:
    """Iterate v ← v + lr·(b − (H + ridge·I) v), at most ``steps`` times.

    Each step computes the true residual. For symmetric H, the residual norm is a sum of geometric
    sequences, so it is log-convex in the iteration: after it grows, it never falls. Twofold growth
    therefore means divergence. ``PATIENCE`` steps without a smaller residual mean slow divergence.
    If the growth is within rounding, they mean that floating-point precision is exhausted.
    """
    eps = torch.finfo(system.rhs.dtype).eps
    x, r = system.start(x0)
    size = norm(r)
    codes = torch.where(
        size <= system.target,
        system.codes(Outcome.CONVERGED),
        system.codes(Outcome.ITERATION_LIMIT),
    )
    active = (
        (codes == Outcome.ITERATION_LIMIT.code)
        if until_target
        else (system.finite & (system.size > 0))
    )
    state = {
        "x": x,
        "r": r,
        "size": size,
        "best": x,
        "smallest": size,
        "codes": codes,
        "active": active,
        "steps": torch.zeros_like(codes),
        "idle": torch.zeros_like(codes),
        "curvature": torch.full_like(size, torch.inf),
        "rhs": system.rhs,
        "whole": system.size,
        "target": system.target,
    }
    state = iterate("richardson", (lr, steps, until_target), system, iteration, state, steps)
    x, size, best, smallest, codes = (
        state[name] for name in ("x", "size", "best", "smallest", "codes")
    )

    # Growth until the last step (or term) is also divergence; return the best iterate.
    left = codes == Outcome.ITERATION_LIMIT.code
    rising = left & (size > smallest + 10 * eps * (system.size + 2 * norm(x) / lr))
    codes = codes.masked_fill(rising, Outcome.DIVERGED.code)
    failed = (codes == Outcome.DIVERGED.code) | (codes == Outcome.STAGNATED.code)
    x = pick(failed, best, x)
    size = torch.where(failed, smallest, size)
    # A small enough residual is a solution, even if it grew later: an operator by differences is
    # noisy.
    reached = (left | failed) & (size <= system.target)
    codes = codes.masked_fill(reached, Outcome.CONVERGED.code)
    return system.solution(x, size, codes, state["steps"], state["curvature"])


def iteration(system: LinearSystem, state: Tree, lr: float, steps: int, until_target: bool) -> Tree:
    """Take one step, as a function of tensors only."""
    eps = torch.finfo(state["r"].dtype).eps
    x, r, size, codes, active, whole = (
        state[name] for name in ("x", "r", "size", "codes", "active", "whole")
    )
    step = pick(active, r, r.new_zeros(()).expand_as(r))
    trial = torch.add(x, step, alpha=lr)
    fresh = state["rhs"] - system.apply(trial)
    length = norm(fresh)
    finite = torch.isfinite(length)
    # r − fresh = lr·(H + ridge·I) r, so the Rayleigh quotient along r costs no product. It is valid
    # until rounding dominates r.
    quotient = system.dot(step, r - fresh) / (lr * size**2)
    seen = active & finite & (size > eps**0.5 * whole)
    curvature = torch.where(seen, torch.minimum(state["curvature"], quotient), state["curvature"])
    codes = codes.masked_fill(active & ~finite, Outcome.NONFINITE.code)
    active = active & finite
    x = pick(active, trial, x)
    r = pick(active, fresh, r)
    size = torch.where(active, length, size)
    count = state["steps"] + active

    better = active & (size < state["smallest"])
    best = pick(better, x, state["best"])
    smallest = torch.where(better, size, state["smallest"])
    idle = (state["idle"] + 1).masked_fill(better, 0)
    noise = 10 * eps * (whole + 2 * norm(x) / lr)
    grown = (size > 2 * smallest) & (size > smallest + noise)
    stalled = (idle >= PATIENCE) & ~grown
    codes = codes.masked_fill(active & stalled, Outcome.STAGNATED.code)
    codes = codes.masked_fill(
        active & (grown | (stalled & (size > smallest + noise))), Outcome.DIVERGED.code
    )
    active = active & ~grown & ~stalled
    if until_target:
        done = active & (size <= state["target"])
        codes = codes.masked_fill(done, Outcome.CONVERGED.code)
        active = active & ~done
    return {
        "x": x,
        "r": r,
        "size": size,
        "best": best,
        "smallest": smallest,
        "codes": codes,
        "active": active & (count < steps),
        "steps": count,
        "idle": idle,
        "curvature": curvature,
        "rhs": state["rhs"],
        "whole": whole,
        "target": state["target"],
    }
