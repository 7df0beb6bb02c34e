"""Conjugate gradients, truncated at non-positive curvature."""

from __future__ import annotations

from typing import ClassVar, final

from attrs import field, validators
from torch import Tensor

from hgms.compiled import CompiledProduct
from hgms.solvers.pcg import Precondition, pcg, whole
from hgms_core import LinearSystem, MatVec, Solution, component, hookimpl
from hgms_core.validators import at_least, not_negative, optional, optional_positive, positive


@final
@component
class CG:
    """(H + γI) v = b by conjugate gradients, for H symmetric and H + γI positive definite.

    Stops at ‖r‖ ≤ max(rtol·‖b‖, atol). In exact arithmetic v_k minimises ½vᵀ(H + γI)v − bᵀv over
    the Krylov space v_0 + span{r_0, …, (H + γI)^(k−1) r_0}.

    Use when the lower Hessian plus ridge is positive definite, or nearly so: at a direction of
    negative curvature the iterate reached so far is returned, for which bᵀv > 0; v = 0 where it is
    the very first direction, so that a hypergradient keeps its direct part ∇_θ f alone
    (``residual`` is then 1). Avoid when H is far from positive definite and no ridge that makes it
    so is acceptable (use ``minres``).

    Arguments:
        ridge: γ ≥ 0, in the units of H. ``rtol``, ``atol``: relative residual to reach, > 0, or an
            absolute one, ≥ 0, in the units of b. ``max_steps``: iteration limit.
        clip: R_v, the radius of the ball that the answer is projected onto (None: no clipping); the
            reported residual is that before clipping.
        preconditioner: from Python only, r ↦ M⁻¹r with M positive definite and near H + γI, rows to
            rows; a configuration uses ``nystrom``. Tolerances stay those of the residual itself.

    Outcomes: CONVERGED; ITERATION_LIMIT (the current iterate; the best one where its residual
    exceeds ‖b‖); NEGATIVE_CURVATURE (pᵀ(H + γI)p < 0: the iterate before that direction, or with a
    preconditioner the best one where its residual exceeds ‖b‖); STAGNATED with the iterate of the
    smallest residual, where the numbers can do no better: pᵀ(H + γI)p is zero beside the largest
    curvature met or the residual grew beyond what a positive definite system allows (both mean
    singular, with b not in the range), or the tolerance is too tight; NONFINITE. Zero is judged by
    the error of a product (``LinearSystem.precision``).

    Cost: one product an iteration, one to check a residual that is claimed (not for a solve cut
    short within 50 steps), one more for a warm start. A warm start that is worse than zero is
    dropped. Memory: 5 vectors, one more for the best iterate.

    >>> import torch
    >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    >>> solution = CG(ridge=1.0).solve(lambda v: A @ v, torch.tensor([4.0, 5.0]))
    >>> (
    ...     bool(torch.allclose(solution.value, torch.ones(2))),
    ...     solution.outcome.label,
    ...     int(solution.iterations),
    ... )
    (True, 'converged', 2)

    Source: Hestenes and Stiefel (1952); truncation: Steihaug (1983); ridge and clip: HG-MS paper,
        Algorithm 1.
    """

    name: ClassVar[str] = "cg"

    ridge: float = field(default=0.0, validator=not_negative)
    rtol: float = field(default=1e-6, validator=positive)
    atol: float = field(default=0.0, validator=not_negative)
    max_steps: int = field(default=100, validator=at_least(1))
    clip: float | None = field(default=None, validator=optional_positive)
    preconditioner: Precondition | None = field(
        default=None, validator=optional(validators.is_callable())
    )

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        if isinstance(matvec, CompiledProduct) and self.preconditioner is None:
            settings = (self.ridge, self.rtol, self.atol, self.max_steps, self.clip)
            solution = matvec.whole("cg", settings, whole, b, x0, self.max_steps)
            if solution is not None:
                return solution
        system = LinearSystem.of(matvec, b, ridge=self.ridge, rtol=self.rtol, atol=self.atol)
        return pcg(system, x0, self.max_steps, self.clip, self.preconditioner)


@hookimpl
def hgms_register_linear_solvers() -> list[type]:
    return [CG]
