"""Mixtures as points of the simplex.

The module computes centred log-ratios, and intervals of single weights.

Weights sum to one. Separate intervals for the weights would allow a weight to grow although no
other weight shrinks. In centred log-ratios (Aitchison's geometry), means, spreads and differences
follow the rules of ordinary vectors, and every weight stays between 0 and 1.

Notes
-----
Source: Aitchison (1986), *The statistical analysis of compositional data*.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

LEAST = 1e-4
"""Smallest weight that is distinguished from zero: one row in ten thousand. The logarithm of a
smaller weight would dominate all other numbers.
"""


def clr(weights: ArrayLike) -> Array:
    """Compute centred log-ratios log ω_s − mean_r log ω_r along the last axis.

    Weights below :data:`LEAST` count as :data:`LEAST`.

    Examples
    --------
    >>> clr([0.5, 0.25, 0.25]).round(4).tolist()
    [0.4621, -0.231, -0.231]
    """
    logs = np.log(np.maximum(np.asarray(weights, dtype=float), LEAST))
    return np.asarray(logs - logs.mean(-1, keepdims=True))


def centre(ratios: ArrayLike) -> Array:
    """Compute the weights with these centred log-ratios: the inverse of :func:`clr`.

    Examples
    --------
    >>> centre(clr([0.5, 0.3, 0.2])).round(6).tolist()
    [0.5, 0.3, 0.2]
    """
    from scipy.special import softmax

    return np.asarray(softmax(np.asarray(ratios, dtype=float), axis=-1))


def with_pivot(ratios: ArrayLike, source: int, value: float) -> float:
    """Compute the weight of ``source`` if its centred log-ratio is ``value``.

    The other sources keep their proportions.

    Examples
    --------
    >>> round(with_pivot(clr([0.5, 0.3, 0.2]), 0, clr([0.5, 0.3, 0.2])[0]), 6)
    0.5
    """
    ratios = np.asarray(ratios, dtype=float)
    others = np.delete(ratios, source)
    # relative to the geometric mean of the others: log(ω_s / g) = S / (S − 1) · clr_s
    pivot = value * len(ratios) / (len(ratios) - 1)
    return float(1 / (1 + np.exp(others - others.mean() - pivot).sum()))
