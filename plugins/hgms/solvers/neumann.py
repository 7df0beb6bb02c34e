"""The truncated Neumann series."""

from __future__ import annotations

from typing import ClassVar, final

from attrs import field
from torch import Tensor

from hgms.solvers.richardson import richardson
from hgms_core import LinearSystem, MatVec, Solution, component, hookimpl
from hgms_core.capabilities import Capabilities, HasTestingInstance, SolvesInProgram
from hgms_core.validators import at_least, not_negative, positive


@final
@component
class Neumann:
    """v = lr · Σ_{k=0}^{K−1} (I − lr·(H + γI))^k b, always K terms (evaluated by Horner's rule).

    At the solution, K unrolled steps of gradient descent on the lower level give the same v. Fewer
    terms damp the directions of small curvature, like a ridge of about 1/(lr·K).

    Use when a fixed, predictable cost or this implicit damping is wanted. Avoid when an accurate
    solution is wanted (use ``cg``).

    Outcomes: ITERATION_LIMIT (the usual end of a truncated series), CONVERGED if the residual is at
    most ``rtol``, DIVERGED (the terms grow: the sum with the smallest residual is returned),
    STAGNATED (no term changes the residual), NONFINITE. ``x0`` is the start of the summation; a
    start of zero gives the series above.

    Parameters
    ----------
    lr
        Step size, 0 < lr < 2/λ_max(H + γI), in the units of 1/H.
    steps
        K, the number of terms and of products.
    ridge
        γ ≥ 0, in the units of H.
    rtol
        Maximum relative residual for the outcome CONVERGED, > 0; the number of terms does not
        depend on it.

    Notes
    -----
    Cost: K products, the last of which gives the true residual, and one for a warm start. Memory: 5
    vectors.

    Source: Lorraine, Vicol and Duvenaud (2020), "Optimizing millions of hyperparameters by implicit
    differentiation".

    Examples
    --------
    >>> import torch
    >>> solution = Neumann(lr=0.25, steps=2).solve(lambda v: 2 * v, torch.ones(2))
    >>> solution.value, float(solution.residual)  # 1/4 (1 + 1/2), and b − 2v = 1/4
    (tensor([0.3750, 0.3750]), 0.25)
    """

    name: ClassVar[str] = "neumann"
    capabilities: ClassVar[Capabilities] = frozenset({HasTestingInstance, SolvesInProgram})

    lr: float = field(default=0.1, validator=positive)
    steps: int = field(default=20, validator=at_least(1))
    ridge: float = field(default=0.0, validator=not_negative)
    rtol: float = field(default=1e-6, validator=positive)

    @classmethod
    def testing_instance(cls) -> Neumann:
        """For ``hgms check``: enough terms for eigenvalues from 0.5 to 1.5.

        The remaining error is (1 − 0.8·0.5)⁶⁰ = 5e-14.
        """
        return cls(lr=0.8, steps=60)

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        system = LinearSystem.of(matvec, b, ridge=self.ridge, rtol=self.rtol)
        return richardson(system, x0, self.lr, self.steps, until_target=False)


@hookimpl
def hgms_register_linear_solvers() -> list[type]:
    return [Neumann]
