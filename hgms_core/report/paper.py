"""Pictures for papers: the metric against seconds and against oracle calls, as PNG, SVG or PDF. Needs ``hgms[plot]``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hgms_core.compare import is_share
from hgms_core.errors import MissingExtra
from hgms_core.report.figures import DASHES, LIGHT, _range, styles
from hgms_core.report.study import Study
from hgms_core.report.tables import heading

SUFFIXES = (".svg", ".pdf", ".png")
_AXES = {"seconds": "seconds (without evaluation)", "oracle_calls": "oracle calls"}
_LINES = dict(zip(DASHES, ("-", "--", ":", "-.", (0, (9, 3))), strict=True))


def draw(study: Study, path: Path) -> Path:
    """One row of two panels for each task: mean over seeds, with a band where there are several. Colours as in the report."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtra("pictures need matplotlib\n  install it with: pip install 'hgms[plot]'") from None
    style = styles(study)
    count = len(study.sections)
    figure = Figure(figsize=(7.0, 2.6 * count + 0.5), layout="constrained")
    panels = figure.subplots(count, len(_AXES), squeeze=False)
    for row, section in zip(panels, study.sections, strict=True):
        for axis, (name, label) in zip(row, _AXES.items(), strict=True):
            factor = 100 if is_share(section.metric) else 1
            curves = {method: curve.scaled(factor) for method, curve in section.curves[name][section.metric].items()}
            for method, curve in curves.items():
                look = style[method]
                colour = LIGHT[look["colour"]]
                axis.step(
                    curve.x, curve.y, where="post", color=colour, linestyle=_LINES[look["dash"]], linewidth=1.3, label=method
                )
                if curve.low is not None and curve.high is not None:
                    axis.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0, step="post")
            zoom = _range(curves, share=is_share(section.metric)) if curves else None
            if zoom is not None and np.isfinite(zoom).all():
                axis.set_ylim(*zoom)
            axis.set_xlim(left=0)
            axis.set_xlabel(label, fontsize=8)
            axis.tick_params(labelsize=7)
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25, linewidth=0.5)
        row[0].set_ylabel(heading(section.metric), fontsize=8)
        if count > 1:
            row[0].set_title(section.title, fontsize=9, loc="left")
    handles = {label: handle for axis in panels.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if handles:
        ordered = sorted(handles)
        figure.legend(
            [handles[label] for label in ordered], ordered, loc="outside lower center", ncols=4, frameon=False, fontsize=8
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # text stays text, and the same study gives the same bytes
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hgms", "pdf.fonttype": 42}):
        dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.casefold())
        figure.savefig(path, dpi=200, metadata=dated)
    return path


__all__ = ["SUFFIXES", "draw"]
