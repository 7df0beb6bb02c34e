"""The noise of runs: a variance at every mixture, estimated from the repeats of a few mixtures."""

from __future__ import annotations

import numpy as np
from attrs import frozen

SPREADS = np.array([0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0])
"""Candidate standard deviations τ of a source's effect on the logarithm of the variance."""


@frozen(kw_only=True, eq=False)
class Noise:
    """The variance of one run: log σ²(ω) = level + (ω − centre) · slope.

    ``freedom`` is the number of degrees of freedom of the estimate. ``spread`` is the τ estimated
    from the repeats; it is 0 if all variances may be equal.
    """

    level: float
    slope: np.ndarray
    centre: np.ndarray
    freedom: int
    spread: float

    def variance(self, mixtures: np.ndarray) -> np.ndarray:
        return np.exp(self.level + (mixtures - self.centre) @ self.slope)


def noise_of(mixtures: np.ndarray, variances: np.ndarray, freedoms: np.ndarray) -> Noise:
    """Estimate the noise from repeated ``mixtures``, ``[A, S]``.

    ``variances`` are their sample variances s², with d degrees of freedom each::

        log s²_a − ψ(d_a/2) + log(d_a/2) = level + (ω_a − centre) · slope + e_a,
            e_a ~ N(0, ψ'(d_a/2)),  slope ~ N(0, τ²)

    The terms in ψ and ψ' are the mean and variance of the logarithm of a χ² number. τ maximises the
    restricted likelihood with a half-normal prior of scale 1. At τ = 0 the estimate is one pooled
    variance. With few repeats, τ stays near 0.

    Examples
    --------
    >>> noise_of(np.eye(2), np.array([0.04, 0.04]), np.array([4, 4])).spread
    0.0
    """
    from scipy.special import digamma, polygamma

    pooled = float((variances * freedoms).sum() / freedoms.sum())
    centre = mixtures.mean(0)
    if pooled <= 0:  # every repeat gave exactly the same number
        return Noise(
            level=-np.inf,
            slope=np.zeros(len(centre)),
            centre=centre,
            freedom=int(freedoms.sum()),
            spread=0.0,
        )
    half = freedoms / 2
    logs = np.log(np.maximum(variances, 1e-4 * pooled)) - digamma(half) + np.log(half)
    scatter = np.diag(polygamma(1, half))
    design = mixtures - centre

    def estimate(spread: float) -> tuple[float, float, np.ndarray, float]:
        inverse = np.linalg.inv(scatter + spread**2 * design @ design.T)
        weight = inverse.sum()
        level = float((inverse @ logs).sum() / weight)
        rest = logs - level
        score = (
            0.5 * np.linalg.slogdet(inverse)[1]
            - 0.5 * np.log(weight)
            - 0.5 * rest @ inverse @ rest
            - 0.5 * spread**2
        )
        return float(score), level, spread**2 * design.T @ inverse @ rest, float(spread)

    _, level, slope, spread = max(map(estimate, SPREADS), key=lambda found: found[0])
    if spread == 0:
        # more efficient than logarithms for a single variance
        level = float(np.log(pooled))
    return Noise(
        level=level, slope=slope, centre=centre, freedom=int(freedoms.sum()), spread=spread
    )
