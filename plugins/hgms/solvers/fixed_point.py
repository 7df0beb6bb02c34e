"""The fixed-point (Richardson) iteration."""

from __future__ import annotations

from typing import ClassVar, final

from attrs import field
from torch import Tensor

from hgms.solvers.richardson import richardson
from hgms_core import LinearSystem, MatVec, Solution, component, hookimpl
from hgms_core.validators import at_least, not_negative, positive


@final
@component
class FixedPoint:
    """v ← v − lr·((H + γI) v − b) until ‖r‖ ≤ rtol·‖b‖: gradient descent on the linear system.

    Converges for 0 < lr < 2/λ_max(H + γI) and H + γI positive semidefinite with b in its range. The
    error shrinks by max|1 − lr·λ| per step, so the number of steps is about cond(H + γI) times the
    number of digits wanted.

    Use when H is a noisy or non-symmetric estimate, for which CG's short recurrences fail, or to
    mirror a lower level that is itself gradient descent. Avoid when H is ill-conditioned (use
    ``cg``: the square root of the steps).

    Outcomes: CONVERGED; ITERATION_LIMIT; DIVERGED (the residual grows: lr is too large or H + γI is
    indefinite) and STAGNATED (the residual stays constant: precision reached, or b is not in the
    range), both with the best iterate; NONFINITE.

    Parameters
    ----------
    lr
        Step size > 0, in the units of 1/H.
    ridge
        γ ≥ 0, in the units of H.
    rtol
        Relative residual to reach, > 0.
    max_steps
        Iteration limit.

    Notes
    -----
    Cost: one product per iteration, which also gives the true residual, and one for a warm start.
    Memory: 5 vectors.

    Source: Richardson iteration; Grazzi et al. (2020), "On the iteration complexity of
    hypergradient computation".

    Examples
    --------
    >>> import torch
    >>> solution = FixedPoint(lr=0.4).solve(lambda v: 2 * v, torch.ones(2, dtype=torch.float64))
    >>> (
    ...     bool(torch.allclose(solution.value, torch.full((2,), 0.5, dtype=torch.float64))),
    ...     solution.outcome.label,
    ... )
    (True, 'converged')
    """

    name: ClassVar[str] = "fixed-point"

    lr: float = field(default=0.1, validator=positive)
    ridge: float = field(default=0.0, validator=not_negative)
    rtol: float = field(default=1e-6, validator=positive)
    max_steps: int = field(default=1000, validator=at_least(1))

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        system = LinearSystem.of(matvec, b, ridge=self.ridge, rtol=self.rtol)
        return richardson(system, x0, self.lr, self.max_steps, until_target=True)


@hookimpl
def hgms_register_linear_solvers() -> list[type]:
    return [FixedPoint]
