"""Colours, axes and areas that all pictures of a report share.

The name of a method determines its colour and its dash.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from hgms.config.tables import group_values
from hgms.report.curves import Curve
from hgms.report.mixture import Mixture, prominent
from hgms.report.study import Study

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours that people with any colour vision can distinguish (Okabe and Ito 2008), in the order of
their assignment.
"""

AXES = {
    "seconds": "seconds (without evaluation)",
    "step": "outer steps",
    "oracle_calls": "oracle calls",
}


_SOURCE_COLOURS = (0, 1, 2, 3, 4, 6, 7)
_REST_COLOUR = 5  # grey


def source_colours(study: Study) -> dict[tuple[str, ...], dict[str, int]]:
    """Return the colour numbers of the most important sources, by portfolio.

    A source is ranked by its weight in any section with that portfolio. The remaining sources get
    no colour.
    """
    mixtures = group_values(
        (mixture.sources, mixture)
        for section in study.sections
        for mixture in section.mixtures.values()
    )
    colours = {}
    for key, several in mixtures.items():
        moving = [mixture for mixture in several if mixture.moves]
        sources = prominent(moving, len(_SOURCE_COLOURS))
        colours[key] = dict(zip(sources, _SOURCE_COLOURS, strict=False))
    return colours


def areas(mixed: Mixture, colours: Mapping[str, int]) -> list[tuple[str, int, np.ndarray]]:
    """Return name, colour number and weights over time of the stacked areas.

    The areas are the sources with a colour, then the sum of the other sources.
    """
    weights = dict(zip(mixed.sources, mixed.over_time, strict=True))
    stack = [(source, colour, weights[source]) for source, colour in colours.items()]
    rest = [row for source, row in weights.items() if source not in colours]
    if rest:
        stack.append(
            (
                f"{len(rest)} other source{'s' * (len(rest) != 1)}",
                _REST_COLOUR,
                np.sum(rest, axis=0),
            )
        )
    return stack


def span(curves: Mapping[str, Curve], *, share: bool = False) -> tuple[float, float] | None:
    """Return the ends of the y axis; None without finite values.

    They cover the means after a twentieth of the x axis, and their starts unless these are far
    away, with a margin for bands. So the values of the first second, and the wide band of two
    seeds, do not determine the axis. It does not go below zero if no mean does, and ends at 100
    for a share in percent.
    """
    settled = 0.05 * max(float(curve.x[-1]) for curve in curves.values())
    late = [curve.y[curve.x >= min(settled, curve.x[-1])] for curve in curves.values()]
    means = np.concatenate(late)
    means = means[np.isfinite(means)]
    if not means.size:
        return None
    first = np.array([curve.y[0] for curve in curves.values()])
    means = np.concatenate([means, first[np.abs(first) <= 5 * np.abs(means).max()]])
    low = float(means.min())
    high = float(means.max())
    margin = 0.2 * ((high - low) or abs(high) or 1.0)
    bottom = max(low - margin, 0.0) if low >= 0 else low - margin
    top = min(high + margin, 100.0) if share else high + margin
    return (bottom, top) if math.isfinite(top - bottom) else None
