"""The critical-difference diagram: mean ranks on one axis.

Bars join the methods that the ranks do not distinguish.
"""

from __future__ import annotations

from pathlib import Path

from hgms.report.figures import styles
from hgms.report.paper import COLUMNS, new_figure, plain, save
from hgms.report.study import Study
from hgms.results import LIGHT
from hgms_core import ConfigError


def draw_ranks(study: Study, path: Path) -> Path:
    """Write the diagram to a file.

    Errors: ConfigError with the reason if there is no result to show; MissingExtra without
    matplotlib.

    Source: Demšar (2006), figure 1.
    """
    ranks = study.ranks
    style = styles(study)
    if ranks is None:
        raise ConfigError(
            "too-few-runs",
            "mean ranks require three methods with runs of a common seed, and a metric with a "
            "known better direction",
        )
    if not ranks.says_something:
        raise ConfigError(
            "too-few-runs",
            f"{ranks.blocks} pairs of a task and a seed are too few to rank {len(ranks.means)} "
            "methods",
            hint=f"add runs, up to at least {ranks.fewest_blocks} pairs of a task and a seed",
        )
    count = len(ranks.means)
    half = (len(ranks.means) + 1) // 2
    groups = ranks.groups
    bars = 0.35 * len(groups)
    edge = 0.06 * (count - 1)
    figure = new_figure(COLUMNS, 0.9 + 0.1 * len(groups) + 0.2 * half)
    axis = figure.subplots()
    axis.axis("off")
    ticks = range(1, count + 1)
    axis.plot([1, count], [0, 0], color="black", linewidth=1)
    axis.vlines(ticks, -0.15, 0, color="black", linewidth=1)
    for tick in ticks:
        axis.text(tick, -0.25, str(tick), fontsize=7, ha="center", va="bottom")
    for number, (label, rank) in enumerate(ranks.means.items()):
        left = number < half  # better half: from the axis down; other half: from below up
        below = bars + 0.6 + 0.55 * (number if left else count - 1 - number)
        end = 1 - edge if left else count + edge
        axis.plot(
            [rank, rank, end], [0, below, below], color=LIGHT[style[label].colour], linewidth=1
        )
        name = f"{plain(label)}  {rank:.2f} " if left else f" {rank:.2f}  {plain(label)}"
        axis.text(end, below, name, fontsize=8, ha="right" if left else "left", va="center")
    for number, group in enumerate(groups):
        ends = [ranks.means[group[0]] - edge / 3, ranks.means[group[-1]] + edge / 3]
        axis.plot(
            ends, [0.35 * (number + 1)] * 2, color="black", linewidth=3, solid_capstyle="butt"
        )
    axis.errorbar(
        1 + ranks.critical / 2, -1.1, xerr=ranks.critical / 2, color="black", capsize=3, linewidth=1
    )
    words = f"critical difference {ranks.critical:.2f}"
    axis.text(1 + ranks.critical / 2, -1.25, words, fontsize=7, ha="center", va="bottom")
    axis.set_xlim(1 - 0.45 * (count - 1), count + 0.45 * (count - 1))
    axis.set_ylim(bars + 0.8 + 0.55 * (half - 1) + 0.2, -1.8)
    return save(figure, path)
