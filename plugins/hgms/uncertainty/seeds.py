"""Uncertainty of a mixture over seeds.

The tests are t-intervals of centred log-ratios, and Hotelling's test.

Hotelling's test compares the mixture with the prior.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from hgms.results import t_quantile, two_sided
from hgms.uncertainty.simplex import Array, centre, clr, with_pivot
from hgms.uncertainty.verdict import LEVEL, Effect, Uncertainty, over_sources

ROUNDING = 1e-6  # maximum error of log-ratios of equal weights by a float32 softmax


def over_seeds(weights: Sequence[Mapping[str, float]], prior: Mapping[str, float]) -> Uncertainty:
    """Compute intervals of weights over mixtures of several seeds, and tests against the
    ``prior``::

        z_k = clr(ω_k) − clr(π),   z̄_s ± t_{n−1} · s_s/√n
        T² = n z̄ᵀ C⁻¹ z̄,   (n − d) T² / (d (n − 1)) ~ F(d, n − d),   d = S − 1

    Each interval is computed for the source's centred log-ratio. It is mapped back to a weight,
    with the other sources in the proportions of their mean. The p-values of the sources are from
    t-tests of z̄_s = 0, after Holm's rule. If n ≤ d, C has no inverse; then the smallest of these
    p-values tests the whole mixture.

    Use when each mixture was learned separately, with a different seed. The intervals cover the
    variation by seeds: batches, starts, the split of validation rows into roles. **They do not
    cover the data**: seeds also agree if all of them amplify one tiny difference of the rows.

    Seeds that end at equal mixtures have no spread, so chance is not measurable: no interval, p =
    1.

    Notes
    -----
    Source: Student (1908); Hotelling (1931); Aitchison (1986) for the coordinates.

    Examples
    --------
    >>> some = [{"a": 0.7, "b": 0.3}, {"a": 0.75, "b": 0.25}, {"a": 0.65, "b": 0.35}]
    >>> first = over_seeds(some, {"a": 0.5, "b": 0.5}).effects[0]
    >>> f"{first.value:.3f} [{first.low:.3f}, {first.high:.3f}] {first.p:.3f}"
    '0.702 [0.564, 0.810] 0.025'
    """
    names = tuple(prior)
    count = len(weights)
    start = clr([prior[name] for name in names])
    moved = clr([[run[name] for name in names] for run in weights]) - start
    mean = moved.mean(0)
    error = moved.std(0, ddof=1) / math.sqrt(count) if count > 1 else np.full(len(names), math.nan)
    spread = error * math.sqrt(max(count, 1)) > ROUNDING
    half = np.where(spread, error, math.nan) * (
        t_quantile(count - 1, 1 - LEVEL) if count > 1 else math.nan
    )
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
    return Uncertainty(over=f"{count} seed{'s' * (count != 1)}", effects=tuple(effects), p=whole)


def hotelling(rows: Array) -> float:
    """Compute the p-value of Hotelling's one-sample test on rows of centred log-ratios.

    The hypothesis is that the rows, ``[n, S]``, have mean zero; n ≥ S.

    Examples
    --------
    >>> round(
    ...     hotelling(np.array([[0.3, -0.3], [0.5, -0.5], [0.1, -0.1]])), 4
    ... )  # two sources: a t-test
    0.1217
    """
    from scipy import special

    count = len(rows)
    dims = rows.shape[1] - 1
    # an orthonormal basis of the space of log-ratios
    basis = np.linalg.svd(np.eye(dims + 1) - 1 / (dims + 1))[0][:, :dims]
    points = rows @ basis
    mean = points.mean(0)
    covariance = np.atleast_2d(np.cov(points, rowvar=False))
    if np.linalg.matrix_rank(covariance) < dims:
        return 1.0  # a direction without spread gives no measure of chance
    squared = count * float(mean @ np.linalg.solve(covariance, mean))
    return float(special.fdtrc(dims, count - dims, squared * (count - dims) / (dims * (count - 1))))
