"""What happens to the weights of clean and of mislabelled examples, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hgms.report import COLOURS, Curve, draw_band, new_figure, save

FORMATS = (".png", ".svg")

Records = Sequence[Mapping[str, Any]]
"""The rows of a run."""


def draw_weights(runs: Mapping[str, Records], path: Path) -> list[Path]:
    """Weights of clean and of corrupted examples over time, one panel a method: median, and the
    middle 80 %.

    ``runs`` are the rows of one run of each method. Methods whose rows hold no such weights, or
    whose weights never change, are excluded; nothing is written if none is left.
    """
    curves = {
        method: {kind: _quantiles(rows, kind) for kind in ("clean", "corrupted")}
        for method, rows in runs.items()
    }
    panels = {
        method: kinds
        for method, kinds in curves.items()
        if any(np.ptp(kind.y) > 0 for kind in kinds.values() if kind.x.size)
    }
    if not panels:
        return []
    figure = new_figure(3.4 * len(panels), 3.6)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (method, kinds) in zip(axes, panels.items(), strict=True):
        for colour, (kind, curve) in zip(COLOURS, kinds.items(), strict=False):
            draw_band(axis, curve, colour, label=f"{kind} labels")
        axis.set_title(method, fontsize=10)
        axis.set_xlabel("seconds")
        axis.set_ylim(-0.02, 1.02)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("weight (median, middle 80 %)")
    axes[0].legend(frameon=False, fontsize=9)
    return [save(figure, path.with_suffix(suffix)) for suffix in FORMATS]


def _quantiles(rows: Records, kind: str) -> Curve:
    names = ["seconds", *(f"metric.weight_{kind}_{quantile}" for quantile in ("q10", "q50", "q90"))]
    known = [[float(row[name]) for name in names] for row in rows if row.get(names[2]) is not None]
    x, low, median, high = np.array(known).reshape(-1, 4).T
    return Curve(x, median, low, high)


__all__ = ["FORMATS", "draw_weights"]
