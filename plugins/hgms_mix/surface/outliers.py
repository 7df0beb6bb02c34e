"""Runs that went wrong: a loss far above all that the others allow, as of a fine-tuning that
diverged.
"""

from __future__ import annotations

import numpy as np

from hgms_mix.surface.process import sklearn

FAR = 10.0
"""How many robust standard deviations a loss may lie above what is expected of it."""
APART = 0.5
"""How far above all other losses, as a share of their range."""
MOST = 0.2
"""The share of runs that may be set aside; where there are more, none is: then it is the surface
that is rough.
"""


def gone_wrong(mixtures: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Which runs to set aside, as a mask.

    Two things have to be so. It lies ``FAR`` robust standard deviations above what is expected of
    it: of a mixture that was run three times or more, their median (repeats that agree are no
    accident); of any other, a quadratic (with few runs: linear) surface with the least sum of
    absolute errors, which single bad runs do not move. The standard deviation is 1.4826 times the
    median error of those that such a surface does not pass through. And it lies above all that are
    kept, by ``APART`` of the range of those: a steep surface is steep in more than a single run.

    >>> places = np.linspace(0, 1, 12)
    >>> losses = places**2 + 0.01 * np.sin(9.0 * np.arange(12))
    >>> losses[4] = 5.0
    >>> np.flatnonzero(gone_wrong(np.column_stack([places, 1 - places]), losses))
    array([4])
    """
    _, inverse, counts = np.unique(
        mixtures.round(6), axis=0, return_inverse=True, return_counts=True
    )
    inverse = inverse.reshape(-1)
    expected, coefficients = _robust(mixtures, losses)
    for group in np.flatnonzero(counts >= 3):
        expected[inverse == group] = np.median(losses[inverse == group])
    errors = losses - expected
    free = np.sort(np.abs(errors))[coefficients:]
    if len(free) < 3:
        return np.zeros(len(losses), dtype=bool)
    far = errors > FAR * max(1.4826 * float(np.median(free)), 1e-9)
    for run in np.flatnonzero(far)[np.argsort(losses[far])]:
        low = losses[~far].min()
        high = losses[~far].max()
        far[run] = losses[run] > high + APART * (high - low)
    return far if far.mean() <= MOST else np.zeros_like(far)


def _robust(mixtures: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, int]:
    """What the surface of least absolute errors says of each run, and how many coefficients it
    has.
    """
    sklearn()
    from sklearn.linear_model import QuantileRegressor
    from sklearn.preprocessing import PolynomialFeatures

    # the last weight follows from the others
    terms = PolynomialFeatures(2, include_bias=False).fit_transform(mixtures[:, :-1])
    if len(losses) < 2 * (terms.shape[1] + 1):
        terms = mixtures[:, :-1]
    fitted = QuantileRegressor(quantile=0.5, alpha=0.0, solver="highs").fit(terms, losses)
    return np.array(fitted.predict(terms)), terms.shape[1] + 1
