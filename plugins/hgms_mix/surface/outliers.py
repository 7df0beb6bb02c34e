"""Failed runs: losses far above all others, for example after a divergence of fine-tuning."""

from __future__ import annotations

import numpy as np

from hgms_mix.surface.process import sklearn

FAR = 10.0
"""Largest difference of a loss above its expected value, in robust standard deviations."""
APART = 0.5
"""Largest difference of a loss above all other losses, as a share of their range."""
MOST = 0.2
"""Largest share of runs that may be set aside. If more runs qualify, none is set aside: the
surface itself is then rough.
"""


def find_diverged(mixtures: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Return a mask of the runs to set aside.

    A run is set aside if it meets two conditions:

    - Its loss is ``FAR`` robust standard deviations above its expected value. For a mixture with
      three or more runs, this is the median of these runs, because repeats that agree are not
      accidental. For other mixtures, it is the value of a quadratic (with few runs: linear) surface
      with the least sum of absolute errors. Single bad runs do not change this surface. The
      standard deviation is 1.4826 times the median error of the runs through which the surface does
      not pass.
    - Its loss is above all kept losses, by ``APART`` of their range. A steep surface is steep in
      more than one run.

    Examples
    --------
    >>> places = np.linspace(0, 1, 12)
    >>> losses = places**2 + 0.01 * np.sin(9.0 * np.arange(12))
    >>> losses[4] = 5.0
    >>> np.flatnonzero(find_diverged(np.column_stack([places, 1 - places]), losses))
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
    """Return predictions at each run, and the number of coefficients.

    The predictions are from the surface of least absolute errors.
    """
    sklearn()
    from sklearn.linear_model import QuantileRegressor
    from sklearn.preprocessing import PolynomialFeatures

    # the other weights determine the last weight
    terms = PolynomialFeatures(2, include_bias=False).fit_transform(mixtures[:, :-1])
    if len(losses) < 2 * (terms.shape[1] + 1):
        terms = mixtures[:, :-1]
    fitted = QuantileRegressor(quantile=0.5, alpha=0.0, solver="highs").fit(terms, losses)
    return np.array(fitted.predict(terms)), terms.shape[1] + 1
