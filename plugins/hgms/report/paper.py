"""Pictures of a study, by matplotlib: for the page, for papers and for notebooks.

They show the metric against seconds and oracle calls, or the mixture over time.

The formats are PNG, SVG and PDF. Needs ``hgms[plot]``.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hgms.arguments import require
from hgms.config.control_characters import printable
from hgms.packages import optional_module
from hgms.report.curves import Curve
from hgms.report.figures import AXES, areas, source_colours, span
from hgms.report.files import write_file
from hgms.report.study import Section, Study
from hgms.report.tables import heading
from hgms.results import DASHES, LIGHT, Look, looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".pdf", ".png")
COLUMNS = 7.0
"""Width of a figure across two columns of a paper, in inches."""
_LINES = dict(zip(DASHES, ("-", "--", ":", "-.", (0, (9, 3))), strict=True))


def draw_curves(study: Study, path: Path) -> Path:
    """Write the curves of the main metric to a file, one row per task."""
    return save(main_curves(study), path)


def main_curves(study: Study) -> Figure:
    """Draw the main metric of every task, one row per task."""
    rows = [(section, section.metric) for section in study.sections]
    titles = [section.title for section in study.sections] if len(rows) > 1 else []
    return curve_panels(rows, looks(study.labels), titles)


def curve_panels(
    rows: Sequence[tuple[Section, str]], style: Mapping[str, Look], titles: Sequence[str] = ()
) -> Figure:
    """Draw one row of two panels per (section, metric): mean over seeds, with a band for several.

    The left panel is against seconds, the right panel against oracle calls.
    """
    figure = new_figure(COLUMNS, 2.6 * len(rows) + 0.5)
    panels = figure.subplots(len(rows), 2, squeeze=False)
    for row, (section, metric) in zip(panels, rows, strict=True):
        share = section.is_share(metric)
        for axis, name in zip(row, ("seconds", "oracle_calls"), strict=True):
            curves = section.curves(name, metric)
            for method, curve in curves.items():
                look = style[method]
                draw_band(
                    axis,
                    curve,
                    LIGHT[look.colour],
                    label=plain(method),
                    linestyle=_LINES[look.dash],
                )
            zoom = span(curves, share=share) if curves else None
            if zoom is not None:
                axis.set_ylim(*zoom)
            axis.set_xlim(left=0)
            axis.set_xlabel(AXES[name], fontsize=8)
            bare(axis)
        row[0].set_ylabel(plain(heading(metric, share)), fontsize=8)
    for row, title in zip(panels, titles, strict=False):
        row[0].set_title(plain(title), fontsize=9, loc="left")
    handles = {
        label: handle
        for axis in panels.flat
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if handles:
        labels = sorted(handles)
        _legend(figure, [handles[label] for label in labels], fontsize=8, labels=labels)
    return figure


def bare(axis: Axes) -> None:
    """Set small numbers, a faint grid and no frame."""
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, linewidth=0.5)


def draw_band(axis: Axes, curve: Curve, colour: str, **line: Any) -> None:
    """Draw the curve as a line of steps, with its band if any; ``line`` is for matplotlib."""
    axis.step(curve.x, curve.y, where="post", color=colour, linewidth=1.3, **line)
    if curve.low is not None and curve.high is not None:
        axis.fill_between(
            curve.x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0, step="post"
        )


def draw_mixtures(study: Study, path: Path) -> Path:
    """Write the mixtures over time to a file."""
    sections = [section for section in study.sections if section.moving]
    require(
        sections,
        "nothing-to-do",
        "no run has source weights that change, so there is nothing to draw",
    )
    return save(mixture_panels(sections, source_colours(study)), path)


def mixture_panels(
    sections: Sequence[Section], colours: Mapping[tuple[str, ...], Mapping[str, int]]
) -> Figure:
    """Draw one row per task, with one panel per method with a changing mixture.

    A panel shows the stacked weights of the sources.
    """
    rows = [(section, section.moving) for section in sections]
    known = dict[tuple[str, int], None]()
    columns = max(len(moving) for _, moving in rows)
    figure = new_figure(min(2.4 * columns + 1.4, 12.0), 2.1 * len(rows) + 0.5)
    from matplotlib.patches import Patch

    panels = figure.subplots(len(rows), columns, squeeze=False, sharey=True)
    for row, (section, moving) in zip(panels, rows, strict=True):
        for axis in row[len(moving) :]:
            axis.set_visible(False)
        for axis, (label, mixture) in zip(row, moving.items(), strict=False):
            stack = areas(mixture, colours[mixture.sources])
            x = mixture.x
            axis.stackplot(
                x,
                [values for _, _, values in stack],
                colors=[LIGHT[colour] for _, colour, _ in stack],
                linewidth=0,
            )
            known |= dict.fromkeys((name, colour) for name, colour, _ in stack)
            axis.set_title(plain(label), fontsize=8)
            axis.set_xlabel(AXES[section.axis], fontsize=8)
            axis.set_xlim(x[0], x[-1] if x[-1] > x[0] else x[0] + 1)
            axis.set_ylim(0, 1)
            axis.tick_params(labelsize=7)
        row[0].set_ylabel(
            "weight" if len(rows) == 1 else f"{plain(section.title)}\nweight", fontsize=8
        )
    _legend(
        figure,
        [Patch(color=LIGHT[colour], label=plain(name)) for name, colour in known],
        fontsize=7,
    )
    return figure


def _legend(figure: Figure, handles: list[Any], **how: Any) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, **how)


def plain(name: str) -> str:
    """Escape a name, because matplotlib would set text between dollar signs as a formula."""
    return printable(name).replace("$", r"\$")


def new_figure(width: float, height: float) -> Figure:
    """Create a figure of this size in inches. Raises MissingExtra without matplotlib."""
    module = optional_module("matplotlib.figure", "the picture", "plot")
    return module.Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> Path:
    """Write the figure; the suffix determines the format."""
    write_file(path, encoded(figure, path.suffix.casefold().removeprefix(".")))
    return path


def as_source(figure: Figure) -> str:
    """Return the figure as the source of an image in a page, without a file."""
    return "data:image/svg+xml;base64," + base64.b64encode(encoded(figure, "svg")).decode()


def encoded(figure: Figure, kind: str) -> bytes:
    """Return the figure in a format of matplotlib.

    The same figure gives the same bytes, and text remains text.
    """
    import matplotlib

    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "hgms", "pdf.fonttype": 42}
    # axes of numbers near the largest double overflow
    with matplotlib.rc_context(settings), np.errstate(over="ignore", invalid="ignore"):
        stream = io.BytesIO()
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        figure.savefig(stream, format=kind, dpi=200, metadata=undated)
    return stream.getvalue()
