"""The picture of a surface: a profile per source, which shows the effect of its weight.

Needs `hgms[plot]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hgms.report import COLOURS, new_figure, save
from hgms_mix.surface.learn import TARGET, Findings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREY = "#3D3D3D"
FINE = 40
"""Steps of a profile."""
WIDE = 4
"""Profiles in a row."""


def draw(findings: Findings, path: Path) -> Path:
    """Draw the profiles of the target, with the region and the recommended mixture."""
    sources = findings.runs.sources
    label = next(iter(findings.targets)) if len(findings.targets) == 1 else TARGET
    rows = -(-len(sources) // WIDE)
    columns = min(len(sources), WIDE)
    figure = new_figure(3.1 * columns, 2.9 * rows)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axis in panels.flat[len(sources) :]:
        axis.set_visible(False)
    for number, axis in zip(range(len(sources)), panels.flat, strict=False):
        _draw_profile(axis, findings, number)
    panels.flat[0].legend(frameon=False, fontsize=7, loc="upper right")
    for row in panels:
        row[0].set_ylabel(label, fontsize=9)
    return save(figure, path)


def profile(findings: Findings, source: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return weights of ``source``, and the surface's mean and standard deviation there.

    The weights are from 0 to 1. The other sources share the rest as in the recommended mixture
    (evenly if they have no weight there).
    """
    share = np.linspace(0, 1, FINE + 1)
    others = findings.recommendation.weights.copy()
    others[source] = 0
    if others.sum() < 1e-9:
        others[:] = 1
        others[source] = 0
    mixtures = (1 - share)[:, None] * (others / others.sum())
    mixtures[:, source] = share
    mean, covariance = findings.surface.posterior(mixtures)
    return share, mean, np.sqrt(np.maximum(np.diag(covariance), 0))


def _draw_profile(axis: Axes, findings: Findings, number: int) -> None:
    """Draw the surface along the weight of one source, with its 95 % band and region."""
    colour = COLOURS[number % len(COLOURS)]
    low, high = findings.recommendation.region[number]
    axis.axvspan(low, high, color=GREY, alpha=0.08, linewidth=0, label="best mixture, 95 %")
    prior = float(findings.prior[number])
    axis.axvline(prior, color=GREY, linewidth=0.8, linestyle=":", label=findings.prior_name)
    share, mean, deviation = profile(findings, number)
    band = 1.96 * deviation
    axis.fill_between(share, mean - band, mean + band, color=colour, alpha=0.15, linewidth=0)
    axis.plot(share, mean, color=colour, linewidth=1.6)
    weight = float(findings.recommendation.weights[number])
    at = np.interp(weight, share, mean)
    axis.plot([weight], [at], "*", color=colour, markersize=11, markeredgecolor="white")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.set_xlim(-0.02, 1.02)
    axis.set_xlabel(f"weight of {findings.runs.sources[number]}", fontsize=9)
