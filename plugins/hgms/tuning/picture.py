"""The picture of a tuning, and its web page: held-out losses with errors, and learned values."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hgms.report import new_figure, shown_in_notebook
from hgms.tuning.candidate import Judgement


def draw(
    table: Sequence[Judgement],
    selected: str,
    values: Mapping[str, Tensor],
    starts: Mapping[str, Tensor],
) -> Any:
    """Return a matplotlib figure."""
    count = len(values)
    rows = len(table)
    figure = new_figure(5.5 + 3 * count, max(3.0, 0.4 * rows + 1))
    axes = figure.subplots(1, 1 + count, squeeze=False, width_ratios=[2, *[1] * count])[0]
    _losses(axes[0], table[::-1], selected)
    for axis, (name, value) in zip(axes[1:], values.items(), strict=True):
        numbers = value.detach().flatten().tolist()
        axis.set_title(name)
        if len(numbers) > 20:
            axis.hist(numbers, bins=30, color="tab:blue")
            axis.set_ylabel("entries")
        else:
            axis.bar(range(len(numbers)), numbers, color="tab:blue")
        start = starts[name].detach().double().mean()
        line = axis.axvline if len(numbers) > 20 else axis.axhline
        line(float(start), color="tab:gray", linestyle="--", label="start")
        axis.legend()
    return shown_in_notebook(figure)


def _losses(axis: Any, table: Sequence[Judgement], selected: str) -> None:
    colours = ["tab:gray" if row.is_baseline else "tab:blue" for row in table]
    places = range(len(table))
    losses = [row.loss for row in table]
    axis.barh(places, losses, xerr=[row.error for row in table], color=colours, capsize=3)
    names = [f"{row.name} ←" if row.name == selected else row.name for row in table]
    axis.set_yticks(places, names)
    axis.set_xlabel("held-out loss ± standard error of the difference")


STYLE = """
body { font-family: system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; }
th, td { padding: 0.3rem 0.8rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
"""


def page(figure: Any, text: str) -> str:
    """Return a web page with the text and the picture; it refers to no other file."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    picture = buffer.getvalue()
    picture = picture[picture.index("<svg") :]
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8><title>HGMS: tuning</title>"
        f"<style>{STYLE}</style></head><body>"
        f"<h1>Tuned hyperparameters</h1><pre>{html.escape(text)}</pre>{picture}"
        "</body></html>\n"
    )
