"""The picture of `hgms cycles --plot`. Only this module needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hgms.report import COLOURS
from hgms_core import ConfigError
from hgms_core.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hgms_cyclical.command import Group

FORMATS = (".png", ".svg", ".pdf")


# start: extra
def bars(groups: Sequence[Group]) -> Figure:
    """Draw one bar per cycle and method: the share of outer steps that each cycle won.

    Raises MissingExtra without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtra(
            "missing-package",
            "the picture requires matplotlib",
            place=("--plot",),
            install="pip install 'hgms-cyclical[plot]'",
        ) from None
    # end: extra
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / len(groups)
    for number, group in enumerate(groups):
        places = [
            cycle + (number - (len(groups) - 1) / 2) * width for cycle in range(1, group.cycles + 1)
        ]
        runs = f"{len(group.runs)} run{'s' * (len(group.runs) > 1)}"
        heights = [100 * (share or 0.0) for share in group.shares]
        colour = COLOURS[number % len(COLOURS)]
        axis.bar(
            places, heights, width, label=f"{group.method} on {group.task} ({runs})", color=colour
        )
    axis.set_xticks(range(1, max(group.cycles for group in groups) + 1))
    axis.set_xlabel("cycle whose candidate was selected")
    axis.set_ylabel("share of outer steps (%)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    return figure


def draw(groups: Sequence[Group], path: Path) -> None:
    """Write the bars. Raises ConfigError for a file type outside FORMATS."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(
            "unknown-suffix",
            f"the file name {path} must end in {', '.join(FORMATS)}",
            place=("--plot",),
        )
    figure = bars(groups)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
