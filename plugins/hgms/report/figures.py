"""Colours, axes and areas that all pictures of a report share.

The name of a method determines its colour and its dash.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

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
    """Compute the ends of the y axis.

    They cover the means after these have settled (after a twentieth of the x axis), and the start
    of the means unless it is far away. So the values of the first second do not determine the axis.
    Bands count up to half of the range of the means beyond them, because with two seeds a band can
    be huge. The axis starts at zero if zero is near, and a share in percent ends at 100.
    """
    lines = [curve for curve in curves.values() if np.isfinite(curve.y).any()]
    if not lines:
        return None
    settled = 0.05 * max(float(curve.x[-1]) for curve in lines)
    late = [curve.x >= min(settled, curve.x[-1]) for curve in lines]
    means = _finite(curve.y[kept] for curve, kept in zip(lines, late, strict=True))
    first = np.array([curve.y[np.isfinite(curve.y)][0] for curve in lines])
    if not means.size:
        means = first
    near = np.abs(first) / 5 <= np.abs(means).max()
    means = np.concatenate([means, first[near]])
    low = float(means.min())
    high = float(means.max())
    room = (high - low) or abs(high) or 1.0
    bands = (
        (band, kept)
        for curve, kept in zip(lines, late, strict=True)
        for band in (curve.low, curve.high)
        if band is not None
    )
    known = _finite(band[kept] for band, kept in bands)
    if known.size:
        bottom = max(float(known.min()), low - room / 2)
        top = min(float(known.max()), high + room / 2)
        low = min(low, bottom if low < 0 else max(bottom, 0.0))
        high = max(high, top)
    if share:
        low = max(low, 0.0)
        high = min(high, 100.0)
    if 0 <= low < 0.5 * high:
        low = 0.0
    margin = 0.04 * ((high - low) or room)
    ends = low - margin / 2, high + margin
    return ends if math.isfinite(ends[1] - ends[0]) else None


def _finite(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Concatenate all finite numbers of several arrays."""
    whole = np.concatenate([np.empty(0), *parts])
    return whole[np.isfinite(whole)]
