"""A forest plot: paired differences to a reference, with intervals, as values.

:mod:`hgms.report` draws it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from attrs import frozen

from hgms.results.statistics import Interval, spell

MINUS = "\N{MINUS SIGN}"


@frozen(kw_only=True)
class Forest:
    """The differences of methods to a reference in one metric on one task.

    Each difference is method − ``reference``. The differences are in display order.
    ``higher`` states whether larger values are better (``None``: unknown).
    """

    title: str
    metric: str
    share: bool
    higher: bool | None
    reference: str
    differences: Mapping[str, Interval | None]
    winner: str | None

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
