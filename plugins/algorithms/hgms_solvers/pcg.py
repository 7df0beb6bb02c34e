"""The preconditioned conjugate-gradient loop that ``cg`` and ``nystrom`` share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hgms_core import LinearSystem, Outcome, Solution, Tree, clone
from hgms_graphs import CompiledProduct, RecordedProduct

dot, norm, rows, pick = LinearSystem.dot, LinearSystem.norm, LinearSystem.rows, LinearSystem.pick
Precondition = Callable[[Tensor], Tensor]
TRUSTED = 50
"""Steps over which the recursion's residual of a solve that was cut short is taken for the true one."""

CONVERGED, LIMIT, NEGATIVE, STAGNATED, NONFINITE = (
    Outcome[name].code for name in ("CONVERGED", "ITERATION_LIMIT", "NEGATIVE_CURVATURE", "STAGNATED", "NONFINITE")
)


def pcg(
    system: LinearSystem,
    x0: Tensor | None,
    max_steps: int,
    clip: float | None,
    precondition: Precondition | None = None,
    largest: Tensor | None = None,
) -> Solution:
    """Solve ``system``; every scalar below holds one number per system, and ``active`` says which are not finished.
    ``largest`` is the largest curvature known so far, against which zero is judged.

    The recursion's residual is checked with one product at the end, except where a short solve was cut off. Where it was too
    optimistic the iteration goes on from the true residual, as long as that still falls; else the numbers can do no better, and
    the outcome is STAGNATED. Of a :class:`hgms_graphs.RecordedProduct` an iteration is one launch, of a
    :class:`hgms_graphs.CompiledProduct` one or several are a program.
    """
    eps = torch.finfo(system.rhs.dtype).eps
    x, r = system.start(x0)
    size = norm(r)
    # Below the floor the recursion no longer says anything; above the ceiling A is numerically singular, because
    # ‖r_k‖ ≤ √cond(A)·‖r_0‖ for a positive definite A.
    floor, ceiling = torch.maximum(system.target, eps * system.size), system.size / eps**0.5
    codes = torch.where(size <= system.target, system.codes(Outcome.CONVERGED), system.codes(Outcome.ITERATION_LIMIT))
    active = (codes == LIMIT) & (max_steps > 0)
    steps, verified = torch.zeros_like(codes), size
    curvature, largest = torch.full_like(size, torch.inf), torch.zeros_like(size) if largest is None else largest
    best, smallest = x, size

    while active.any():
        z = r if precondition is None else precondition(r)
        state = {
            "x": x, "r": r, "p": z, "rz": dot(r, z), "size": size, "codes": codes, "active": active, "steps": steps,
            "best": best, "smallest": smallest, "curvature": curvature, "largest": largest, "floor": floor, "ceiling": ceiling,
        }  # fmt: skip
        if isinstance(system.matvec, RecordedProduct) and precondition is None:
            state = _recorded(system.matvec, system, state, max_steps)
        elif isinstance(system.matvec, CompiledProduct) and precondition is None:
            state = _launched(system.matvec, system, state, max_steps)
        else:
            while state["active"].any():
                state = iteration(system, state, max_steps, precondition)
        x, r, size, codes, active, steps = (state[name] for name in ("x", "r", "size", "codes", "active", "steps"))
        best, smallest, curvature, largest = (state[name] for name in ("best", "smallest", "curvature", "largest"))

        # Where the iteration broke down, or is worse than v = 0 when it runs out of steps, the best iterate is the answer.
        stuck = (codes == STAGNATED) | ((codes == LIMIT) & (size > system.size))
        x, size = pick(stuck, best, x), torch.where(stuck, smallest, size)
        # A truncated solve makes no claim that needs proof: over few steps the recursion's residual is the residual.
        if not ((codes == CONVERGED) | (codes == STAGNATED) | (steps > TRUSTED)).any():
            break
        # Otherwise the residual is computed afresh.
        fresh = system.rhs - system.apply(x)
        true = norm(fresh)
        known = torch.isfinite(true)
        r, size = pick(known, fresh, r), torch.where(known, true, size)
        missed = (codes == CONVERGED) & (size > system.target)
        codes = codes.masked_fill(missed, STAGNATED).masked_fill(missed & (steps >= max_steps), LIMIT)
        codes = codes.masked_fill(((codes == LIMIT) | (codes == STAGNATED)) & (size <= system.target), CONVERGED)
        active = missed & (size < 0.9 * verified) & (steps < max_steps)
        codes, verified = codes.masked_fill(active, LIMIT), size
        best, smallest = x, size

    return system.solution(x, size, codes, steps, curvature, clip)


def iteration(system: LinearSystem, state: Tree, max_steps: int, precondition: Precondition | None = None) -> Tree:
    """One step of conjugate gradients, as a function of tensors alone."""
    eps = torch.finfo(system.rhs.dtype).eps
    p, active, largest, curvature, codes = (state[name] for name in ("p", "active", "largest", "curvature", "codes"))
    ap = system.apply(p)
    pap, pp = dot(p, ap), dot(p, p)
    quotient = pap / pp
    finite = torch.isfinite(pap)
    largest = torch.where(active & finite, torch.maximum(largest, quotient), largest)
    curvature = torch.where(active & finite, torch.minimum(curvature, quotient), curvature)
    zero = 10 * eps * largest
    negative, flat = quotient < -zero, quotient.abs() <= zero  # zero to rounding: A is singular, and b not in its range
    for outcome, where in ((NEGATIVE, negative), (STAGNATED, flat), (NONFINITE, ~finite)):
        codes = codes.masked_fill(active & where, outcome)
    active = active & finite & ~negative & ~flat
    alpha = rows(torch.where(active, state["rz"] / pap, torch.zeros_like(pap)))
    x = torch.addcmul(state["x"], alpha, p)
    r = state["r"]
    r = torch.addcmul(r, alpha, pick(active, ap, r.new_zeros(()).expand_as(r)), value=-1)
    size, steps = torch.where(active, norm(r), state["size"]), state["steps"] + active

    better = active & (size < state["smallest"])
    best, smallest = pick(better, x, state["best"]), torch.where(better, size, state["smallest"])
    z = r if precondition is None else precondition(r)
    rz = dot(r, z)
    broken = ~(size <= state["ceiling"]) | ~(rz > 0)
    codes = codes.masked_fill(active & broken, STAGNATED)
    codes = codes.masked_fill(active & (size <= state["floor"]), CONVERGED)
    active = active & ~broken & (size > state["floor"]) & (steps < max_steps)
    p = torch.addcmul(z, rows(torch.where(active, rz / state["rz"], torch.zeros_like(rz))), p)
    return {
        "x": x, "r": r, "p": p, "rz": rz, "size": size, "codes": codes, "active": active, "steps": steps,
        "best": best, "smallest": smallest, "curvature": curvature, "largest": largest,
        "floor": state["floor"], "ceiling": state["ceiling"],
    }  # fmt: skip


def _recorded(product: RecordedProduct, system: LinearSystem, state: Tree, max_steps: int) -> Tree:
    """The iterations of a system whose operator is recorded: each is one launch."""
    counted = copy.copy(system)  # what the recording itself calls is not counted

    def advance(state: Tree) -> Tensor:
        after = iteration(counted, state, max_steps)
        for name, leaf in after.items():
            if leaf is not state[name]:
                state[name].copy_(leaf)
        return after["active"].any()

    recording = product.recording(("pcg", system.ridge, max_steps), advance, state)
    recording.load(state)
    going = True
    while going:
        going = bool(recording.run())
        system.products += 1
    return clone(recording.arguments[0])


def _launched(product: CompiledProduct, system: LinearSystem, state: Tree, max_steps: int) -> Tree:
    """The iterations of a system whose operator is compiled."""
    advance = product.loop("cg", (max_steps,), system.ridge, partial(iteration, max_steps=max_steps), max_steps)
    while state["active"].any():
        state, needed = advance(state)
        system.products += int(needed)
    return state
