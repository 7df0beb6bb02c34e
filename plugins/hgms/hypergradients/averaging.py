"""The weighted mean of the hypergradients of several candidates.

The candidates are all, or the best share of them; the weights depend on their scores.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import ClassVar, final

import torch
from attrs import evolve, field
from torch import Tensor

from hgms_core import (
    Candidates,
    ConfigError,
    Cost,
    Estimate,
    HyperGradient,
    Key,
    Problem,
    Selection,
    State,
    Tree,
    component,
)
from hgms_core.validators import optional_positive, positive, share


@final
@component
class Averaged:
    """Weighted mean Σ_i w_i h_i of the hypergradients h_i at the candidates x_i.

    ``estimator`` computes h_i. The weights depend on the scores s_i = f(θ, x_i)::

        w_i ∝ q_i exp(−s_i/τ)
        q = 1/(δN) for the best ⌊δN⌋ candidates, the remainder to 1 for the next, 0 for the others

    With δ = 1 and no τ, this is the mean: the gradient of the mean of the upper values, with a
    variance that falls with N. With δ < 1, it is the gradient of their superquantile, the mean of
    the best share δ. This lies between the mean and the best candidate (δ ≤ 1/N). With τ, it is the
    gradient of the soft minimum −τ log Σ_i q_i exp(−s_i/τ).

    Estimates are computed sequentially, so memory does not grow with N. A candidate that is not
    finite has weight 0. The best candidate draws the same batches as without averaging; each other
    candidate uses a separate key. The state for the next step is the state after the best
    candidate's estimate.

    Use when candidates differ by noise more than by position. Avoid when estimates are expensive
    and one candidate is clearly better: the others then only add cost.

    Parameters
    ----------
    estimator
        The hypergradient used at each candidate.
    level
        δ, the share of the candidates that enter, the best by their scores.
    temperature
        τ, in units of f (None: equal weights for all that enter).

    Raises
    ------
    ConfigError
        If ``level`` or ``temperature`` requires scores and the selector (``first``) computes no
        scores.

    Notes
    -----
    Cost: ⌈δN⌉ times the cost of ``estimator``.

    Source: the relaxation of the best candidate to a superquantile of f under a Gibbs measure of g:
    Masiha, Shen, Kiyavash, He, *Superquantile–Gibbs relaxation for minima-selection in bilevel
    optimization* (arXiv 2505.05991).

    Examples
    --------
    >>> from hgms.hypergradients import OneStep
    >>> problem = Problem(
    ...     theta0={"t": torch.zeros(1)},
    ...     x0={"x": torch.zeros(1)},
    ...     g=lambda t, x, _: 0.5 * ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: (x["x"] ** 3).sum(),
    ... )
    >>> candidates = Candidates(x={"x": torch.tensor([[3.0], [1.0]])})
    >>> selection = Selection.of(torch.tensor([27.0, 1.0]))
    >>> theta = {"t": torch.ones(1)}
    >>> estimator = Averaged(estimator=OneStep(lr=0.5))  # h_i = ½ · 3(x_i⁺)², where x⁺ = 2 and 1
    >>> estimator.estimate(problem, theta, candidates, selection, Key(0), {})[0].value["t"]
    tensor([3.7500])
    """

    name: ClassVar[str] = "averaged"
    estimator: HyperGradient
    level: float = field(default=1.0, validator=[positive, share])
    temperature: float | None = field(default=None, validator=optional_positive)

    def init(self, problem: Problem) -> State:
        return self.estimator.init(problem)

    def estimate(
        self,
        problem: Problem,
        theta: Tree,
        candidates: Candidates,
        selection: Selection,
        key: Key,
        state: State,
    ) -> tuple[Estimate, State]:
        order, weights = self._weights(candidates, selection)
        estimates = []
        memory = state
        for rank, index in enumerate(order):
            own = key.fold("candidate", rank) if rank else key
            one = evolve(selection, index=index)
            estimate, left = self.estimator.estimate(problem, theta, candidates, one, own, state)
            memory = memory if rank else left
            estimates.append(estimate)
        return _mean(estimates, weights), memory

    def _weights(self, candidates: Candidates, selection: Selection) -> tuple[list[Tensor], Tensor]:
        """Return the entering candidates, the best first, and their weights, ``[⌈δN⌉]``.

        Only the check for a selector without scores may wait for the device.
        """
        scores = selection.scores
        count = candidates.count
        scored = self.level < 1 or self.temperature is not None
        if scored and count > 1 and bool(scores.isnan().all() & candidates.finite.any()):
            raise ConfigError(
                "not-supported",
                "hypergradient 'averaged' weights candidates by their scores, but this selector "
                "computes none",
                place=("selector",),
                hint="use the selector 'best-of-n', or set level = 1 without a temperature (the "
                "mean of all candidates)",
            )
        sound = candidates.finite & ~(scores.isnan() & scored)
        ranked, order = torch.where(sound, scores.nan_to_num(0.0), torch.inf).sort(stable=True)
        entering = math.ceil(self.level * count - 1e-9)
        parts = [min(1.0, self.level * count - rank) for rank in range(entering)]
        weights = torch.tensor(parts, dtype=scores.dtype).to(scores.device, non_blocking=True)
        if self.temperature is not None:
            weights = weights * ((ranked[0] - ranked[:entering]) / self.temperature).exp()
        weights = torch.where(sound[order[:entering]], weights, torch.zeros_like(weights))
        return list(order[:entering]), weights / weights.sum()


def _mean(estimates: list[Estimate], weights: Tensor) -> Estimate:
    """Return the weighted mean of estimates; for linear solves it reports the worst values."""
    first = estimates[0]
    if len(estimates) == 1:
        return first

    def mean(parts: list[Tensor]) -> Tensor:
        # 0 · NaN is NaN, so estimates with weight 0 are excluded
        terms = zip(weights, parts, strict=True)
        return torch.stack(
            [torch.where(w > 0, w * part, torch.zeros_like(part)) for w, part in terms]
        ).sum(0)

    value = {name: mean([estimate.value[name] for estimate in estimates]) for name in first.value}
    solution = first.solution
    lengths = [e.lower_gradient_norm for e in estimates if e.lower_gradient_norm is not None]
    if solution is not None:
        all_of = [estimate.solution for estimate in estimates if estimate.solution is not None]
        solution = evolve(
            solution,
            codes=torch.stack([solved.codes for solved in all_of]).max(0).values,
            residual=torch.stack([solved.residual for solved in all_of]).max(0).values,
            iterations=torch.stack([solved.iterations for solved in all_of]).max(0).values,
            curvature=torch.stack([solved.curvature for solved in all_of]).min(0).values,
            products=sum(solved.products for solved in all_of),
        )
    return Estimate(
        value=value,
        upper_loss=mean([estimate.upper_loss for estimate in estimates]),
        lower_gradient_norm=mean(lengths) if len(lengths) == len(estimates) else None,
        solution=solution,
        cost=reduce(Cost.__add__, [estimate.cost for estimate in estimates]),
    )
