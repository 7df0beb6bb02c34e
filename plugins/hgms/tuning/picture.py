"""The picture of a tuning, and its web page: held-out losses with errors, and learned values."""

from __future__ import annotations

import html
import io
from typing import TYPE_CHECKING, Any

from hgms.report import new_figure, shown_in_notebook

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
    return shown_in_notebook(figure)


def _losses(axis: Any, result: TuneResult) -> None:
    table = result.table[::-1]
    colours = ["tab:gray" if row.is_baseline else "tab:blue" for row in table]
    places = range(len(table))
    losses = [row.loss for row in table]
    axis.barh(places, losses, xerr=[row.error for row in table], color=colours, capsize=3)
    names = [f"{row.name} ←" if row.name == result.selected else row.name for row in table]
    axis.set_yticks(places, names)
    axis.set_xlabel("held-out loss ± standard error of the difference")


STYLE = """
body { font-family: system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; }
th, td { padding: 0.3rem 0.8rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
tr.selected { font-weight: bold; }
svg { max-width: 100%; height: auto; }
"""


def page(result: TuneResult) -> str:
    """Return the web page of a result; it refers to no other file."""
    buffer = io.StringIO()
    draw(result).savefig(buffer, format="svg")
    picture = buffer.getvalue()
    picture = picture[picture.index("<svg") :]
    rows = "".join(
        f"<tr{' class=selected' if row.name == result.selected else ''}>"
        f"<td>{html.escape(row.name)}</td><td>{'baseline' if row.is_baseline else 'learned'}</td>"
        f"<td>{row.loss:.4f}</td><td>{row.gain:+.4f} ± {row.error:.4f}</td></tr>"
        for row in result.table
    )
    warnings = "".join(f"<li>{html.escape(text)}</li>" for text in result.warnings)
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8><title>HGMS: tuning</title>"
        f"<style>{STYLE}</style></head><body>"
        f"<h1>Tuned by the {result.engine} engine</h1>"
        f"<p>Recommendation: {html.escape(result.recommendation)}.</p>"
        f"<ul>{warnings}</ul>{picture}"
        "<table><tr><th>candidate</th><th>kind</th><th>held-out loss</th>"
        f"<th>gain over the best baseline ± standard error</th></tr>{rows}</table>"
        f"<pre>{html.escape(str(result))}</pre></body></html>\n"
    )
