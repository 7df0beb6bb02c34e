"""Pictures of mixes: the mixture over time, and the test loss against uniform.

They need ``hgms[plot]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hgms.report import COLOURS, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = ("-", "--", ":", "-.")
PREFIX = "weight."

Records = Sequence[Mapping[str, Any]]


def _panels(columns: int) -> tuple[Figure, list[Axes]]:
    figure = new_figure(5.4 * columns, 3.6)
    axes: list[Axes] = figure.subplots(1, columns, squeeze=False)[0].tolist()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, axes


def _weights(axis: Axes, runs: Sequence[Records]) -> None:
    """Draw the weight of each source over outer steps, one line per run.

    Only the first run has labels.
    """
    for number, run in enumerate(runs):
        names = [key for key in run[-1] if key.startswith(PREFIX)]
        for i, key in enumerate(names):
            rows = [row for row in run if row.get(key) is not None]
            axis.plot(
                [row["step"] for row in rows],
                [row[key] for row in rows],
                color=COLOURS[i % len(COLOURS)],
                linestyle=STYLES[i // len(COLOURS) % len(STYLES)],
                linewidth=1.6 if number == 0 else 0.8,
                alpha=1.0 if number == 0 else 0.5,
                label=key.removeprefix(PREFIX) if number == 0 else None,
            )
    axis.set_xlabel("outer step")
    axis.set_ylabel("weight of the source")
    axis.set_ylim(-0.02, 1.02)
    axis.legend(frameon=False, fontsize=8, ncols=1 + (len(axis.get_lines()) > 9))


def mixture(records: Records, path: Path) -> Path:
    """Draw the mixture over time of one run."""
    figure, (axis,) = _panels(1)
    _weights(axis, [records])
    figure.savefig(path, dpi=160)
    return path


def against_uniform(
    runs: Sequence[Records], losses: Mapping[str, Sequence[float]], path: Path
) -> Path:
    """Draw the mixture over time (left) and each method's test losses (right).

    Left: one line per seed. Right: one point per seed, with the mean.
    """
    figure, (left, right) = _panels(2)
    _weights(left, runs)
    for i, values in enumerate(losses.values()):
        colour = COLOURS[i % len(COLOURS)]
        right.scatter([i] * len(values), values, color=colour, alpha=0.7, s=28)
        mean = sum(values) / len(values)
        right.hlines(mean, i - 0.2, i + 0.2, color=colour, linewidth=2)
        right.annotate(f"{mean:.3f}", (i + 0.22, mean), va="center", fontsize=9)
    right.set_xticks(range(len(losses)), list(losses))
    right.set_xlim(-0.6, len(losses) - 0.2)
    right.set_ylabel("test loss (nats per token)")
    figure.savefig(path, dpi=160)
    return path
