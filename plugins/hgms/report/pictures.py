"""Pictures of comparisons in a notebook: forest plots and curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hgms.arguments import require
from hgms.report.paper import COLUMNS, encoded, main_curves, new_figure, plain
from hgms.report.study import Study
from hgms.results import LIGHT, Forest, looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_forests(forests: Iterable[Forest | None]) -> Figure:
    """Draw the paired differences with their intervals, one panel per task.

    A line marks zero.
    """
    shown = [forest for forest in forests if forest is not None]
    require(
        shown,
        "nothing-to-do",
        "no two methods have finished runs with the same seed, so there is no difference to draw",
    )
    return shown_in_notebook(forest_panels(shown))


def forest_panels(forests: Sequence[Forest]) -> Figure:
    """Draw one panel per forest, two in a row."""
    style = looks(label for forest in forests for label in forest.differences)
    columns = min(2, len(forests))
    rows = math.ceil(len(forests) / columns)
    most = max(len(forest.differences) for forest in forests)
    figure = new_figure(COLUMNS * (1 if columns == 2 else 0.75), rows * (0.28 * most + 1.0))
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axis in panels[len(forests) :]:
        axis.set_visible(False)
    for axis, forest in zip(panels, forests, strict=False):
        _forest(axis, forest, {label: LIGHT[look.colour] for label, look in style.items()})
    return figure


def plot_curves(study: Study) -> Figure:
    """Draw the main metric against seconds and oracle calls, one row per task."""
    return shown_in_notebook(main_curves(study))


def shown_in_notebook(figure: Figure) -> Figure:
    """Make a notebook show the figure if it is the last value of a cell.

    Notebooks show figures of pyplot automatically. Other figures need a method of that name.
    """

    def png() -> tuple[bytes, dict[str, float]]:
        return encoded(figure, "png"), {"width": figure.get_figwidth() * 100}

    figure._repr_png_ = png  # type: ignore[attr-defined]
    return figure


def _forest(axis: Axes, forest: Forest, colours: dict[str, str]) -> None:
    scale = 100 if forest.share else 1
    labels = list(forest.differences)[::-1]
    low, high = (end * scale for end in forest.limits)
    axis.axvline(0, color="#777777", linewidth=0.8, linestyle="--")
    for place, label in enumerate(labels):
        pair = forest.differences[label]
        colour = colours[label]
        won = label == forest.winner
        at, half = (0.0, 0.0) if pair is None else (scale * pair.mean, scale * pair.reach)
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
