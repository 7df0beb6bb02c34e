"""Check a small model's surface for a larger model, by the ranks of some mixtures in both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hgms_core import Key
from hgms_mix.surface.design import Point
from hgms_mix.surface.learn import Findings

RESAMPLES = 2000


def choose_points(findings: Findings, points: Sequence[Point], count: int) -> list[Point]:
    """Return ``count`` mixtures of the design from the best to the worst by the surface.

    They are at even steps of the surface's ranks, and include the prior. Each is the first run of
    its mixture.
    """
    first: dict[tuple[float, ...], Point] = {}
    for point in points:
        first.setdefault(point.weights, point)
    distinct = list(first.values())
    means = findings.surface.mean(np.array([point.weights for point in distinct]))
    order = np.argsort(means, kind="stable")
    taken = [
        distinct[order[round(place)]]
        for place in np.linspace(0, len(order) - 1, min(count, len(order)))
    ]
    prior = next(point for point in distinct if point.role == "prior")
    if prior not in taken and len(taken) > 2:
        ranks = [distinct[number] for number in order]
        inner = min(
            range(1, len(taken) - 1),
            key=lambda place: abs(ranks.index(taken[place]) - ranks.index(prior)),
        )
        taken[inner] = prior
    return taken


def rank_correlation(mine: np.ndarray, theirs: np.ndarray, key: Key) -> dict[str, float]:
    """Return Spearman's rank correlation of two columns, with its 95 % percentile bootstrap
    interval over mixtures.

    Resamples with a constant column are excluded.

    Examples
    --------
    >>> rank_correlation(np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 4.0, 9.0, 16.0]), Key(0))[
    ...     "value"
    ... ]
    1.0
    """
    from scipy.stats import rankdata

    generator = np.random.default_rng(key.derive())
    count = len(mine)
    rows = generator.integers(count, size=(RESAMPLES, count))
    ranks = [
        rankdata(column[np.vstack([np.arange(count), rows])], axis=1) for column in (mine, theirs)
    ]
    a, b = (rank - rank.mean(1, keepdims=True) for rank in ranks)
    with np.errstate(invalid="ignore"):
        values = (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
    low, high = np.nanquantile(values[1:], [0.025, 0.975])
    return {"value": round(float(values[0]), 12), "low": float(low), "high": float(high)}


def words(correlation: Mapping[str, float], count: int, gap: float, prior: str) -> dict[str, Any]:
    """Return the result over ``count`` mixtures for the report, with a sentence."""
    conclusion = (
        "both models rank mixtures alike"
        if correlation["low"] > 0.5
        else "that they rank mixtures alike is not shown"
        if correlation["high"] > 0
        else "they do not rank mixtures alike: do not trust the surface for the larger model"
    )
    if math.isfinite(gap):
        best = f"its loss at the best of them − at {prior}: {gap:+.4f}"
    else:  # a loss that is not finite counts as infinite
        both = f"the best of them and {prior}"
        which = prior if gap < 0 else "the best of them" if gap > 0 else both
        best = f"{which} diverged"
    spread = "{value:.2f} [{low:.2f}, {high:.2f}]".format(**correlation)
    return {
        "rank_correlation": dict(correlation),
        "mixtures": count,
        "best_minus_prior": gap if math.isfinite(gap) else None,
        "sentence": f"rank correlation with finetune.model: {spread} over {count} mixtures: "
        f"{conclusion}; {best}",
    }
