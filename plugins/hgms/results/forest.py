"""A forest plot: paired differences to a reference, with intervals.

A line marks zero. The plot is HTML without external resources. It is a table, so that screen
readers can read it and users can copy and print it. The middle column of the table contains the
picture. A report, and a comparison in a notebook, start with this plot.
"""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

from hgms.results.colours import EITHER, Look, looks
from hgms.results.statistics import Interval, spell

MINUS = "\N{MINUS SIGN}"

STYLE = """
table.hgms-forest.hgms-forest {
  table-layout: auto; border-collapse: collapse; width: 100%; max-width: 60rem; margin: 0;
}
.hgms-forest.hgms-forest tbody tr { background: none; }
.hgms-forest { font-size: .9rem; font-variant-numeric: tabular-nums; }
.hgms-forest caption {
  text-align: left; font-weight: 600; padding: .2rem 0; caption-side: top; color: inherit;
}
.hgms-forest caption span { font-weight: 400; opacity: .8; }
.hgms-forest :is(tr, th, td) {
  background: none; border: 0; text-align: left; padding: .15rem .5rem .15rem 0;
}
.hgms-forest th { font-weight: 500; width: 1%; white-space: nowrap; }
.hgms-forest td.n { text-align: right; white-space: nowrap; width: 1%; padding-right: 0; }
.hgms-forest .won > * { font-weight: 700; }
.hgms-forest.hgms-forest tr.apart > * { border-top: 1px dotted; }
.hgms-forest .track { position: relative; height: 1.5em; min-width: 7rem; }
.hgms-forest .track > * { position: absolute; top: 50%; }
.hgms-forest .zero { top: 0; bottom: 0; border-left: 1px dashed currentColor; opacity: .55; }
.hgms-forest .bar { height: 3px; margin-top: -1.5px; border-radius: 2px; background: var(--c); }
.hgms-forest .dot {
  width: 10px; height: 10px; margin: -5px 0 0 -5px; border-radius: 50%; background: var(--c);
}
.hgms-forest .won .dot { border-radius: 0; transform: rotate(45deg); }
.hgms-forest .base .dot { background: none; border: 2px solid var(--c); box-sizing: border-box; }
.hgms-forest .beyond {
  color: var(--c); transform: translate(-50%, -50%); line-height: 1; font-size: .8em;
}
.hgms-forest .axis {
  border-top: 1px solid currentColor; height: 1.4em; font-size: .78rem; opacity: .8;
}
.hgms-forest .axis span { transform: translateX(-50%); top: .15em; white-space: nowrap; }
.hgms-forest .key { display: inline-block; width: .7em; height: .7em; margin-right: .4em; }
.hgms-forest .key { border-radius: 50%; background: var(--c); }
"""
"""Styles that a page with forest plots needs once, except the colours ``--c0`` …, which the page
sets.
"""


_WIDE = """
.hgms .wide { overflow-x: auto; }
.hgms .wide table { margin: .3rem 0; }
.hgms .wide :is(th, td) { white-space: nowrap; text-align: left; }
.hgms .wide tr.group > td { border-top: 1px solid currentColor; }"""


def notebook_html(body: str) -> str:
    """Return HTML for the last line of a notebook cell.

    Its colours are visible in a light and in a dark notebook.
    """
    colours = " ".join(f"--c{number}: {colour};" for number, colour in enumerate(EITHER))
    return f'<div class="hgms"><style>.hgms {{ {colours} }} {_WIDE}{STYLE}</style>{body}</div>'


@frozen(kw_only=True)
class Forest:
    """The differences of methods to a reference in one metric on one task.

    Each difference is method − ``reference``. The differences are in display order.

    ``excluded`` contains the excluded methods with their reasons. ``higher`` states whether larger
    values are better (``None``: unknown). ``references`` are the methods that a line separates from
    the methods before them.
    """

    title: str
    metric: str
    share: bool
    higher: bool | None
    reference: str
    differences: Mapping[str, Interval | None]
    winner: str | None
    excluded: Mapping[str, str]
    references: Sequence[str] = ()

    @property
    def limits(self) -> tuple[float, float]:
        """Return the ends of the axis.

        The axis contains zero. A single method that is five times as far from zero as the other
        methods does not determine the ends.
        """
        shown = [
            pair
            for pair in self.differences.values()
            if pair is not None and math.isfinite(pair.mean + pair.reach)
        ]
        reach = [abs(pair.mean) + pair.reach for pair in shown]
        if not reach or max(reach) == 0:
            return -1.0, 1.0
        most = (
            min(max(reach), 5 * statistics.median(reach) or math.inf)
            if len(reach) > 2
            else max(reach)
        )
        low = max(min([0.0, *(pair.mean - pair.reach for pair in shown)]), -most)
        high = min(max([0.0, *(pair.mean + pair.reach for pair in shown)]), most)
        room = 0.06 * (high - low)
        return low - room, high + room

    @property
    def ticks(self) -> list[float]:
        """Return three to seven round numbers between the limits."""
        low, high = self.limits
        raw = (high - low) / 6
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
        return [
            number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)
        ]

    @property
    def caption(self) -> str:
        """Describe the plot in one line."""
        unit = " (percentage points)" if self.share else ""
        better = {True: ", better to the right", False: ", better to the left", None: ""}[
            self.higher
        ]
        return f"{self.metric}{unit}, difference to {self.reference}{better}"

    def spell(self, label: str) -> str:
        """Return the text next to a method's interval."""
        pair = self.differences[label]
        if pair is None:
            return "reference"
        if not pair.count:
            return "no seed in common"
        text = spell(pair, share=self.share, signed=True)
        return MINUS + text[1:] if text.startswith("-") else text

    def html(self, styles: Mapping[str, Look] | None = None) -> str:
        """Return the plot as a table; ``styles`` are the looks of all methods of the page."""
        styles = styles or looks(self.differences)
        low, high = self.limits

        def at(value: float) -> str:
            return f"{100 * (value - low) / (high - low):.2f}%"

        zero = f'<i class="zero" style="left: {at(0)}"></i>'
        rows: list[str] = []
        apart = next((label for label in self.differences if label in self.references), None)
        for label, pair in self.differences.items():
            mark = _mark(pair, low, high, at)
            kinds = ["base"] if pair is None else ["won"] if label == self.winner else []
            kinds += ["apart"] if label == apart and rows else []
            kind = f' class="{" ".join(kinds)}"' if kinds else ""
            name = html.escape(label) + (" ★" if label == self.winner else "")
            rows.append(
                f'<tr{kind} style="--c: var(--c{styles[label].colour})"><th scope="row"><i '
                f'class="key"></i>{name}</th><td class="track">{zero}{mark}</td><td '
                f'class="n">{html.escape(self.spell(label))}</td></tr>'
            )
        for label, why in self.excluded.items():
            rows.append(
                f'<tr><th scope="row">{html.escape(label)}</th><td '
                f'colspan="2">{html.escape(why)}</td></tr>'
            )
        scale = 100 if self.share else 1
        ticks = "".join(
            f'<span style="left: {at(tick)}">{_plain(tick * scale)}</span>' for tick in self.ticks
        )
        title = f"{html.escape(self.title)} <span>{html.escape(self.caption)}</span>"
        axis = (
            f'<tr aria-hidden="true"><th></th><td class="track axis">{ticks}</td><td '
            'class="n"></td></tr>'
        )
        body = "".join(rows)
        head = f'<table class="hgms-forest"><caption>{title}</caption>'
        return f"{head}<tbody>{body}{axis}</tbody></table>"


def _mark(pair: Interval | None, low: float, high: float, at: Callable[[float], str]) -> str:
    """Return the dot and the bar of a row, with an arrow for a part beyond the axis."""
    mean = 0.0 if pair is None else pair.mean
    if not math.isfinite(mean):
        return ""
    half = 0.0 if pair is None else pair.reach
    left = max(mean - half, low)
    right = min(mean + half, high)
    parts = []
    if half and left < right:
        parts.append(
            f'<i class="bar" style="left: {at(left)}; right: calc(100% - {at(right)})"></i>'
        )
    if mean - half < low:
        parts.append('<i class="beyond" style="left: 0">◀</i>')
    if mean + half > high:
        parts.append('<i class="beyond" style="left: 100%">▶</i>')
    if low <= mean <= high:
        parts.append(f'<i class="dot" style="left: {at(mean)}"></i>')
    return "".join(parts)


def _plain(value: float) -> str:
    text = f"{value:.4g}" if abs(value) > 1e-12 else "0"
    return MINUS + text[1:] if text.startswith("-") else text
