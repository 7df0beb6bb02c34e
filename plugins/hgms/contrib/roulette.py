"""An unbiased Neumann series that ends at a random term."""

from __future__ import annotations

import math
from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms_core import Key, LinearSystem, MatVec, Outcome, Solution, component, hookimpl
from hgms_core.capabilities import Capabilities, HasTestingInstance, Randomized
from hgms_core.components import evolve
from hgms_core.validators import at_least, decay_rate, not_negative, positive

norm = LinearSystem.norm
pick = LinearSystem.pick


@final
@component
class Roulette:
    """v = lr · Σ_{k<K} w_k (I − lr·(H + γI))^k b with a random number K of terms.

    The weights w_k make the result unbiased. The first n terms are always present. Each later term
    is followed by another term with probability q (Russian roulette)::

        P(K > k) = 1 for k < n, q^(k−n+1) for k ≥ n,      w_k = 1/P(K > k),      E[v] = (H + γI)⁻¹ b

    All systems of one call end at the same term.

    Use when you need unbiased hypergradients from few products. The error of ``neumann`` with the
    same number of terms has the same direction in every outer step; the error of this solver
    averages out. Avoid when one accurate solution is needed (``cg``), and if q < (1 − lr·λ_min)²:
    the mean is still correct, but the variance is infinite.

    Outcomes: ITERATION_LIMIT (the usual end: one draw is not a solution), CONVERGED if the residual
    is at most ``rtol``, DIVERGED (a term is twice as long as an earlier term: H is indefinite, or
    lr is too large; the sum up to there), NONFINITE. ``x0`` is the start of the summation: the
    series is then the series of b − (H + γI) x0, and the mean is the same.

    Parameters
    ----------
    lr
        Step size, 0 < lr < 2/λ_max(H + γI), in the units of 1/H.
    steps
        n ≥ 1, the number of terms that are always present.
    survival
        q, the probability in [0, 1) of each further term. 0 gives ``neumann``.
    ridge
        γ ≥ 0, in the units of H.
    rtol
        Relative residual up to which the outcome is CONVERGED, > 0; the number of terms does not
        depend on it.
    seed
        Seed of K, if there is no key; :meth:`with_key` sets a key. ``implicit`` uses a different
        key in every outer step.

    Notes
    -----
    Cost: K products, n + q/(1 − q) on average, the last of which gives the residual; one for a warm
    start. Memory: 4 vectors.

    Source: Chen, Behrmann, Duvenaud and Jacobsen, "Residual flows for invertible generative
    modeling" (2019), their Neumann gradient series; Russian roulette: Kahn (1955). For bilevel
    problems, Ghadimi and Wang (2018) end this series at random and take one term of it.

    Examples
    --------
    >>> b, mean = torch.ones(2), torch.zeros(2)
    >>> for step in range(1000):  # the first term, b/4, is there in each of them
    ...     solver = Roulette(lr=0.25, steps=1, survival=0.5).with_key(Key(0).fold(step))
    ...     mean += solver.solve(lambda v: 2 * v, b).value / 1000
    >>> bool((mean - 0.5).abs().max() < 0.02)
    True
    """

    name: ClassVar[str] = "roulette"
    capabilities: ClassVar[Capabilities] = frozenset({HasTestingInstance, Randomized})

    lr: float = field(default=0.1, validator=positive)
    steps: int = field(default=10, validator=at_least(1))
    survival: float = field(default=0.9, validator=decay_rate)
    ridge: float = field(default=0.0, validator=not_negative)
    rtol: float = field(default=1e-6, validator=positive)
    seed: int = 0

    @classmethod
    def testing_instance(cls) -> Roulette:
        """Return an instance for ``hgms check`` with enough terms.

        For eigenvalues from 0.5 to 1.5, the remainder is (1 − 0.8·0.5)⁶⁰ = 5e-14.
        """
        return cls(lr=0.8, steps=60)

    def with_key(self, key: Key) -> Roulette:
        """Return the same solver with the K of this key."""
        return evolve(self, seed=key.derive())

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        system = LinearSystem.of(matvec, b, ridge=self.ridge, rtol=self.rtol)
        return sum_series(system, x0, self.lr, weights(self.steps, self.survival, Key(self.seed)))


def weights(steps: int, survival: float, key: Key) -> list[float]:
    """w_0, …, w_{K−1} for the K of this key.

    Examples
    --------
    >>> weights(2, 0.5, Key(4))
    [1.0, 1.0, 2.0]
    """
    # in (0, 1]
    draw = 1 - float(
        torch.rand((), generator=key.fold("roulette").generator(), dtype=torch.float64)
    )
    # is j or more with probability q^j
    more = int(math.log(draw) / math.log(survival)) if survival else 0
    return [1.0] * steps + [survival**-k for k in range(1, more + 1)]


def sum_series(
    system: LinearSystem, x0: Tensor | None, lr: float, weights: list[float]
) -> Solution:
    """Compute x0 + lr · Σ_k w_k (I − lr·A)^k r_0, and its residual.

    Here A = H + ridge·I and r_0 = b − A x0.
    """
    eps = torch.finfo(system.rhs.dtype).eps
    x, term = system.start(x0)
    size = smallest = norm(term)
    active = system.finite
    curvature = torch.full_like(size, torch.inf)
    steps = torch.zeros_like(active, dtype=torch.int64)
    for k, weight in enumerate(weights):
        x = pick(active, torch.add(x, term, alpha=lr * weight), x)
        steps = steps + active
        if k + 1 == len(weights) or not active.any():
            break
        following = term - lr * system.apply(term)
        length = norm(following)
        # The next term gives the Rayleigh quotient along this term without cost, until rounding
        # dominates.
        seen = active & torch.isfinite(length) & (size > eps**0.5 * system.size)
        quotient = system.dot(term, term - following) / (lr * size**2)
        curvature = torch.where(seen, torch.minimum(curvature, quotient), curvature)
        # for 0 ≤ lr·A ≤ 2 no term is longer than the previous term; a NaN fails every comparison
        active = active & (length <= 2 * smallest)
        term = pick(active, following, term)
        size = torch.where(active, length, size)
        smallest = torch.where(active, torch.minimum(length, smallest), smallest)
    residual = norm(system.rhs - system.apply(x))
    codes = torch.where(
        active, system.codes(Outcome.ITERATION_LIMIT), system.codes(Outcome.DIVERGED)
    )
    codes = torch.where(residual <= system.target, system.codes(Outcome.CONVERGED), codes)
    return system.solution(x, residual, codes, steps, curvature)


@hookimpl
def hgms_register_linear_solvers() -> list[type]:
    return [Roulette]
