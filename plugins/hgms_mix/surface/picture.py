"""The picture of a surface: a triangle for three sources, and a profile per source.

A profile shows the effect of a source's weight. Needs `hgms[plot]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hgms.report import COLOURS, new_figure, save
from hgms_mix.surface.learn import TARGET, Findings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, np.sqrt(3) / 2]])
"""Positions of the sources in the triangle."""
FINE = 40
"""Mixtures along a side of the triangle, and points of a profile."""
WIDE = 4
"""Profiles in a row."""


def draw(findings: Findings, path: Path) -> Path:
    """Draw the surface of the target, its region, the recommended mixture, and the profiles."""
    sources = findings.runs.sources
    label = next(iter(findings.targets)) if len(findings.targets) == 1 else TARGET
    if len(sources) == 3:
        figure = new_figure(10.5, 4.4)
        left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
        _triangle(left, findings, label)
        _together(right, findings, label)
    else:
        rows = -(-len(sources) // WIDE)
        columns = min(len(sources), WIDE)
        figure = new_figure(3.1 * columns, 2.9 * rows)
        panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axis in panels.flat[len(sources) :]:
            axis.set_visible(False)
        for number, axis in zip(range(len(sources)), panels.flat, strict=False):
            _alone(axis, findings, number)
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
    surface = findings.surface
    return share, surface.mean(mixtures), surface.deviation(mixtures)


def _band(axis: Axes, findings: Findings, source: int, colour: str, **style: Any) -> None:
    share, mean, deviation = profile(findings, source)
    axis.fill_between(
        share,
        mean - 1.96 * deviation,
        mean + 1.96 * deviation,
        color=colour,
        alpha=0.15,
        linewidth=0,
    )
    axis.plot(share, mean, color=colour, linewidth=1.6, **style)
    weight = float(findings.recommendation.weights[source])
    axis.plot(
        [weight],
        [np.interp(weight, share, mean)],
        "*",
        color=colour,
        markersize=11,
        markeredgecolor="white",
    )


def _together(axis: Axes, findings: Findings, label: str) -> None:
    for number, name in enumerate(findings.runs.sources):
        _band(axis, findings, number, COLOURS[number % len(COLOURS)], label=name)
    _plain(axis)
    axis.set_xlabel("weight of the source, the others in proportion")
    axis.set_ylabel(label)
    axis.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def _alone(axis: Axes, findings: Findings, number: int) -> None:
    colour = COLOURS[number % len(COLOURS)]
    low, high = findings.recommendation.region[number]
    axis.axvspan(low, high, color="#3D3D3D", alpha=0.08, linewidth=0, label="best mixture, 95 %")
    axis.axvline(
        float(findings.prior[number]),
        color="#3D3D3D",
        linewidth=0.8,
        linestyle=":",
        label=findings.prior_name,
    )
    _band(axis, findings, number, colour)
    _plain(axis)
    axis.set_xlabel(f"weight of {findings.runs.sources[number]}", fontsize=9)


def _plain(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.set_xlim(-0.02, 1.02)


def _triangle(axis: Axes, findings: Findings, label: str) -> None:
    """Draw the triangle.

    Colours: the surface's mean. Small dots: minimisers of functions drawn from the surface.
    """
    surface = findings.surface
    recommendation = findings.recommendation
    grid = (
        np.array([[i, j, FINE - i - j] for i in range(FINE + 1) for j in range(FINE + 1 - i)])
        / FINE
    )
    places = grid @ CORNERS
    shades = axis.tricontourf(
        places[:, 0], places[:, 1], surface.mean(grid), levels=14, cmap="viridis_r"
    )
    axis.figure.colorbar(shades, ax=axis, shrink=0.75, label=label)
    axis.plot(*CORNERS[[0, 1, 2, 0]].T, color="#3D3D3D", linewidth=1)
    region = recommendation.minimisers @ CORNERS
    # makes draws at the same mixture visible
    jitter = np.random.default_rng(0).normal(scale=0.006, size=region.shape)
    cloud = region + jitter
    axis.scatter(
        cloud[:, 0],
        cloud[:, 1],
        s=5,
        color="white",
        alpha=0.35,
        linewidth=0,
        label="where the minimum may be",
    )
    tried = surface.mixtures @ CORNERS
    size = 14 + 8 * surface.counts
    axis.scatter(
        tried[:, 0],
        tried[:, 1],
        s=size,
        facecolor="none",
        edgecolor="black",
        linewidth=0.9,
        label="tried",
    )
    axis.plot(
        *(findings.prior @ CORNERS),
        "P",
        color="black",
        markersize=8,
        markeredgecolor="white",
        label=findings.prior_name,
    )
    axis.plot(
        *(recommendation.weights @ CORNERS),
        "*",
        color="#C94F00",
        markersize=15,
        markeredgecolor="white",
        label="recommended",
    )
    for name, corner, place in zip(
        findings.runs.sources, CORNERS, ("top", "top", "bottom"), strict=True
    ):
        away = (0, -7 if place == "top" else 6)
        axis.annotate(
            name,
            corner,
            xytext=away,
            textcoords="offset points",
            ha="center",
            va=place,
            fontsize=10,
        )
    axis.set_aspect("equal")
    axis.set_xlim(-0.12, 1.12)
    axis.set_ylim(-0.1, 0.97)
    axis.axis("off")
    legend = axis.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0.02),
        ncols=4,
        fontsize=8,
        facecolor="#D0D4DA",
        framealpha=1,
        edgecolor="none",
    )
    legend.set_zorder(5)
