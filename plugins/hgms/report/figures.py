"""The page's figures as Plotly specifications.

A specification consists of plain values; plotly.js draws it in the browser.

The name of a method determines its colour and its dash. Colours have a light and a dark set. So a
trace contains the *number* of its colour, and the page inserts the colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from html import escape as escape_all
from typing import Any

import numpy as np

from hgms.config.tables import group_values
from hgms.report.curves import Curve
from hgms.report.mixture import Mixture, prominent
from hgms.report.study import Section, Study
from hgms.report.tables import heading
from hgms.results import Look, looks

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours that people with any colour vision can distinguish (Okabe and Ito 2008), in the order of
their assignment.
"""

LEVEL = 0.15
"""Opacity of a band, relative to its line."""
_STEPS = "outer steps"
AXES = {"seconds": "seconds (without evaluation)", "step": _STEPS, "oracle_calls": "oracle calls"}
# below the plot, because a legend above would lie under the buttons of the plot
_BELOW = {"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0}
_STEPPED = 150  # up to this number of points, a step in a band is wider than one or two pixels

escape = partial(escape_all, quote=False)

Style = Mapping[str, Look]
"""The look of every method."""


def styles(study: Study) -> dict[str, Look]:
    """Return the looks of a study's methods.

    The name of a method determines the colour in every report.
    """
    return looks(study.labels)


def figures(
    section: Section, style: Style, colours: Mapping[tuple[str, ...], Mapping[str, int]]
) -> list[dict[str, Any]]:
    """Return the section's figures that have content.

    Each figure is ``{"title", "text", "spec", "ends"}``.

    ``style`` contains the looks of the methods, and ``colours`` the colours of the sources. With
    ``ends``, a reader can zoom to the ends of the curves.
    """
    shown = []
    for metric in section.drawn:
        for axis in ("seconds", "oracle_calls"):
            curves = section.curves(axis, metric)
            if curves and section.curves("seconds", metric):
                title = f"{metric[:1].upper()}{metric[1:]} against {axis}".replace("_", " ")
                many = any(curve.low is not None for curve in curves.values())
                text = (
                    "mean over seeds, band: 95 % t-interval"
                    if many
                    else "one seed each, so there is no band"
                )
                zoom = span(curves, share=section.is_share(metric))
                drawn = figure(
                    title,
                    text,
                    traces(curves, style, held=True),
                    AXES[axis],
                    heading(metric, section.is_share(metric)),
                    range=zoom,
                )
                shown.append({**drawn, "ends": True})
    shown += [
        _mixture(label, mix, section.axis, colours[mix.sources])
        for label, mix in section.mixtures.items()
        if mix.moves
    ]
    return shown


def figure(
    title: str, text: str, lines: list[dict[str, Any]], x: str, y: str, **scale: Any
) -> dict[str, Any]:
    """Return a figure of lines; ``scale`` contains options of the y axis."""
    scale = {name: value for name, value in scale.items() if value is not None}
    return {
        "title": title,
        "text": text,
        "spec": {
            "data": lines,
            "layout": {
                "xaxis": {"title": {"text": x}, "rangemode": "tozero"},
                "yaxis": {"title": {"text": y}, **scale},
            },
        },
        "ends": False,
    }


def traces(
    curves: Mapping[str, Curve], style: Style, *, held: bool = False
) -> list[dict[str, Any]]:
    """Return a band and a line for each method.

    ``held`` draws values as steps, constant until the next report.
    """
    shapes: list[dict[str, Any]] = []
    for label, curve in curves.items():
        meta = {"colour": style[label].colour}
        look: dict[str, Any] = {"name": label, "legendgroup": label, "meta": meta, "mode": "lines"}
        if curve.low is not None and curve.high is not None:
            # Plotly draws an area with a gap incorrectly
            known = ~(np.isnan(curve.low) | np.isnan(curve.high))
            at = curve.x[known]
            low = curve.low[known]
            high = curve.high[known]
            if held and 1 < len(at) <= _STEPPED:
                at = np.repeat(at, 2)[1:]
                low = np.repeat(low, 2)[:-1]
                high = np.repeat(high, 2)[:-1]
            outline = numbers(np.concatenate([at, at[::-1]]))
            area = numbers(np.concatenate([high, low[::-1]]))
            band = {
                "x": outline,
                "y": area,
                "fill": "toself",
                "line": {"width": 0},
                "hoverinfo": "skip",
            }
            shapes.append({**look, "meta": {**meta, "band": True}, **band})
        shapes.append(
            {
                **look,
                "x": numbers(curve.x),
                "y": numbers(curve.y),
                "line": {
                    "width": 2,
                    "dash": style[label].dash,
                    **({"shape": "hv"} if held else {}),
                },
                "hovertemplate": "%{y:.4~g}",
            }
        )
    return shapes


# --- mixtures
# --------------------------------------------------------------------------------------------------

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


def _mixture(label: str, mixed: Mixture, axis: str, colours: Mapping[str, int]) -> dict[str, Any]:
    """Draw the learned weights of a method over time."""
    # areas differ by pattern as well as by colour
    patterns = ("", "/", ".", "x", "\\", "", "-", "|")
    traces = [
        {
            "name": escape(name),
            "mode": "lines",
            "x": numbers(mixed.x),
            "y": numbers(values),
            "stackgroup": "weights",
            "fillpattern": {
                "shape": patterns[colour],
                "size": 7,
                "solidity": 0.15,
                "fillmode": "overlay",
            },
            "line": {"width": 1, "shape": "hv"},
            "meta": {"colour": colour},
            "hovertemplate": "%{y:.3f}",
            "showlegend": True,
        }
        for name, colour, values in areas(mixed, colours)
    ]
    text = "weights of the sources, stacked" + (
        ": mean over seeds" if len(mixed.finals) > 1 else ""
    )
    drawn = figure(f"Mixture over time: {label}", text, traces, AXES[axis], "weight", range=[0, 1])
    drawn["spec"]["layout"] |= {"showlegend": True, "legend": {**_BELOW, "traceorder": "normal"}}
    return drawn


def span(curves: Mapping[str, Curve], *, share: bool = False) -> list[float] | None:
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
    return [_round(end) for end in ends] if math.isfinite(ends[1] - ends[0]) else None


def _finite(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Concatenate all finite numbers of several arrays."""
    whole = np.concatenate([np.empty(0), *parts])
    return whole[np.isfinite(whole)]


def numbers(values: np.ndarray) -> list[float | None]:
    """Round to five significant digits, which is finer than a pixel.

    A value that is not finite is a gap.
    """
    return [_round(value) for value in values.tolist()]


def _round(value: float) -> Any:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.5g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short
