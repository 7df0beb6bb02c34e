"""The mixture that the surface recommends, the region the best one lies in, and differences with
intervals.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import frozen

from hgms_core import Key
from hgms_mix.surface.design import spread
from hgms_mix.surface.process import Surface

LEVEL = 0.95
CANDIDATES = 1024
DRAWN = 256
DRAWS = 512
"""Mixtures that are compared, those at which functions are drawn, and how many functions."""


@frozen(kw_only=True)
class Gap:
    """A difference of expected losses with its interval, and the posterior probability that it
    is below zero.
    """

    value: float
    low: float
    high: float
    below: float


@frozen(kw_only=True, eq=False)
class Recommendation:
    """``weights`` minimise the surface. ``region`` holds, for each source, the ``LEVEL`` interval
    of its weight in the best mixture, over ``minimisers`` of functions drawn from the posterior;
    ``against_prior`` and ``against_best`` are its expected loss minus the prior's, and minus that
    of ``best``, the best of those tried.
    """

    weights: np.ndarray
    region: np.ndarray
    minimisers: np.ndarray
    best: np.ndarray
    against_prior: Gap
    against_best: Gap


def recommend(
    surface: Surface, prior: np.ndarray, tried: np.ndarray, key: Key, *, caution: float = 0.0
) -> Recommendation:
    """The minimiser of mean + caution · standard deviation over the simplex, found among
    ``CANDIDATES`` mixtures and refined.

    ``tried`` are the distinct mixtures that were run.
    """

    def risk(mixtures: np.ndarray) -> np.ndarray:
        mean = surface.mean(mixtures)
        return mean + caution * surface.deviation(mixtures) if caution else mean

    candidates = np.vstack([prior, tried, simplex(len(prior), CANDIDATES, key.fold("candidates"))])
    weights = _refined(candidates[risk(candidates).argmin()], risk, key.fold("refine"))
    best = tried[surface.mean(tried).argmin()]
    around = _near(weights, 0.1, DRAWN // 2, np.random.default_rng(key.fold("around").derive()))
    places = np.vstack(
        [prior, weights, tried, around, simplex(len(prior), DRAWN, key.fold("places"))]
    )
    values = surface.draws(places, DRAWS, key.fold("draws"))
    minimisers = places[values.argmin(1)]
    tail = (1 - LEVEL) / 2
    return Recommendation(
        weights=weights,
        region=np.quantile(minimisers, [tail, 1 - tail], axis=0).T,
        minimisers=minimisers,
        best=best,
        against_prior=gap(surface, weights, prior),
        against_best=gap(surface, weights, best),
    )


def gap(surface: Surface, mine: np.ndarray, theirs: np.ndarray) -> Gap:
    """Expected loss at one mixture minus that at another: posterior mean ± quantile · standard
    deviation. The quantile is Student's: with the noise's degrees of freedom, or, without repeats,
    as many as there are more runs than a linear trend has coefficients."""
    from scipy import special

    mean, covariance = surface.posterior(np.array([mine, theirs]))
    value = float(mean[0] - mean[1])
    deviation = float(np.sqrt(max(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1], 0.0)))
    if np.allclose(mine, theirs) or deviation == 0:
        return Gap(value=value, low=value, high=value, below=float(value < 0))
    freedom = (
        max(len(surface.losses) - len(mine), 1) if surface.noise is None else surface.noise.freedom
    )
    quantile = float(special.stdtrit(freedom, 0.5 + LEVEL / 2))
    below = float(special.stdtr(freedom, -value / deviation))
    return Gap(
        value=value,
        low=value - quantile * deviation,
        high=value + quantile * deviation,
        below=below,
    )


def simplex(sources: int, count: int, key: Key) -> np.ndarray:
    """``count`` mixtures: three quarters spread evenly, a quarter on the borders, where a source or
    more has no weight; and the corners."""
    even = spread(np.full(sources, 1 / sources), count - count // 4, key)
    border = spread(np.full(sources, 1 / sources), count // 4, key.fold("border"))
    generator = np.random.default_rng(key.fold("faces").derive())
    without = generator.random(border.shape).argsort(1) < generator.integers(
        1, sources, (len(border), 1)
    )
    border = np.where(without, 0.0, border)
    return np.vstack([even, border / border.sum(1, keepdims=True), np.eye(sources)])


def _refined(start: np.ndarray, risk: Callable[[np.ndarray], np.ndarray], key: Key) -> np.ndarray:
    """The best of ever closer neighbours."""
    generator = np.random.default_rng(key.derive())
    best = start
    for radius in (0.1, 0.05, 0.02, 0.01, 0.005):
        near = np.vstack([best, _near(best, radius, 128, generator)])
        best = near[risk(near).argmin()]
    return best


def _near(
    centre: np.ndarray, radius: float, count: int, generator: np.random.Generator
) -> np.ndarray:
    """Mixtures about ``radius`` away in each weight; what would be negative is none."""
    near = np.maximum(centre + radius * generator.standard_normal((count, len(centre))), 0)
    near = near[near.sum(1) > 0]
    return np.asarray(near / near.sum(1, keepdims=True))
