"""Pictures of results in a notebook, by matplotlib or plotly.

They show forest plots, curves of a comparison, and curves of one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hgms.report.curves import Curve
from hgms.report.figures import AXES, LEVEL, span, traces
from hgms.report.paper import COLUMNS, bare, curve_panels, draw_band, new_figure, plain
from hgms.report.study import Study
from hgms.report.tables import heading
from hgms.results import LIGHT, Forest, Interval, Look, is_share, looks
from hgms_core import ConfigError
from hgms_core.errors import MissingExtra, one_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hgms.runs import RunResult

Backend = Literal["matplotlib", "plotly"]


def plot_forests(forests: Iterable[Forest | None], backend: Backend = "matplotlib") -> Any:
    """Draw the paired differences with their intervals, one panel per task.

    A line marks zero.
    """
    shown = [forest for forest in forests if forest is not None]
    if not shown:
        raise ConfigError(
            "nothing-to-do",
            "no two methods have finished runs with the same seed, so there is no difference to "
            "draw",
        )
    style = looks(label for forest in shown for label in forest.differences)
    return (_forests if _matplotlib(backend) else _plotly_forests)(shown, style)


def plot_curves(study: Study, backend: Backend = "matplotlib") -> Any:
    """Draw the main metric against seconds and oracle calls, one row per task."""
    if _matplotlib(backend):
        return shown_in_notebook(curve_panels(study))
    style = looks(study.labels)
    panels = [
        (
            section.title,
            AXES[axis],
            heading(section.metric, section.is_share(section.metric)),
            section.curves(axis, section.metric),
            section.is_share(section.metric),
        )
        for section in study.sections
        for axis in ("seconds", "oracle_calls")
    ]
    return _plotly_curves(panels, style, columns=2)


def plot_run(result: RunResult, backend: Backend = "matplotlib") -> Any:
    """Draw the upper loss and every metric of one run against seconds."""
    panels = []
    for name in dict.fromkeys(
        key
        for row in result.records
        for key in row
        if key == "upper_loss" or key.startswith("metric.")
    ):
        rows = [row for row in result.records if row.get(name) is not None]
        metric = name.removeprefix("metric.")
        percent = is_share(metric, (row[name] for row in rows))
        scale = 100 if percent else 1
        x, y = (np.array([row[key] for row in rows], dtype=float) for key in ("seconds", name))
        panels.append(
            (
                metric.replace("_", " "),
                AXES["seconds"],
                heading(metric, percent),
                {result.info.method: Curve(x, y * scale)},
                scale > 1,
            )
        )
    if not panels:
        raise ConfigError(
            "nothing-to-do",
            "the records contain neither an upper loss nor a metric, so there is nothing to draw",
        )
    style = looks([result.info.method])
    if not _matplotlib(backend):
        return _plotly_curves(panels, style, columns=min(len(panels), 3))
    columns = min(len(panels), 3)
    rows_of_panels = math.ceil(len(panels) / columns)
    figure = new_figure(3.2 * columns, 2.5 * rows_of_panels)
    axes = figure.subplots(rows_of_panels, columns, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (_, x_name, y_name, curves, share) in zip(axes.flat, panels, strict=False):
        for label, curve in curves.items():
            draw_band(axis, curve, LIGHT[style[label].colour])
        bare(axis)
        axis.set_xlabel(x_name, fontsize=8)
        axis.set_ylabel(plain(y_name), fontsize=8)
        axis.set_xlim(left=0)
        if zoom := span(curves, share=share):
            axis.set_ylim(*zoom)
    figure.suptitle(
        plain(f"{result.info.method} on {result.info.task}, seed {result.info.seed}"), fontsize=9
    )
    return shown_in_notebook(figure)


def shown_in_notebook(figure: Figure) -> Figure:
    """Make a notebook show the figure if it is the last value of a cell.

    Notebooks show figures of pyplot automatically. Other figures need a method of that name.
    """

    def png() -> tuple[bytes, dict[str, float]]:
        from io import BytesIO

        stream = BytesIO()
        figure.savefig(stream, format="png", dpi=200)
        return stream.getvalue(), {"width": figure.get_figwidth() * 100}

    figure._repr_png_ = png  # type: ignore[attr-defined]
    return figure


def _matplotlib(backend: str) -> bool:
    one_of("backend", backend, ("matplotlib", "plotly"))
    return backend == "matplotlib"


# --- forest plots
# --------------------------------------------------------------------------------------------------


def _forests(forests: Sequence[Forest], style: Mapping[str, Look]) -> Figure:
    columns = min(2, len(forests))
    rows = math.ceil(len(forests) / columns)
    most = max(len(forest.differences) for forest in forests)
    figure = new_figure(COLUMNS * (1 if columns == 2 else 0.75), rows * (0.28 * most + 1.0))
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(forests) :]:
        axis.set_visible(False)
    for axis, forest in zip(axes.flat, forests, strict=False):
        scale = 100 if forest.share else 1
        labels = list(forest.differences)[::-1]
        low, high = (end * scale for end in forest.limits)
        axis.axvline(0, color="#777777", linewidth=0.8, linestyle="--")
        for place, label in enumerate(labels):
            pair = forest.differences[label]
            colour = LIGHT[style[label].colour]
            won = label == forest.winner
            at, half = _numbers(pair, scale)
            if pair is None:
                axis.plot([0], [place], "o", color=colour, markerfacecolor="white", markersize=6)
            elif math.isfinite(at):
                axis.errorbar(
                    at,
                    place,
                    xerr=half,
                    color=colour,
                    fmt="D" if won else "o",
                    markersize=6,
                    linewidth=1.8,
                )
                for end, mark in ((low, "<"), (high, ">")):
                    if (at - half < low) if mark == "<" else (at + half > high):
                        axis.plot([end], [place], mark, color=colour, markersize=6, clip_on=False)
            weight = "bold" if won else "normal"
            axis.annotate(
                forest.spell(label),
                (1.0, place),
                xycoords=("axes fraction", "data"),
                xytext=(6, 0),
                fontsize=8,
                textcoords="offset points",
                va="center",
                fontweight=weight,
            )
        axis.set_yticks(
            range(len(labels)),
            [plain(label) + (" ★" if label == forest.winner else "") for label in labels],
            fontsize=8,
        )
        axis.set_xlim(low, high)
        axis.set_ylim(-0.6, len(labels) - 0.4)
        axis.tick_params(axis="x", labelsize=7)
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.set_xlabel(plain(forest.caption), fontsize=7)
        axis.set_title(plain(forest.title), fontsize=9, loc="left")
    return shown_in_notebook(figure)


def _numbers(pair: Interval | None, scale: float) -> tuple[float, float]:
    """Return mean and half-width in display units; one seed has no half-width."""
    if pair is None:
        return 0.0, 0.0
    return pair.mean * scale, 0.0 if math.isnan(pair.half_width) else pair.half_width * scale


def _plotly_forests(forests: Sequence[Forest], style: Mapping[str, Look]) -> Any:
    columns = min(2, len(forests))
    rows = math.ceil(len(forests) / columns)
    figure = _plotly(rows, columns, [forest.title for forest in forests])
    for number, forest in enumerate(forests):
        place = {"row": number // columns + 1, "col": number % columns + 1}
        scale = 100 if forest.share else 1
        for label in list(forest.differences)[::-1]:
            at, half = _numbers(forest.differences[label], scale)
            won = label == forest.winner
            name = _plotly_text(label) + " ★" * won
            figure.add_scatter(
                x=[at],
                y=[name],
                error_x={"type": "data", "array": [half]},
                mode="markers",
                showlegend=False,
                marker={
                    "color": LIGHT[style[label].colour],
                    "size": 10,
                    "symbol": "diamond" if won else "circle",
                },
                hovertemplate=f"{name}: {forest.spell(label)}<extra></extra>",
                **place,
            )
        figure.add_vline(x=0, line={"dash": "dash", "width": 1, "color": "#777777"}, **place)
        figure.update_xaxes(
            title={"text": forest.caption}, range=[end * scale for end in forest.limits], **place
        )
    most = max(len(forest.differences) for forest in forests)
    figure.update_layout(height=rows * (130 + 30 * most))
    return figure


# --- curves
# --------------------------------------------------------------------------------------------------

Panel = tuple[str, str, str, Mapping[str, Curve], bool]
"""Title, axis names, curves by method, and whether they are shares."""


def _plotly_curves(panels: Sequence[Panel], style: Mapping[str, Look], columns: int) -> Any:
    rows = math.ceil(len(panels) / columns)
    figure = _plotly(rows, columns, [title for title, *_ in panels])
    known: set[str] = set()
    for number, (_, x_name, y_name, curves, share) in enumerate(panels):
        place = {"row": number // columns + 1, "col": number % columns + 1}
        for trace in traces(curves, style, held=True):
            meta = trace.pop("meta")
            colour = LIGHT[meta["colour"]]
            if meta.get("band"):
                red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
                trace |= {
                    "fillcolor": f"rgba({red}, {green}, {blue}, {LEVEL})",
                    "showlegend": False,
                }
            else:
                trace |= {
                    "line": {**trace["line"], "color": colour},
                    "showlegend": trace["name"] not in known,
                }
                known.add(trace["name"])
            figure.add_scatter(**trace, **place)
        figure.update_xaxes(title={"text": x_name}, rangemode="tozero", **place)
        figure.update_yaxes(
            title={"text": y_name}, range=span(curves, share=share) if curves else None, **place
        )
    figure.update_layout(
        height=60 + 300 * rows, legend={"orientation": "h", "y": -0.25 / rows, "yanchor": "top"}
    )
    return figure


def _plotly(rows: int, columns: int, titles: Sequence[str]) -> Any:
    try:
        from plotly.subplots import make_subplots
    except ModuleNotFoundError:
        raise MissingExtra(
            "missing-package", "this picture requires plotly", install="pip install 'hgms[report]'"
        ) from None
    figure = make_subplots(
        rows=rows, cols=columns, subplot_titles=[_plotly_text(title) for title in titles]
    )
    figure.update_layout(margin={"l": 60, "r": 20, "t": 40, "b": 40}, template="plotly_white")
    return figure


def _plotly_text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
