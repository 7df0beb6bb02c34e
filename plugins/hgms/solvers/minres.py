"""The minimum-residual method of Paige and Saunders."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms.solvers.iteration import iterate
from hgms_core import LinearSystem, MatVec, Outcome, Solution, Tree, component, hookimpl
from hgms_core.validators import at_least, not_negative, positive

dot = LinearSystem.dot
norm = LinearSystem.norm
rows = LinearSystem.rows
CONVERGED, LIMIT, STAGNATED, NONFINITE = (
    Outcome[name].code for name in ("CONVERGED", "ITERATION_LIMIT", "STAGNATED", "NONFINITE")
)


@final
@component
class MINRES:
    """argmin ‖b − (H + γI) v‖ over the Krylov space, for symmetric H, also indefinite or singular.

    The Lanczos process gives H + γI as a tridiagonal matrix in an orthonormal basis; Givens
    rotations solve the small least-squares problem as it grows. The residual norm never increases.

    Use when H + γI is indefinite (a lower state that is not a minimiser yet) or singular. Avoid
    when it is positive definite: ``cg`` gives smaller errors for the same products. At a saddle,
    bᵀv may be negative; ``cg``, which stops before that, may give the safer hypergradient.

    Outcomes: CONVERGED; ITERATION_LIMIT; STAGNATED; NONFINITE. STAGNATED means one of two cases.
    ‖(H + γI) r‖ vanishes relative to ‖H + γI‖·‖r‖: the system is singular and inconsistent, and v
    is a least-squares solution. Or the tolerance is too tight for floating-point precision.

    Parameters
    ----------
    ridge
        γ ≥ 0, in the units of H.
    rtol, atol
        Relative residual to reach, > 0, or absolute residual, ≥ 0, in the units of b.
    max_steps
        Iteration limit.

    Notes
    -----
    Cost: one product per iteration, one to check the residual at the end, one more for a warm
    start. A warm start that is worse than zero is dropped. Memory: 9 vectors.

    Source: Paige and Saunders, "Solution of sparse indefinite systems of linear equations" (1975).

    Examples
    --------
    >>> H = torch.tensor([1.0, 2.0, 0.0, -0.5], dtype=torch.float64)
    >>> solution = MINRES().solve(
    ...     lambda v: H * v, torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    ... )
    >>> solution.outcome.label, (1e6 * solution.value).round().div(1e6).tolist()
    ('converged', [1.0, 0.5, 0.0, -2.0])
    """

    name: ClassVar[str] = "minres"

    ridge: float = field(default=0.0, validator=not_negative)
    rtol: float = field(default=1e-6, validator=positive)
    atol: float = field(default=0.0, validator=not_negative)
    max_steps: int = field(default=100, validator=at_least(1))

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        system = LinearSystem.of(matvec, b, ridge=self.ridge, rtol=self.rtol, atol=self.atol)
        eps = torch.finfo(system.rhs.dtype).eps
        x, r = system.start(x0)
        size = norm(r)
        floor = torch.maximum(system.target, eps * system.size)
        codes = torch.where(
            size <= system.target,
            system.codes(Outcome.CONVERGED),
            system.codes(Outcome.ITERATION_LIMIT),
        )
        active = codes == LIMIT
        steps = torch.zeros_like(codes)
        verified = size
        anchor = x
        curvature = torch.full_like(size, torch.inf)
        scale = torch.zeros_like(size)

        while active.any():
            # Lanczos from the current residual: v, v_1 are the last two basis vectors, beta the
            # entry between them.
            zero = torch.zeros_like(size)
            unit = torch.ones_like(size)
            origin = r
            nothing = torch.zeros_like(r)
            state = {
                "x": x,
                "r": r,
                "v": r / rows(torch.where(size > 0, size, unit)),
                "v_1": nothing,
                "w": nothing,
                "w_1": nothing,
                "beta": zero,
                "c": unit,
                "s": zero,
                "c_1": unit,
                "s_1": zero,
                "phi": size,
                "flat": x,
                "flattest": torch.full_like(size, torch.inf),
                "size": size,
                "codes": codes,
                "active": active,
                "steps": steps,
                "curvature": curvature,
                "scale": scale,
                "floor": floor,
            }
            state = iterate("minres", (self.max_steps,), system, iteration, state, self.max_steps)
            x, size, codes, steps = (state[name] for name in ("x", "size", "codes", "steps"))
            curvature = state["curvature"]
            scale = state["scale"]

            # Check with one product. Continue from the true residual if the recursion was too
            # optimistic. Return to the last checked iterate if rounding has made the residual
            # worse.
            fresh = system.rhs - system.apply(x)
            true = norm(fresh)
            known = torch.isfinite(true)
            r = torch.where(rows(known), fresh, r)
            size = torch.where(known, true, size)
            lost = known & (size > verified)
            x = torch.where(rows(lost), anchor, x)
            r = torch.where(rows(lost), origin, r)
            size = torch.where(lost, verified, size)
            codes = codes.masked_fill(lost & (codes != NONFINITE), STAGNATED)
            missed = (codes == CONVERGED) & (size > system.target)
            codes = codes.masked_fill(missed, STAGNATED).masked_fill(
                missed & (steps >= self.max_steps), LIMIT
            )
            codes = codes.masked_fill(
                ((codes == LIMIT) | (codes == STAGNATED)) & (size <= system.target), CONVERGED
            )
            active = missed & (size < 0.9 * verified) & (steps < self.max_steps)
            codes = codes.masked_fill(active, LIMIT)
            verified = size
            anchor = x

        return system.solution(x, size, codes, steps, curvature)


def iteration(system: LinearSystem, state: Tree, max_steps: int) -> Tree:
    """Take one step, as a function of tensors only."""
    eps = system.precision
    x, v, v_1, w, w_1, beta = (state[name] for name in ("x", "v", "v_1", "w", "w_1", "beta"))
    c, s, c_1, s_1, phi, flat, flattest = (
        state[name] for name in ("c", "s", "c_1", "s_1", "phi", "flat", "flattest")
    )
    size, codes, active, steps = (state[name] for name in ("size", "codes", "active", "steps"))
    curvature, scale, floor = (state[name] for name in ("curvature", "scale", "floor"))
    zero = torch.zeros_like(size)
    unit = torch.ones_like(size)
    u = torch.addcmul(system.apply(v), rows(beta), v_1, value=-1)
    alpha = dot(v, u)
    u = torch.addcmul(u, rows(alpha), v, value=-1)
    beta_next = norm(u)
    finite = torch.isfinite(beta_next)
    codes = codes.masked_fill(active & ~finite, NONFINITE)
    active = active & finite
    alpha = torch.where(active, alpha, zero)
    beta_next = torch.where(active, beta_next, zero)
    u = torch.where(rows(active), u, torch.zeros_like(u))
    curvature = torch.where(active, torch.minimum(curvature, alpha), curvature)

    # The new column (beta, alpha, beta_next) of the tridiagonal matrix through the last two
    # rotations.
    scale = torch.maximum(scale, (beta**2 + alpha**2 + beta_next**2).sqrt() * active)
    epsilon = s_1 * beta
    rotated = c_1 * beta
    delta = c * rotated + s * alpha
    gamma_bar = c * alpha - s * rotated
    # ‖(H + γI) r‖ = ‖r‖·‖(gamma_bar, c·beta_next)‖, for the residual before this step. At its
    # minimum, the iterate is nearest to a least-squares solution. If the
    # minimum is small, and the step would not change the residual or the value has risen, more
    # steps only increase the null-space part of the iterate of a singular system.
    slope = torch.hypot(gamma_bar, c * beta_next)
    gamma = torch.hypot(gamma_bar, beta_next)
    flatter = active & (slope < flattest)
    flat = torch.where(rows(flatter), x, flat)
    flattest = torch.where(flatter, slope, flattest)
    idle = (gamma_bar**2 <= 10 * eps * gamma**2) | (slope > 1e3 * flattest)
    stuck = active & ((flattest <= eps**0.5 * scale) & idle | (slope <= 100 * eps * scale))
    x = torch.where(rows(stuck), flat, x)
    codes = codes.masked_fill(stuck, STAGNATED)
    active = active & ~stuck
    gamma = torch.where(active, gamma, unit)
    (c_1, s_1), (c, s) = (c, s), (gamma_bar / gamma, beta_next / gamma)

    direction = (v - rows(epsilon) * w_1 - rows(delta) * w) / rows(gamma)
    w_1 = w
    w = torch.where(rows(active), direction, w)
    x = torch.addcmul(x, rows(torch.where(active, c * phi, zero)), w)
    phi = torch.where(active, -s * phi, phi)
    size = torch.where(active, phi.abs(), size)
    steps = steps + active
    codes = codes.masked_fill(active & (size <= floor), CONVERGED)
    active = active & (size > floor) & (steps < max_steps)
    v_1 = v
    v = u / rows(torch.where(beta_next > 0, beta_next, unit))
    beta = beta_next
    return {
        "x": x,
        "r": state["r"],
        "v": v,
        "v_1": v_1,
        "w": w,
        "w_1": w_1,
        "beta": beta,
        "c": c,
        "s": s,
        "c_1": c_1,
        "s_1": s_1,
        "phi": phi,
        "flat": flat,
        "flattest": flattest,
        "size": size,
        "codes": codes,
        "active": active,
        "steps": steps,
        "curvature": curvature,
        "scale": scale,
        "floor": floor,
    }


@hookimpl
def hgms_register_linear_solvers() -> list[type]:
    return [MINRES]
