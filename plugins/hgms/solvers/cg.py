"""Conjugate gradients, truncated at non-positive curvature."""

from __future__ import annotations

from typing import ClassVar, final

from attrs import field, validators
from torch import Tensor

from hgms.compiled import CompiledProduct
from hgms.solvers.pcg import ConjugateGradients, Precondition, whole
from hgms_core import MatVec, Solution, component, hookimpl
from hgms_core.capabilities import Capabilities, SolvesInProgram
from hgms_core.validators import optional


@final
@component
class CG(ConjugateGradients):
    """Solve (H + γI) v = b by conjugate gradients, for H symmetric and H + γI positive definite.

    Stops at ‖r‖ ≤ max(rtol·‖b‖, atol). In exact arithmetic v_k minimises ½vᵀ(H + γI)v − bᵀv over
    the Krylov space v_0 + span{r_0, …, (H + γI)^(k−1) r_0}.

    Use when the lower Hessian plus ridge is positive definite, or nearly so. At a direction of
    negative curvature, the solver returns the current iterate, for which bᵀv > 0. If this is the
    first direction, it returns v = 0: the hypergradient then consists of its direct part ∇_θ f
    (``residual`` is then 1). Avoid when H is far from positive definite and no ridge that makes it
    positive definite is acceptable (use ``minres``).

    Outcomes: CONVERGED; ITERATION_LIMIT (the current iterate, or the best iterate if the current
    residual exceeds ‖b‖); NEGATIVE_CURVATURE (pᵀ(H + γI)p < 0: the iterate before that direction,
    or with a preconditioner the best iterate if the current residual exceeds ‖b‖); STAGNATED with
    the iterate of the smallest residual; NONFINITE. STAGNATED means that floating-point precision
    is exhausted, for one of three reasons. pᵀ(H + γI)p is zero relative to the largest curvature
    seen. Or the residual grew beyond the bound of a positive definite system. (Both mean that the
    system is singular, with b not in the range.) Or the tolerance is too tight. The threshold for
    zero is the error of a product (``LinearSystem.precision``).

    Parameters
    ----------
    ridge
        γ ≥ 0, in the units of H.
    rtol, atol
        Relative residual to reach, > 0, or absolute residual, ≥ 0, in the units of b.
    max_steps
        Iteration limit.
    clip
        R_v, the radius of the ball that the result is projected onto (None: no clipping); the
        reported residual is the residual before clipping.
    preconditioner
        From Python only, r ↦ M⁻¹r with M positive definite and near H + γI, rows to rows; a
        configuration uses ``nystrom``. Tolerances still refer to the unpreconditioned residual.

    Notes
    -----
    Cost: one product per iteration, one to check a small residual (not for a solve truncated within
    50 steps), one more for a warm start. A warm start that is worse than zero is dropped. Memory: 5
    vectors, one more for the best iterate.

    Source: Hestenes and Stiefel (1952); truncation: Steihaug (1983); ridge and clip: HG-MS paper,
    Algorithm 1.

    Examples
    --------
    >>> import torch
    >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    >>> solution = CG(ridge=1.0).solve(lambda v: A @ v, torch.tensor([4.0, 5.0]))
    >>> (
    ...     bool(torch.allclose(solution.value, torch.ones(2))),
    ...     solution.outcome.label,
    ...     int(solution.iterations),
    ... )
    (True, 'converged', 2)
    """

    name: ClassVar[str] = "cg"
    capabilities: ClassVar[Capabilities] = frozenset({SolvesInProgram})

    preconditioner: Precondition | None = field(
        default=None, validator=optional(validators.is_callable())
    )

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        if isinstance(matvec, CompiledProduct) and self.preconditioner is None:
            solution = matvec.whole("cg", (self,), whole, b, x0, self.max_steps)
            if solution is not None:
                return solution
        return self.run(self.system(matvec, b), x0, self.preconditioner)


@hookimpl
def hgms_register_linear_solvers() -> list[type]:
    return [CG]
