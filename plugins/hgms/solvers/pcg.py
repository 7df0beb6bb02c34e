"""The preconditioned conjugate-gradient loop that ``cg`` and ``nystrom`` share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from attrs import field
from torch import Tensor

from hgms.compiled import CompiledProduct, is_traced, repeat
from hgms.solvers.iteration import READ_EVERY, eager, iterate, waits
from hgms_core import LinearSystem, MatVec, Outcome, Solution, Tree, component
from hgms_core.validators import at_least, not_negative, optional_positive, positive

dot = LinearSystem.dot
norm = LinearSystem.norm
rows = LinearSystem.rows
pick = LinearSystem.pick
Precondition = Callable[[Tensor], Tensor]
TRUSTED = 50
"""Maximum number of steps for which the recursion's residual of a truncated solve is trusted
without a check.
"""

CONVERGED, LIMIT, NEGATIVE, STAGNATED, NONFINITE = (
    Outcome[name].code
    for name in ("CONVERGED", "ITERATION_LIMIT", "NEGATIVE_CURVATURE", "STAGNATED", "NONFINITE")
)


@component
class ConjugateGradients:
    """The settings of solvers by conjugate gradients, and a solve with them."""

    name: ClassVar[str]

    ridge: float = field(default=0.0, validator=not_negative)
    rtol: float = field(default=1e-6, validator=positive)
    atol: float = field(default=0.0, validator=not_negative)
    max_steps: int = field(default=100, validator=at_least(1))
    clip: float | None = field(default=None, validator=optional_positive)

    def system(self, matvec: MatVec, b: Tensor) -> LinearSystem:
        return LinearSystem.of(matvec, b, ridge=self.ridge, rtol=self.rtol, atol=self.atol)

    def run(
        self,
        system: LinearSystem,
        x0: Tensor | None,
        precondition: Precondition | None = None,
        largest: Tensor | None = None,
    ) -> Solution:
        """Solve the system by :func:`pcg`."""
        return pcg(system, x0, self.max_steps, self.clip, precondition, largest)


def pcg(
    system: LinearSystem,
    x0: Tensor | None,
    max_steps: int,
    clip: float | None,
    precondition: Precondition | None = None,
    largest: Tensor | None = None,
) -> Solution:
    """Solve ``system`` by preconditioned conjugate gradients.

    Every scalar below has one number per system, and ``active`` marks the unfinished systems.
    ``largest`` is the largest curvature known so far; the test for zero curvature is relative to
    it.

    One product at the end checks the recursion's residual, except after a short truncated solve. If
    the recursion was too optimistic, the iteration continues from the true residual while that
    residual falls. Otherwise floating-point precision is exhausted, and the outcome is STAGNATED.
    With a :class:`hgms.compiled.CompiledProduct`, a compiled function runs one or several
    iterations.

    On an accelerator, the host does not wait for a solve of at most ``READ_EVERY`` steps: the solve
    makes all products and the check, counts the necessary ones, and ends after the check.
    """
    product = system.matvec
    state = begin(system, x0, max_steps, precondition, largest)
    if is_traced():
        state = _solve_in_program(system, state, max_steps, precondition)
        return _solution(system, state, clip)
    verified = state["size"]
    unread = waits(system) and max_steps <= READ_EVERY
    while unread or state["active"].any():
        if isinstance(product, CompiledProduct) and precondition is None:
            state = iterate("cg", (max_steps,), system, iteration, state, max_steps)
        else:
            step = partial(iteration, system, max_steps=max_steps, precondition=precondition)
            state = eager(system, step, state, max_steps)
        state = settle(system, state, precondition)
        claimed = claims(state).any()
        if not (unread or claimed):
            break
        fresh = system.rhs - system.apply(state["x"])
        proven = check_residual(system, state, fresh, verified, max_steps, precondition)
        if unread:
            system.products = system.products + claimed.long() - 1
            state = {name: torch.where(claimed, proven[name], state[name]) for name in state}
            break
        state = proven
        verified = state["size"]
    return _solution(system, state, clip)


def _solution(system: LinearSystem, state: Tree, clip: float | None) -> Solution:
    return system.solution(
        state["x"], state["size"], state["codes"], state["steps"], state["curvature"], clip
    )


def _solve_in_program(
    system: LinearSystem, state: Tree, max_steps: int, precondition: Precondition | None
) -> Tree:
    """Iterate and check the residual until the system is not active, as a function of tensors."""
    fixed = {name: state[name] for name in ("floor", "ceiling")}

    def is_active(state: Tree) -> Tensor:
        return state["active"].any()

    def without_fixed(state: Tree) -> Tree:
        return {name: leaf for name, leaf in state.items() if name not in fixed}

    def turn(state: Tree) -> Tree:
        products = state["products"] + state["active"].any()
        state = iteration(system, {**state, **fixed}, max_steps, precondition)
        return {**without_fixed(state), "products": products}

    def attempt(state: Tree) -> Tree:
        verified = state["verified"]
        own = {name: leaf for name, leaf in state.items() if name != "verified"}
        own, _ = repeat(turn, own, max_steps, going=is_active)
        products = own.pop("products")
        own = settle(system, own, precondition)

        def check(state: Tree) -> Tree:
            fresh = system.rhs - system.apply(state["x"])
            return check_residual(system, state, fresh, verified, max_steps, precondition)

        own, checks = repeat(check, own, 1, going=lambda state: claims(state).any())
        return {**own, "verified": own["size"], "products": products + checks}

    before = system.products
    none = torch.zeros((), dtype=torch.int64, device=state["x"].device)
    first = {**without_fixed(state), "verified": state["size"], "products": none}
    ended, _ = repeat(attempt, first, max_steps + 1, going=is_active)
    system.products = before + ended["products"]
    return ended


def begin(
    system: LinearSystem,
    x0: Tensor | None,
    max_steps: int,
    precondition: Precondition | None,
    largest: Tensor | None,
) -> Tree:
    """Return the state before the first iteration."""
    eps = torch.finfo(system.rhs.dtype).eps
    x, r = system.start(x0)
    size = norm(r)
    # Below the floor, the recursion is no longer accurate. Above the ceiling, A is numerically
    # singular, because ‖r_k‖ ≤ √cond(A)·‖r_0‖ for a positive definite A.
    floor = torch.maximum(system.target, eps * system.size)
    ceiling = system.size / system.precision**0.5
    codes = torch.where(
        size <= system.target,
        system.codes(Outcome.CONVERGED),
        system.codes(Outcome.ITERATION_LIMIT),
    )
    z = r if precondition is None else precondition(r)
    return {
        "x": x,
        "r": r,
        "p": z,
        "rz": dot(r, z),
        "size": size,
        "codes": codes,
        "active": (codes == LIMIT) & (max_steps > 0),
        "steps": torch.zeros_like(codes),
        "best": x,
        "smallest": size,
        "curvature": torch.full_like(size, torch.inf),
        "largest": torch.zeros_like(size) if largest is None else largest,
        "floor": floor,
        "ceiling": ceiling,
    }


def settle(system: LinearSystem, state: Tree, precondition: Precondition | None = None) -> Tree:
    """Replace the iterate by the best iterate if the iteration failed.

    It failed if it broke down, or if it is worse than v = 0 at the step limit. With a
    preconditioner, steps may be long in directions of small curvature. Then an iterate at negative
    curvature that is worse than v = 0 is also replaced.
    """
    codes = state["codes"]
    ended = codes == LIMIT if precondition is None else (codes == LIMIT) | (codes == NEGATIVE)
    stuck = (codes == STAGNATED) | (ended & (state["size"] > system.size))
    x = pick(stuck, state["best"], state["x"])
    size = torch.where(stuck, state["smallest"], state["size"])
    return {**state, "x": x, "size": size}


def claims(state: Tree) -> Tensor:
    """Return which systems need a check of the residual.

    Over few steps, the recursion's residual equals the true residual.
    """
    return (
        (state["codes"] == CONVERGED) | (state["codes"] == STAGNATED) | (state["steps"] > TRUSTED)
    )


def check_residual(
    system: LinearSystem,
    state: Tree,
    fresh: Tensor,
    verified: Tensor,
    max_steps: int,
    precondition: Precondition | None = None,
) -> Tree:
    """Return the state with the recomputed residual ``fresh``.

    If the recursion's residual was too small, the outcome is STAGNATED. The iteration continues if
    the new residual is smaller than the last verified residual. An iterate that is worse than v = 0
    is dropped, except before negative curvature.
    """
    true = norm(fresh)
    known = torch.isfinite(true)
    codes = state["codes"]
    lost = known & (true > system.size) & (codes != NEGATIVE)
    x = pick(lost, torch.zeros_like(state["x"]), state["x"])
    r = pick(lost, system.rhs, pick(known, fresh, state["r"]))
    size = torch.where(lost, system.size, torch.where(known, true, state["size"]))
    steps = state["steps"]
    missed = (codes == CONVERGED) & (size > system.target)
    codes = codes.masked_fill(missed, STAGNATED).masked_fill(missed & (steps >= max_steps), LIMIT)
    codes = codes.masked_fill(
        ((codes == LIMIT) | (codes == STAGNATED)) & (size <= system.target), CONVERGED
    )
    active = missed & (size < 0.9 * verified) & (steps < max_steps)
    z = r if precondition is None else precondition(r)
    return {
        **state,
        "x": x,
        "r": r,
        "p": z,
        "rz": dot(r, z),
        "size": size,
        "codes": codes.masked_fill(active, LIMIT),
        "active": active,
        "best": x,
        "smallest": size,
    }


def iteration(
    system: LinearSystem, state: Tree, max_steps: int, precondition: Precondition | None = None
) -> Tree:
    """Take one step of conjugate gradients, as a function of tensors only."""
    p, active, largest, curvature, codes = (
        state[name] for name in ("p", "active", "largest", "curvature", "codes")
    )
    ap = system.apply(p)
    pap = dot(p, ap)
    pp = dot(p, p)
    quotient = pap / pp
    finite = torch.isfinite(pap)
    largest = torch.where(active & finite, torch.maximum(largest, quotient), largest)
    curvature = torch.where(active & finite, torch.minimum(curvature, quotient), curvature)
    zero = 10 * system.precision * largest
    # zero up to rounding: A is singular, and b is not in its range
    negative = quotient < -zero
    flat = quotient.abs() <= zero
    for outcome, where in ((NEGATIVE, negative), (STAGNATED, flat), (NONFINITE, ~finite)):
        codes = codes.masked_fill(active & where, outcome)
    active = active & finite & ~negative & ~flat
    alpha = rows(torch.where(active, state["rz"] / pap, torch.zeros_like(pap)))
    x = torch.addcmul(state["x"], alpha, p)
    r = state["r"]
    r = torch.addcmul(r, alpha, pick(active, ap, r.new_zeros(()).expand_as(r)), value=-1)
    size = torch.where(active, norm(r), state["size"])
    steps = state["steps"] + active

    better = active & (size < state["smallest"])
    best = pick(better, x, state["best"])
    smallest = torch.where(better, size, state["smallest"])
    z = r if precondition is None else precondition(r)
    rz = dot(r, z)
    broken = ~(size <= state["ceiling"]) | ~(rz > 0)
    codes = codes.masked_fill(active & broken, STAGNATED)
    codes = codes.masked_fill(active & (size <= state["floor"]), CONVERGED)
    active = active & ~broken & (size > state["floor"]) & (steps < max_steps)
    p = torch.addcmul(z, rows(torch.where(active, rz / state["rz"], torch.zeros_like(rz))), p)
    return {
        "x": x,
        "r": r,
        "p": p,
        "rz": rz,
        "size": size,
        "codes": codes,
        "active": active,
        "steps": steps,
        "best": best,
        "smallest": smallest,
        "curvature": curvature,
        "largest": largest,
        "floor": state["floor"],
        "ceiling": state["ceiling"],
    }


def whole(
    matvec: MatVec,
    b: Tensor,
    x0: Tensor | None,
    earlier: Tree | None,
    solver: ConjugateGradients,
    count: int,
) -> tuple[Tree, Tensor, Tensor, Tree]:
    """Run :func:`pcg` with ``count`` iterations and one check, as a function of tensors only.

    It starts from ``x0`` or from the state of an ``earlier`` call. Return the fields of the
    solution, the number of products, whether to continue, and the state to continue from.
    """
    max_steps = solver.max_steps
    system = solver.system(matvec, b)
    if earlier is None:
        state = begin(system, x0, max_steps, None, None)
        verified = state["size"]
        products = torch.zeros_like(state["steps"].sum()) + (x0 is not None)
    else:
        state = {name: leaf for name, leaf in earlier.items() if name != "verified"}
        verified = earlier["verified"]
        products = torch.zeros_like(state["steps"].sum())
    for _ in range(count):
        products = products + state["active"].any()
        state = iteration(system, state, max_steps)
    going = state["active"].any()
    ended = settle(system, state)
    claimed = claims(ended).any()
    proven = check_residual(
        system, ended, system.rhs - system.apply(ended["x"]), verified, max_steps
    )
    ended = {name: torch.where(claimed, proven[name], leaf) for name, leaf in ended.items()}
    verified = torch.where(claimed & ~going, ended["size"], verified)
    state = {name: torch.where(going, leaf, ended[name]) for name, leaf in state.items()}
    solution = system.solution(
        state["x"], state["size"], state["codes"], state["steps"], state["curvature"], solver.clip
    )
    numbers = {
        name: getattr(solution, name)
        for name in ("value", "codes", "residual", "iterations", "curvature")
    }
    return (
        numbers,
        products + (claimed & ~going),
        state["active"].any(),
        {**state, "verified": verified},
    )
