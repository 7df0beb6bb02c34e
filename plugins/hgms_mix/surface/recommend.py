"""Recommend a mixture by the surface.

The results include the region of the best mixture, and differences with intervals.
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
"""Number of compared mixtures, number of mixtures at which functions are drawn, and number of
functions.
"""


@frozen(kw_only=True)
class Gap:
    """A difference of expected losses with its interval, and the posterior probability that
    it is below zero.
    """

    value: float
    low: float
    high: float
    below: float


@frozen(kw_only=True, eq=False)
class Recommendation:
    """The recommended mixture, with its uncertainty.

    ``weights`` minimise the surface. ``region`` contains, for each source, the ``LEVEL`` interval
    of its weight in the best mixture, over minimisers of functions drawn from the posterior.
    ``against_prior`` is the expected loss of ``weights`` minus the expected loss of the prior.
    ``against_best`` is the same for ``best``, the best of the mixtures that were run.
    """

    weights: np.ndarray
    region: np.ndarray
    best: np.ndarray
    against_prior: Gap
    against_best: Gap


def recommend(surface: Surface, prior: np.ndarray, tried: np.ndarray, key: Key) -> Recommendation:
    """Return the minimiser of the mean over the simplex.

    The search starts from ``CANDIDATES`` mixtures and refines the best. ``tried`` are the distinct
    mixtures that were run.
    """
    candidates = np.vstack([prior, tried, simplex(len(prior), CANDIDATES, key.fold("candidates"))])
    weights = _refine(
        candidates[surface.mean(candidates).argmin()], surface.mean, key.fold("refine")
    )
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
        best=best,
        against_prior=gap(surface, weights, prior),
        against_best=gap(surface, weights, best),
    )


def gap(surface: Surface, mine: np.ndarray, theirs: np.ndarray) -> Gap:
    """Return the expected loss at one mixture minus the expected loss at another, with an interval.

    The interval is posterior mean ± quantile · standard deviation. The quantile is Student's, with
    the noise's degrees of freedom. Without repeats, the degrees of freedom are the number of runs
    minus the number of coefficients of a linear trend.
    """
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
    """Return ``count`` mixtures and the corners.

    Three quarters are spread evenly. One quarter is on the borders, where one or more sources have
    no weight.
    """
    even = spread(np.full(sources, 1 / sources), count - count // 4, key)
    border = spread(np.full(sources, 1 / sources), count // 4, key.fold("border"))
    generator = np.random.default_rng(key.fold("faces").derive())
    without = generator.random(border.shape).argsort(1) < generator.integers(
        1, sources, (len(border), 1)
    )
    border = np.where(without, 0.0, border)
    return np.vstack([even, border / border.sum(1, keepdims=True), np.eye(sources)])


def _refine(start: np.ndarray, mean: Callable[[np.ndarray], np.ndarray], key: Key) -> np.ndarray:
    """Refine a mixture by searching ever closer neighbours."""
    generator = np.random.default_rng(key.derive())
    best = start
    for radius in (0.1, 0.05, 0.02, 0.01, 0.005):
        near = np.vstack([best, _near(best, radius, 128, generator)])
        best = near[mean(near).argmin()]
    return best


def _near(
    centre: np.ndarray, radius: float, count: int, generator: np.random.Generator
) -> np.ndarray:
    """Return mixtures about ``radius`` away in each weight; negative weights become 0."""
    near = np.maximum(centre + radius * generator.standard_normal((count, len(centre))), 0)
    near = near[near.sum(1) > 0]
    return np.asarray(near / near.sum(1, keepdims=True))
