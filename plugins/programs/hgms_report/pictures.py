"""Pictures of runs: metric against seconds and against oracle calls, and what happens to the weights. Needs ``hgms[plot]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hgms_core import MissingExtra
from hgms_results import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs = Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]
"""Records by method: ``runs[method][seed]`` is the list of a run's rows."""

# Okabe & Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours that people with any colour vision tell apart (Okabe and Ito 2008), in the order in which they are given out."""


def _figure(columns: int, width: float) -> tuple[Figure, list[Axes]]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtra("pictures need matplotlib\n  install it with: pip install 'hgms[plot]'") from None
    figure = Figure(figsize=(width * columns, 3.6), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0].tolist()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, axes


def _save(figure: Figure, path: Path) -> list[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_suffix(".png"), path.with_suffix(".svg")]
    for target in written:
        figure.savefig(target, dpi=160)
    return written


def _curve(run: Sequence[Mapping[str, Any]], x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    rows = [row for row in run if row.get(y) is not None]
    return np.array([float(row.get(x) or 0.0) for row in rows]), np.array([float(row[y]) for row in rows])


def _band(runs: Sequence[Sequence[Mapping[str, Any]]], x: str, y: str) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Mean and 95 % half-width over the seeds on a common grid; each run is a step function of what it has reported so far."""
    curves = [curve for curve in (_curve(run, x, y) for run in runs) if curve[0].size]
    if not curves:
        return None
    grid = np.linspace(0.0, max(float(xs[-1]) for xs, _ in curves), 200)
    held = np.stack([ys[np.searchsorted(xs, grid, side="right").clip(1, len(xs)) - 1] for xs, ys in curves])
    intervals = [Interval.of(column.tolist()) for column in held.T]
    return grid, held.mean(0), np.nan_to_num(np.array([each.half_width for each in intervals]))


def draw_accuracy(runs: Runs, path: Path, metric: str = "metric.test_accuracy", label: str = "test accuracy (%)") -> list[Path]:
    """The metric against seconds and against oracle calls: mean over seeds with its 95 % interval. Writes PNG and SVG."""
    figure, axes = _figure(2, 4.6)
    shown: list[float] = []
    for axis, x, name in ((axes[0], "seconds", "seconds (without evaluation)"), (axes[1], "oracle_calls", "oracle calls")):
        for colour, (method, seeds) in zip(COLOURS * 3, runs.items(), strict=False):
            band = _band(seeds, x, metric)
            if band is None:
                continue
            grid, mean, half = band
            shown += [*(100 * mean)]
            axis.plot(grid, 100 * mean, color=colour, label=method, linewidth=1.8)
            low, high = (100 * np.clip(mean + side * half, 0, 1) for side in (-1, 1))
            axis.fill_between(grid, low, high, color=colour, alpha=0.18, linewidth=0)
        axis.set_xlabel(name)
    if shown:
        # The axis follows the curves: with few seeds an early band can be wider than any share can be.
        for axis in axes:
            axis.set_ylim(max(0.0, min(shown) - 4), min(100.0, max(shown) + 4))
    axes[0].set_ylabel(label)
    if axes[0].get_lines():
        axes[0].legend(frameon=False, fontsize=9)
    return _save(figure, path)


def draw_weights(runs: Runs, path: Path) -> list[Path]:
    """Weights of clean and of corrupted examples over outer time, one panel a method: median, and the middle 80 %.

    Methods whose records hold no such weights are left out; nothing is written if none does.
    """
    shown = {
        method: seeds
        for method, seeds in runs.items()
        if any(row.get("metric.weight_clean_q50") is not None for row in seeds[0])
    }
    if not shown:
        return []
    figure, axes = _figure(len(shown), 3.4)
    for axis, (method, seeds) in zip(axes, shown.items(), strict=True):
        for colour, kind in ((COLOURS[0], "clean"), (COLOURS[1], "corrupted")):
            xs, median = _curve(seeds[0], "seconds", f"metric.weight_{kind}_q50")
            low, high = (_curve(seeds[0], "seconds", f"metric.weight_{kind}_{q}")[1] for q in ("q10", "q90"))
            axis.plot(xs, median, color=colour, label=f"{kind} labels", linewidth=1.8)
            axis.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)
        axis.set_title(method, fontsize=10)
        axis.set_xlabel("seconds")
        axis.set_ylim(-0.02, 1.02)
    axes[0].set_ylabel("weight (median, middle 80 %)")
    axes[0].legend(frameon=False, fontsize=9)
    return _save(figure, path)
