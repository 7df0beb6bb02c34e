"""The picture of a tuning: held-out losses with standard errors, and the learned values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hgms.report import new_figure

if TYPE_CHECKING:
    from hgms.tuning.result import TuneResult


def draw(result: TuneResult) -> Any:
    """Return a matplotlib figure."""
    count = len(result.values)
    rows = len(result.table)
    figure = new_figure(5.5 + 3 * count, max(3.0, 0.4 * rows + 1))
    axes = figure.subplots(1, 1 + count, squeeze=False, width_ratios=[2, *[1] * count])[0]
    _losses(axes[0], result)
    for axis, (name, value) in zip(axes[1:], result.values.items(), strict=True):
        numbers = value.detach().flatten().tolist()
        axis.set_title(name)
        if len(numbers) > 20:
            axis.hist(numbers, bins=30, color="tab:blue")
            axis.set_ylabel("entries")
        else:
            axis.bar(range(len(numbers)), numbers, color="tab:blue")
        start = result.starts[name].detach().double().mean()
        line = axis.axvline if len(numbers) > 20 else axis.axhline
        line(float(start), color="tab:gray", linestyle="--", label="start")
        axis.legend()
    return figure


def _losses(axis: Any, result: TuneResult) -> None:
    table = result.table[::-1]
    colours = ["tab:gray" if row.is_baseline else "tab:blue" for row in table]
    places = range(len(table))
    losses = [row.loss for row in table]
    axis.barh(places, losses, xerr=[row.error for row in table], color=colours, capsize=3)
    names = [f"{row.name} ←" if row.name == result.selected else row.name for row in table]
    axis.set_yticks(places, names)
    axis.set_xlabel("held-out loss ± standard error of the difference")
