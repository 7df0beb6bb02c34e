"""Mixtures as points of the simplex: centred log-ratios, and intervals of single weights through
them.

Weights sum to one, so that an interval of each on its own would let one grow while no other
shrinks. In centred log-ratios (Aitchison's geometry) means, spreads and differences are those of
ordinary vectors, and every weight stays between 0 and 1.

Source: Aitchison (1986), *The statistical analysis of compositional data*.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

LEAST = 1e-4
"""The smallest weight that is told from zero: a row in ten thousand. A logarithm of less would
be the largest number of all.
"""


def clr(weights: ArrayLike) -> Array:
    """Centred log-ratios log ω_s − mean_r log ω_r along the last axis; weights below :data:`LEAST`
    count as that.

    >>> clr([0.5, 0.25, 0.25]).round(4).tolist()
    [0.4621, -0.231, -0.231]
    """
    logs = np.log(np.maximum(np.asarray(weights, dtype=float), LEAST))
    return np.asarray(logs - logs.mean(-1, keepdims=True))


def centre(ratios: ArrayLike) -> Array:
    """The weights with these centred log-ratios: the inverse of :func:`clr`.

    >>> centre(clr([0.5, 0.3, 0.2])).round(6).tolist()
    [0.5, 0.3, 0.2]
    """
    ratios = np.asarray(ratios, dtype=float)
    raised = np.exp(ratios - ratios.max(-1, keepdims=True))
    return np.asarray(raised / raised.sum(-1, keepdims=True))


def with_pivot(ratios: ArrayLike, source: int, value: float) -> float:
    """The weight of ``source`` where its centred log-ratio is ``value`` and the others keep their
    proportions.

    >>> round(with_pivot(clr([0.5, 0.3, 0.2]), 0, clr([0.5, 0.3, 0.2])[0]), 6)
    0.5
    """
    ratios = np.asarray(ratios, dtype=float)
    others = np.delete(ratios, source)
    # against the geometric mean of the others: log(ω_s / g) = S / (S − 1) · clr_s
    pivot = value * len(ratios) / (len(ratios) - 1)
    return float(1 / (1 + np.exp(others - others.mean() - pivot).sum()))
