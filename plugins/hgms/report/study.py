"""The content of a report, as values.

:mod:`hgms.report.compute` computes them; every format and every picture uses them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from attrs import evolve, field, frozen

from hgms.config import Budget
from hgms.config.tables import group_values
from hgms.report.curves import Curve
from hgms.report.mixture import Mixture
from hgms.results import Forest, Interval, Row, Skipped, StoredRun, Table, is_share, spell


def axis_of(budget: str) -> str:
    """Return the column of the unit of a budget."""
    limits = Budget.parse(budget)
    return "seconds" if limits.seconds else "step" if limits.outer_steps else "oracle_calls"


@frozen(kw_only=True)
class Entry:
    """One method's runs on one task.

    - ``row`` contains the statistics; its metrics are means over the seeds with a finite value.
    - ``nonfinite`` counts the other seeds by metric.
    - ``unjudged`` states whether the main metric gets no verdict. Examples are losses of an x that
      was not trained to the end, or of a θ that weights data sources.
    - ``curves`` are by axis (``seconds`` or ``oracle_calls``) and metric.
    """

    row: Row
    runs: list[StoredRun]
    failed: list[StoredRun]
    nonfinite: dict[str, int]
    unjudged: bool
    curves: Mapping[tuple[str, str], Curve]
    mixture: Mixture | None

    @property
    def label(self) -> str:
        return self.row.method

    def values(self, key: str) -> list[float]:
        """Return a number of every summary, if it is known.

        ``key`` is ``outer_steps``, ``oracle_calls``, or a field of ``cost``.
        """
        numbers = [
            run.summary.get(key, (run.summary.get("cost") or {}).get(key)) for run in self.runs
        ]
        return [float(value) for value in numbers if value is not None]


@frozen(kw_only=True)
class Section:
    """One task under one budget and version, with its methods.

    It also contains the differences between the methods.

    Methods are sorted by mean, best first; references follow.

    - ``name`` is the task's name. It does not contain the budget and version, which the titles of
      several sections contain.
    - ``compared`` contains the main metric and its statistics.
    - ``drawn`` are the metrics with curves.
    - ``directions`` states for every metric whether higher values are better.
    """

    title: str
    name: str
    compared: Table
    metrics: list[str]
    drawn: list[str]
    directions: Mapping[str, bool]
    entries: list[Entry]

    @property
    def metric(self) -> str:
        return self.compared.metric

    @property
    def version(self) -> str | None:
        return self.runs[0].task_version

    @property
    def budget(self) -> str:
        return self.runs[0].budget

    @property
    def axis(self) -> str:
        """The unit of the budget."""
        return axis_of(self.budget)

    @functools.cached_property
    def _values(self) -> dict[str, list[float]]:
        """The values of all runs by metric."""
        return group_values(item for run in self.runs for item in run.metrics.items())

    def is_share(self, metric: str) -> bool:
        """Return whether the metric is shown in percent."""
        return is_share(metric, self._values.get(metric, ()))

    @property
    def winner(self) -> str | None:
        return self.compared.winner

    @property
    def runs(self) -> list[StoredRun]:
        return [run for entry in self.entries for run in entry.runs + entry.failed]

    @property
    def forest(self) -> Forest | None:
        """The paired differences as a picture; ``None`` if there is nothing to compare."""
        return evolve(self.compared, task=self.title, percent=self.is_share(self.metric)).forest

    @property
    def mixtures(self) -> dict[str, Mixture]:
        """The mixtures of the methods that learn weights of sources, by label."""
        return {entry.label: entry.mixture for entry in self.entries if entry.mixture is not None}

    @property
    def moving(self) -> dict[str, Mixture]:
        """The mixtures that change, by label."""
        return {label: mixture for label, mixture in self.mixtures.items() if mixture.moves}

    def curves(self, axis: str, metric: str) -> dict[str, Curve]:
        """Return the curves by method; a share is in percent."""
        curves = {
            entry.label: entry.curves[axis, metric]
            for entry in self.entries
            if (axis, metric) in entry.curves
        }
        return (
            {label: curve.percent for label, curve in curves.items()}
            if self.is_share(metric)
            else curves
        )

    @property
    def verdict(self) -> str:
        """State in one sentence which method is best.

        The sentence also states whether chance explains the difference.

        If there is no verdict, the sentence states the reason.
        """
        if self.compared.unjudged:
            return f"No verdict: {self.compared.unjudged}."
        ranked = [
            entry
            for entry in self.entries
            if not math.isnan(entry.row.metrics[self.metric].mean)
            and not entry.unjudged
            and entry.row.role != "ceiling"
        ]
        if len(ranked) < 2 or self.compared.higher_is_better is None or ranked[0].row.role:
            return ""
        first = ranked[0].label
        rest = {entry.label: self.compared.pairs.get((first, entry.label)) for entry in ranked[1:]}
        known = {label: pair for label, pair in rest.items() if pair is not None and pair.count > 1}
        closest, pair = min(
            known.items(), key=lambda item: abs(item[1].mean), default=("", Interval.of([]))
        )
        share = self.is_share(self.metric)
        lead = (
            f"the closest is {closest}, at a difference of "
            f"{spell(pair, share=share, signed=True)}{' points' * share}"
        )
        if self.winner is not None:
            others = "every other method"
            if self.compared.floor:
                others += " and every floor"
            return f"{first} outperforms {others}; {lead}."
        best = f"{first} has the best mean"
        if self.compared.floor:
            best += " of the methods"
        sure = len(known) == len(rest)
        if ranked[0].row.ahead_of_floor is False and sure:
            return (
                f"{best}, and is not better than {self.compared.floor}, which does not learn θ: "
                "no gain is shown."
            )
        if not sure:
            return f"{best}; with fewer than two seeds in common nothing can be said about chance."
        unsure = [
            label
            for label, pair in known.items()
            if not pair.excludes_zero and not (pair.exact and pair.mean)
        ]
        if not unsure:
            why = (
                self.compared.few_seeds
                or "; ".join(ranked[0].row.notes)
                or "not all of its runs finished"
            )
            return f"{best}, but no winner is marked ({why}); {lead}."
        named = ", ".join(unsure[:3]) + (f" and {len(unsure) - 3} more" if len(unsure) > 3 else "")
        return f"{best}, but no winner is marked: its difference to {named} may be chance."


@frozen(kw_only=True)
class Study:
    """All values of a report.

    They contain one section per task, and the skipped folders.
    """

    title: str
    sources: list[str]
    sections: list[Section]
    skipped: list[Skipped] = field(factory=list)

    @property
    def runs(self) -> list[StoredRun]:
        return [run for section in self.sections for run in section.runs]

    @property
    def failed_runs(self) -> list[StoredRun]:
        return [
            run for section in self.sections for entry in section.entries for run in entry.failed
        ]

    @property
    def labels(self) -> list[str]:
        """Every method once, in an order that is independent of the results.

        The order determines the colours.
        """
        return sorted({entry.label for section in self.sections for entry in section.entries})
