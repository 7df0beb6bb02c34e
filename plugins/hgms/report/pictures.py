"""Pictures of results in a notebook: curves of a comparison, curves of one run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hgms.report.curves import Curve
from hgms.report.figures import AXES, span
from hgms.report.paper import bare, curve_panels, draw_band, new_figure, plain
from hgms.report.study import Study
from hgms.report.tables import heading
from hgms.results import LIGHT, is_share, looks
from hgms_core import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hgms.runs import RunResult


def plot_curves(study: Study) -> Figure:
    """Draw the main metric against seconds and oracle calls, one row per task."""
    return shown_in_notebook(curve_panels(study))


def plot_run(result: RunResult) -> Figure:
    """Draw the upper loss and every metric of one run against seconds."""
    method = result.info.method
    names = list(
        dict.fromkeys(
            key
            for row in result.records
            for key in row
            if key == "upper_loss" or key.startswith("metric.")
        )
    )
    if not names:
        raise ConfigError(
            "nothing-to-do",
            "the records contain neither an upper loss nor a metric, so the figure would be empty",
        )
    columns = min(len(names), 3)
    figure = new_figure(3.2 * columns, 2.5 * math.ceil(len(names) / columns))
    for axis, name in zip(_grid(figure, len(names), columns), names, strict=True):
        rows = [row for row in result.records if row.get(name) is not None]
        metric = name.removeprefix("metric.")
        percent = is_share(metric, (row[name] for row in rows))
        x, y = (np.array([row[key] for row in rows], dtype=float) for key in ("seconds", name))
        curve = Curve(x, 100 * y if percent else y)
        draw_band(axis, curve, LIGHT[looks([method])[method].colour])
        bare(axis)
        axis.set_xlabel(AXES["seconds"], fontsize=8)
        axis.set_ylabel(plain(heading(metric, percent)), fontsize=8)
        axis.set_xlim(left=0)
        if zoom := span({method: curve}, share=percent):
            axis.set_ylim(*zoom)
    figure.suptitle(plain(f"{method} on {result.info.task}, seed {result.info.seed}"), fontsize=9)
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


def _grid(figure: Figure, count: int, columns: int) -> Sequence[Axes]:
    """Add panels in rows of ``columns``; return the first ``count`` and hide the rest."""
    panels = figure.subplots(math.ceil(count / columns), columns, squeeze=False).flat
    for axis in panels[count:]:
        axis.set_visible(False)
    return list(panels[:count])
