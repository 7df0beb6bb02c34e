"""The page's figures as Plotly specifications: plain values, drawn by plotly.js in the browser.

A method has one colour and one dash on the whole page, by its name. Colours come in a light and a dark set (after Okabe and
Ito's, which colour-blind readers can tell apart), so a trace holds the *number* of its colour and the page puts it in.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from hgms_report.curves import Curve
from hgms_report.mixture import Mixture, prominent
from hgms_report.study import Section, Study
from hgms_report.tables import heading, outcome
from hgms_results import is_share

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours that people with any colour vision tell apart (Okabe and Ito 2008), in the order in which they are given out."""

LIGHT = ("#0072B2", "#C94F00", "#007F5F", "#A8447F", "#9A6B00", "#3D3D3D", "#6250C4", "#7A8C00")
DARK = ("#56B4E9", "#FF8F4D", "#2FCBA0", "#EBA0CB", "#F0BE4A", "#D0D4DA", "#A99CFF", "#C3D64B")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_STEPS = "outer steps"
_BELOW = {"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0}  # a legend above would lie under the buttons of a plot
_STEPPED = 150  # points up to which a step in a band is wider than a pixel or two


def styles(study: Study) -> dict[str, dict[str, Any]]:
    """Colour number and dash of every method; 8 × 5 of them differ. A method has the colour of its name in every report, or the
    next one where that is taken."""
    chosen: dict[str, dict[str, Any]] = {}
    colours, dashes, looks = (Counter[Any]() for _ in range(3))
    for label in study.labels:
        own = zlib.crc32(label.encode(errors="backslashreplace"))

        def order(look: tuple[int, int], own: int = own) -> tuple[int, ...]:
            colour, dash = look
            free = looks[look], colours[colour]
            return *free, (colour - own) % len(LIGHT), dashes[dash], (dash - own // len(LIGHT)) % len(DASHES)

        colour, dash = min(itertools.product(range(len(LIGHT)), range(len(DASHES))), key=order)
        for taken, key in ((colours, colour), (dashes, dash), (looks, (colour, dash))):
            taken[key] += 1
        chosen[label] = {"colour": colour, "dash": DASHES[dash]}
    return chosen


def figures(
    section: Section, style: Mapping[str, Mapping[str, Any]], colours: Mapping[tuple[str, ...], Mapping[str, int]]
) -> list[dict[str, Any]]:
    """The section's figures that have something to show, each ``{"title", "text", "spec"}``; ``style`` is that of the methods,
    ``colours`` of the sources."""
    found = []
    for metric, by_method in section.curves["seconds"].items():
        for axis, name in (("seconds", "seconds (without evaluation)"), ("oracle_calls", "oracle calls")):
            curves = section.curves[axis][metric]
            if curves and by_method:
                title = f"{metric[:1].upper()}{metric[1:]} against {axis}".replace("_", " ")
                if is_share(metric):
                    curves = {label: curve.percent for label, curve in curves.items()}
                many = any(curve.low is not None for curve in curves.values())
                text = "mean over seeds, band: 95 % t-interval" if many else "one seed each, so there is no band"
                zoom = span(curves, share=is_share(metric))
                found.append(_figure(title, text, _curves(curves, style, held=True), name, heading(metric), zoom=zoom))
    found += _mixtures(section, colours)
    gaps = {each.label: each.gap for each in section.diagnoses if each.gap is not None and np.nanmax(each.gap.y) > 0}
    if gaps:
        text = "how far the best candidate was ahead of the next: median over steps and seeds, band: middle half"
        found.append(_figure("Selection gap", text, _curves(gaps, style), _STEPS, "gap", zoom=span(gaps)))
    branches = {each.label: each.branches for each in section.diagnoses if len(each.branches) > 1}
    if branches:
        found.append(_branches(branches, style))
    residuals = {
        each.label: each.residual for each in section.diagnoses if each.residual is not None and np.nanmax(each.residual.y) > 0
    }
    if residuals:
        text = "relative residual of the solves: median over steps and seeds, band: middle half"
        shown = _curves(residuals, style, positive=True)
        found.append(_figure("Linear-solver residual", text, shown, _STEPS, "residual", log=True))
    outcomes = {each.label: each.outcomes for each in section.diagnoses if set(each.outcomes) - {"not-solved"}}
    if outcomes:
        found.append(_outcomes(outcomes))
    return found


def _figure(
    title: str, text: str, traces: list[dict[str, Any]], x: str, y: str, *, log: bool = False, zoom: list[float] | None = None
) -> dict[str, Any]:
    scale: dict[str, Any] = {"type": "log", "exponentformat": "power"} if log else {}
    if zoom is not None:
        scale["range"] = zoom
    layout = {"xaxis": {"title": {"text": x}, "rangemode": "tozero"}, "yaxis": {"title": {"text": y}, **scale}}
    return {"title": title, "text": text, "spec": {"data": traces, "layout": layout}}


def _curves(
    curves: Mapping[str, Curve], style: Mapping[str, Mapping[str, Any]], *, positive: bool = False, held: bool = False
) -> list[dict[str, Any]]:
    """A band and a line for each method.

    ``positive`` leaves out what a logarithmic axis cannot show; ``held`` draws values that hold until the next report as steps.
    """
    traces: list[dict[str, Any]] = []
    for label, curve in curves.items():
        look: dict[str, Any] = {
            "name": label,
            "legendgroup": label,
            "meta": {"colour": style[label]["colour"]},
            "mode": "lines",
        }
        x = numbers(curve.x)
        if curve.low is not None and curve.high is not None:
            low = curve.low if not positive else np.where(curve.low > 0, curve.low, np.nan)
            high = curve.high if not positive else np.where(curve.high > 0, curve.high, np.nan)
            known = ~(np.isnan(low) | np.isnan(high))  # an area with a gap in it is drawn wrongly
            at, low, high = curve.x[known], low[known], high[known]
            if held and 1 < len(at) <= _STEPPED:
                at, low, high = np.repeat(at, 2)[1:], np.repeat(low, 2)[:-1], np.repeat(high, 2)[:-1]
            outline, area = numbers(np.concatenate([at, at[::-1]])), numbers(np.concatenate([high, low[::-1]]))
            band = {"x": outline, "y": area, "fill": "toself", "line": {"width": 0}, "hoverinfo": "skip"}
            traces.append({**look, "meta": {**look["meta"], "band": True}, **band})
        y = curve.y if not positive else np.where(curve.y > 0, curve.y, np.nan)
        line = {"width": 2, "dash": style[label]["dash"], **({"shape": "hv"} if held else {})}
        traces.append({**look, "x": x, "y": numbers(y), "line": line, "hovertemplate": "%{y:.4~g}"})
    return traces


_SOURCE_COLOURS = (0, 1, 2, 3, 4, 6, 7)
_REST_COLOUR = 5  # grey
AXES = {"seconds": "seconds (without evaluation)", "step": _STEPS, "oracle_calls": "oracle calls"}


def source_colours(study: Study) -> dict[tuple[str, ...], dict[str, int]]:
    """By portfolio, the colour numbers of the sources that matter most in any section that has it; the others get none."""
    moving: dict[tuple[str, ...], list[Mixture]] = {}
    for section in study.sections:
        for each in section.mixtures.values():
            moving.setdefault(each.sources, []).extend([each] * each.moves)
    most = len(_SOURCE_COLOURS)
    return {key: dict(zip(prominent(each, most), _SOURCE_COLOURS, strict=False)) for key, each in moving.items()}


def areas(mixed: Mixture, colours: Mapping[str, int]) -> list[tuple[str, int, np.ndarray]]:
    """Name, number of the colour and weights over time of what is stacked: sources with a colour, then all others as one."""
    weights = dict(zip(mixed.sources, mixed.over_time, strict=True))
    found = [(source, colour, weights[source]) for source, colour in colours.items()]
    rest = [row for source, row in weights.items() if source not in colours]
    if rest:
        found.append((f"{len(rest)} other source{'s' * (len(rest) != 1)}", _REST_COLOUR, np.sum(rest, axis=0)))
    return found


def _mixtures(section: Section, colours: Mapping[tuple[str, ...], Mapping[str, int]]) -> list[dict[str, Any]]:
    """The learned weights over time, a picture for each method whose mixture moves."""
    found = []
    for label, each in section.mixtures.items():
        if not each.moves:
            continue
        traces = [_area(name, colour, each.x, values) for name, colour, values in areas(each, colours[each.sources])]
        text = "weights of the sources, stacked" + (": mean over seeds" if len(each.finals) > 1 else "")
        figure = _figure(f"Mixture over time: {label}", text, traces, AXES[section.axis], "weight", zoom=[0, 1])
        figure["spec"]["layout"] |= {
            "showlegend": True,
            "legend": {**_BELOW, "traceorder": "normal"},
        }
        found.append(figure)
    return found


def _area(name: str, colour: int, x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    return {
        "name": _escape(name),
        "mode": "lines",
        "x": numbers(x),
        "y": numbers(y),
        "stackgroup": "weights",
        # areas are told apart by pattern as well as by colour
        "fillpattern": {
            "shape": ("", "/", ".", "x", "\\", "", "-", "|")[colour],
            "size": 7,
            "solidity": 0.15,
            "fillmode": "overlay",
        },
        "line": {"width": 1, "shape": "hv"},
        "meta": {"colour": colour},
        "hovertemplate": "%{y:.3f}",
        "showlegend": True,
    }


def _branches(branches: Mapping[str, Mapping[int, int]], style: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    traces = []
    for label, counts in branches.items():
        total, last = sum(counts.values()), max(counts)
        index = list(range(last + 1)) if last < 1000 else sorted(counts)
        traces.append(
            {
                "type": "bar",
                "name": label,
                "x": index,
                "y": [round(100 * counts.get(number, 0) / total, 3) for number in index],
                "customdata": [counts.get(number, 0) for number in index],
                "meta": {"colour": style[label]["colour"]},
                "hovertemplate": (
                    f"<b>{_escape(label)}</b><br>candidate %{{x}}: %{{y:.1f}} % (%{{customdata}} steps)<extra></extra>"
                ),
            }
        )
    figure = _figure("Chosen candidate", "share of the steps in which each candidate was selected", traces, "candidate", "%")
    figure["spec"]["layout"]["xaxis"] = {"title": {"text": "candidate"}, "dtick": 1 if _widest(branches) <= 16 else None}
    figure["spec"]["layout"]["barmode"] = "group"
    return figure


def _widest(branches: Mapping[str, Mapping[int, int]]) -> int:
    return max(max(counts) for counts in branches.values())


_OUTCOMES = (
    "converged", "iteration-limit", "negative-curvature", "stagnated", "diverged", "nonfinite", "not-solved",
)  # fmt: skip


def _outcomes(outcomes: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    labels = list(outcomes)[::-1]
    names = [*_OUTCOMES, *sorted({name for each in outcomes.values() for name in each} - set(_OUTCOMES))]
    traces = []
    for number, name in enumerate(names):
        counts = [outcomes[label].get(name, 0) for label in labels]
        if not any(counts):
            continue
        totals = [sum(outcomes[label].values()) for label in labels]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": outcome(name),
                "y": [_escape(label) for label in labels],
                "x": [round(100 * count / total, 3) for count, total in zip(counts, totals, strict=True)],
                "customdata": counts,
                # outcomes are told apart by pattern as well as by colour
                "marker": {
                    "pattern": {
                        "shape": ("", "/", "x", ".", "\\", "+", "-")[number % 7],
                        "size": 7,
                        "solidity": 0.2,
                        "fillmode": "overlay",
                    }
                },
                "meta": {"colour": (2, 0, 1, 3, 4, 5, 5)[number % 7]},
                "hovertemplate": f"<b>%{{y}}</b><br>{outcome(name)}: %{{x:.1f}} % (%{{customdata}} solves)<extra></extra>",
                "showlegend": True,
            }
        )
    figure = _figure("How the linear solves ended", "share of all solves", traces, "%", "")
    figure["spec"]["layout"] |= {
        "barmode": "stack",
        "xaxis": {"title": {"text": "% of solves"}, "range": [0, 100]},
        "yaxis": {"automargin": True, "ticksuffix": "  "},
        "showlegend": True,
        "legend": _BELOW,
        "hovermode": "closest",
    }
    return figure


def span(curves: Mapping[str, Curve], *, share: bool = False) -> list[float] | None:
    """The axis follows the means, and the bands up to half of that beyond them: with two seeds a band can be huge. A share in
    percent stays within 0 and 100, whatever its band does."""
    means = np.concatenate([curve.y for curve in curves.values()])
    means = means[np.isfinite(means)]
    if not means.size:
        return None
    low, high = float(means.min()), float(means.max())
    room = (high - low) or abs(high) or 1.0
    bands = [band for curve in curves.values() for band in (curve.low, curve.high) if band is not None]
    known = np.concatenate([band[np.isfinite(band)] for band in bands]) if bands else means
    if known.size:
        bottom, top = max(float(known.min()), low - room / 2), min(float(known.max()), high + room / 2)
        low, high = min(low, bottom), max(high, top)
    if share:
        low, high = max(low, 0.0), min(high, 100.0)
    margin = 0.04 * ((high - low) or room)
    ends = low - margin, high + margin
    return [_rounded(end) for end in ends] if math.isfinite(ends[1] - ends[0]) else None


def numbers(values: np.ndarray) -> list[float | None]:
    """Five significant digits, which is finer than a pixel; what is not finite is a gap."""
    return [_rounded(value) for value in values.tolist()]


def _rounded(value: float) -> Any:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.5g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


__all__ = ["AXES", "DARK", "LIGHT", "areas", "figures", "source_colours", "styles"]
