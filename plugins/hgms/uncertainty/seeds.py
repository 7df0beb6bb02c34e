"""How certain a mixture is over seeds: t-intervals of centred log-ratios, and Hotelling's test
against the prior.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from hgms.uncertainty.simplex import Array, centre, clr, with_pivot
from hgms.uncertainty.verdict import LEVEL, Certainty, Effect, over_sources

ROUNDING = 1e-6  # log-ratios of equal weights differ by that of a softmax in float32 at most


def over_seeds(weights: Sequence[Mapping[str, float]], prior: Mapping[str, float]) -> Certainty:
    """Intervals of the sources' weights over mixtures learned with several seeds, and tests against
    the ``prior``::

        z_k = clr(ω_k) − clr(π),   z̄_s ± t_{n−1} · s_s/√n
        T² = n z̄ᵀ C⁻¹ z̄,   (n − d) T² / (d (n − 1)) ~ F(d, n − d),   d = S − 1

    Each interval is that of the source's centred log-ratio, mapped back to a weight with the others
    in the proportions of their mean. p-values of the sources are those of t-tests that z̄_s = 0,
    after Holm's rule. With n ≤ d, where C has no inverse, the whole is tested by the smallest of
    them.

    Use when each mixture was learned anew with a seed of its own. Covers what seeds vary: batches,
    starts, the split of validation rows into roles. **Not the data**: seeds agree also where all of
    them amplify one tiny difference of the rows.

    Seeds that end at equal mixtures have no spread to measure chance by: no interval, p = 1.

    >>> some = [{"a": 0.7, "b": 0.3}, {"a": 0.75, "b": 0.25}, {"a": 0.65, "b": 0.35}]
    >>> first = over_seeds(some, {"a": 0.5, "b": 0.5}).effects[0]
    >>> f"{first.value:.3f} [{first.low:.3f}, {first.high:.3f}] {first.p:.3f}"
    '0.702 [0.564, 0.810] 0.025'

    Source: Student (1908); Hotelling (1931); Aitchison (1986) for the coordinates.
    """
    names = tuple(prior)
    count = len(weights)
    start = clr([prior[name] for name in names])
    moved = clr([[run[name] for name in names] for run in weights]) - start
    mean = moved.mean(0)
    error = moved.std(0, ddof=1) / math.sqrt(count) if count > 1 else np.full(len(names), math.nan)
    spread = error * math.sqrt(max(count, 1)) > ROUNDING
    half = np.where(spread, error, math.nan) * (quantile(count - 1) if count > 1 else math.nan)
    chances = [
        two_sided(mean[s] / error[s], count - 1) if spread[s] else 1.0 for s in range(len(names))
    ]
    adjusted = over_sources(chances)
    ended = start + mean
    effects = [
        Effect(
            source=name,
            value=float(centre(ended)[s]),
            low=with_pivot(ended, s, ended[s] - half[s]),
            high=with_pivot(ended, s, ended[s] + half[s]),
            null=prior[name],
            p=adjusted[s],
        )
        for s, name in enumerate(names)
    ]
    whole = min(adjusted) if count <= len(names) - 1 or not spread.all() else hotelling(moved)
    return Certainty(over=f"{count} seed{'s' * (count != 1)}", effects=tuple(effects), p=whole)


def hotelling(rows: Array) -> float:
    """The p-value of Hotelling's one-sample test that rows of centred log-ratios, ``[n, S]``, have
    mean zero; n ≥ S.

    >>> round(
    ...     hotelling(np.array([[0.3, -0.3], [0.5, -0.5], [0.1, -0.1]])), 4
    ... )  # two sources: a t-test
    0.1217
    """
    from scipy import special

    count = len(rows)
    dims = rows.shape[1] - 1
    # an orthonormal one of the log-ratios' space
    basis = np.linalg.svd(np.eye(dims + 1) - 1 / (dims + 1))[0][:, :dims]
    points = rows @ basis
    mean = points.mean(0)
    covariance = np.atleast_2d(np.cov(points, rowvar=False))
    if np.linalg.matrix_rank(covariance) < dims:
        return 1.0  # a direction without spread says nothing about chance
    squared = count * float(mean @ np.linalg.solve(covariance, mean))
    return float(special.fdtrc(dims, count - dims, squared * (count - dims) / (dims * (count - 1))))


def quantile(freedom: int) -> float:
    """What a t-distributed number exceeds in absolute value with probability 0.05."""
    from scipy import special

    return float(special.stdtrit(freedom, (1 + LEVEL) / 2))


def two_sided(ratio: float, freedom: int) -> float:
    """The two-sided p-value of a t-test."""
    from scipy import special

    return 2 * float(special.stdtr(freedom, -abs(ratio)))
