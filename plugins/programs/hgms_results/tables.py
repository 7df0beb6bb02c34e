"""Tables: what finished runs of several methods say, as means over seeds and as differences within each seed.

All methods of one seed see the same data, split and start, so differences are taken seed by seed and their intervals are those
of paired samples, at the levels of Holm's rule over all pairs of methods (:func:`hgms_results.statistics.compared`).
:func:`table` takes runs from memory or from disk; :func:`hgms_compare.compare.compare` carries them out too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from hgms_results.statistics import Interval, compared, spell
from hgms_results.stored import StoredRun
from hgms_run import RunResult

DEFAULT_REFERENCE = "uniform"
"""The method that differences are taken to where it is among the methods and nothing else is asked for."""


@frozen(kw_only=True)
class Point:
    """What the statistics look at of one finished run. A metric that was not finite is NaN."""

    seed: int
    metrics: Mapping[str, float]
    outer_steps: int
    oracle_calls: int
    seconds: float
    peak_memory: float = math.nan
    method: str = ""
    untrained: str = ""

    @classmethod
    def of(cls, run: RunResult | StoredRun) -> Point:
        stored = run if isinstance(run, StoredRun) else None
        summary, metrics = run.summary, run.summary.get("metrics") or {}
        return cls(
            seed=run.seed if isinstance(run, StoredRun) else run.info.seed,
            metrics={name: math.nan if value is None else float(value) for name, value in metrics.items()},
            outer_steps=int(summary.get("outer_steps") or 0),
            oracle_calls=int(summary.get("oracle_calls") or 0),
            seconds=run.seconds,
            peak_memory=float((stored.resources.get("peak_memory_bytes") if stored else None) or math.nan),
            method=run.method_name if isinstance(run, StoredRun) else run.info.method,
            untrained=str(summary.get("untrained") or ""),
        )


@frozen(kw_only=True)
class Row:
    """One method's line of a table.

    Intervals are over the seeds whose value is defined; ``undefined`` counts those whose primary metric is NaN, ``failed`` the
    runs that did not end well. ``difference`` is to the reference method, seed by seed (None for the reference itself),
    ``winner`` whether the intervals of its differences to all others exclude zero, in its favour.
    """

    method: str
    metrics: Mapping[str, Interval]
    difference: Interval | None
    outer_steps: Interval
    outer_steps_range: tuple[int, int] | None
    oracle_calls: Interval
    seconds: Interval
    peak_memory: Interval
    undefined: int = 0
    failed: int = 0
    winner: bool = False
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "metrics": {name: _spelt(interval) for name, interval in self.metrics.items()},
            "difference": _spelt(self.difference),
            "outer_steps": _spelt(self.outer_steps),
            "outer_steps_range": list(self.outer_steps_range) if self.outer_steps_range else None,
            "oracle_calls": _spelt(self.oracle_calls),
            "seconds": _spelt(self.seconds),
            "peak_memory_bytes": _spelt(self.peak_memory),
            "undefined": self.undefined,
            "failed": self.failed,
            "winner": self.winner,
            "notes": list(self.notes),
        }


def _spelt(interval: Interval | None) -> dict[str, Any] | None:
    if interval is None or interval.count == 0:
        return None
    half = interval.half_width
    return {"mean": interval.mean, "half_width": None if math.isnan(half) else half, "n": interval.count}


@frozen(kw_only=True)
class Table:
    """All methods on one task. ``pairs["a", "b"]`` is the paired difference a − b in the metric, of every two methods."""

    task: str
    metric: str
    higher_is_better: bool
    reference: str | None
    rows: Sequence[Row]
    pairs: Mapping[tuple[str, str], Interval] = field(factory=dict, repr=False)

    @property
    def winner(self) -> str | None:
        return next((row.method for row in self.rows if row.winner), None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "metric": self.metric,
            "higher_is_better": self.higher_is_better,
            "reference": self.reference,
            "winner": self.winner,
            "methods": [row.as_dict() for row in self.rows],
        }

    @property
    def columns(self) -> list[dict[str, str]]:
        """The rows as text, for a terminal. A metric called a share or an accuracy is shown in percent."""
        factor, unit = (100.0, " (%)") if is_share(self.metric) else (1.0, "")
        name = self.metric.replace("_", " ") + unit + (" ↑" if self.higher_is_better else " ↓")
        shown = []
        for row in self.rows:
            value = row.metrics.get(self.metric, Interval.of([]))
            notes = list(row.notes)
            if row.undefined:
                notes.insert(0, f"{row.undefined} NaN")
            if row.failed:
                notes.insert(0, f"{row.failed} failed")
            against = "" if row.difference is None else _text(row.difference, factor, sign=True)
            steps = _text(row.outer_steps, 1.0, bare=True)
            if row.outer_steps_range and row.outer_steps_range[0] != row.outer_steps_range[1]:
                steps += " ({}–{})".format(*row.outer_steps_range)
            partial = value.count and (row.undefined or row.failed)
            columns = {
                "method": row.method + (" ★" if row.winner else ""),
                name: _text(value, factor) + (f" (n = {value.count})" if partial else ""),
            }
            if self.reference is not None and len(self.rows) > 1:
                columns[f"− {self.reference}"] = against
            columns |= {
                "outer steps": steps,
                "oracle calls": _text(row.oracle_calls, 1.0, bare=True),
                "seconds": _text(row.seconds, 1.0, bare=True),
                "peak MiB": _text(row.peak_memory, 2**-20, bare=True),
                "note": "; ".join(notes),
            }
            shown.append(columns)
        bare = [name for name, empty in (("peak MiB", "–"), ("note", "")) if all(row[name] == empty for row in shown)]
        return [{name: text for name, text in row.items() if name not in bare} for row in shown]


def is_share(metric: str) -> bool:
    """Whether the metric is a share of something, which people read in percent."""
    return "accuracy" in metric or metric.endswith(("_share", "f1"))


def _text(interval: Interval, factor: float, *, sign: bool = False, bare: bool = False) -> str:
    if interval.count == 0 or math.isnan(interval.mean):
        return "–"
    if not bare:
        return spell(interval, share=factor == 100.0, signed=sign)
    mean = interval.mean * factor
    return f"{mean:.0f}" if 1000 <= abs(mean) < 1e15 else f"{mean:.4g}"


def table(
    runs: Mapping[str, Sequence[RunResult | StoredRun | Point]],
    metric: str,
    reference: str | None = None,
    *,
    task: str = "",
    higher_is_better: bool = True,
    failed: Mapping[str, int] | None = None,
    notes: Mapping[str, Sequence[str]] | None = None,
) -> Table:
    """Means with 95 % t-intervals over seeds, and differences in ``metric`` within each seed, between all pairs of methods and
    to ``reference``: where methods are equal, the chance that the interval of any difference excludes zero is at most 5 %.

    ``runs`` are finished ones by the method's label; ``failed`` counts the others. A value that is NaN is left out of means and
    differences and counted; a method with undefined values or failed runs is never marked as the winner, and a method
    without any value is not one that others have to beat. Losses of a method whose x was not trained to the end (``untrained``
    in its summary) are shown and take no part in differences and verdicts.
    """
    points = {label: [run if isinstance(run, Point) else Point.of(run) for run in each] for label, each in runs.items()}
    failed, notes = failed or {}, notes or {}
    finite = {
        label: {one.seed: one.metrics[metric] for one in each if math.isfinite(one.metrics.get(metric, math.nan))}
        for label, each in points.items()
    }
    aside = {label: next((one.untrained for one in each if one.untrained), "") for label, each in points.items()}
    values = {label: {} if aside[label] else each for label, each in finite.items()}
    whole = {label for label, each in points.items() if each and len(values[label]) == len(each) and not failed.get(label)}
    pairs = compared(values)
    winner = _winner(pairs, [label for label, each in values.items() if each], whole, higher_is_better)
    idle = next((label for label, each in points.items() if each and each[0].method == DEFAULT_REFERENCE), None)
    rows = []
    for label, each in points.items():
        names = list(dict.fromkeys(name for one in each for name in one.metrics))
        said = list(notes.get(label, ()))
        if aside[label]:
            said.append(f"no verdict: {aside[label]}")
        if idle is not None and label != idle:
            said += _against_default(pairs[label, idle], higher_is_better)
        steps = [one.outer_steps for one in each]
        rows.append(
            Row(
                method=label,
                metrics={name: _defined(one.metrics.get(name, math.nan) for one in each) for name in names},
                difference=pairs.get((label, reference), Interval.of([])) if reference and label != reference else None,
                outer_steps=Interval.of(steps),
                outer_steps_range=(min(steps), max(steps)) if steps else None,
                oracle_calls=Interval.of([one.oracle_calls for one in each]),
                seconds=_defined(one.seconds for one in each),
                peak_memory=_defined(one.peak_memory for one in each),
                undefined=len(each) - len(finite[label]),
                failed=failed.get(label, 0),
                winner=label == winner,
                notes=tuple(said),
            )
        )
    return Table(task=task, metric=metric, higher_is_better=higher_is_better, reference=reference, rows=rows, pairs=pairs)


def _defined(values: Iterable[float]) -> Interval:
    return Interval.of([value for value in values if math.isfinite(value)])


def _winner(pairs: Mapping[tuple[str, str], Interval], rivals: Sequence[str], whole: set[str], higher: bool) -> str | None:
    """The method whose paired differences to all others exclude zero, in its favour."""
    for label in rivals:
        ahead = [pairs[label, other] for other in rivals if other != label]
        if label in whole and ahead and all(pair.excludes_zero and (pair.mean > 0) == higher for pair in ahead):
            return label
    return None


def _against_default(difference: Interval, higher: bool) -> list[str]:
    if difference.count == 0 or difference.mean == 0 or (difference.mean > 0) == higher:
        return []
    if difference.count < 2:
        return [f"behind {DEFAULT_REFERENCE} on the one seed they share"]
    return [
        f"worse than {DEFAULT_REFERENCE}" if difference.excludes_zero else f"behind {DEFAULT_REFERENCE}, within the interval"
    ]


__all__ = ["DEFAULT_REFERENCE", "Point", "Row", "Table", "is_share", "table"]
