"""Several methods on one task: the same data, split and start for all methods of a seed, so that differences are paired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from hgms_core import plots
from hgms_core.runner import RunResult
from hgms_core.statistics import Interval

Results = Mapping[str, Sequence[RunResult]]
"""Finished runs by method, in the order of their seeds."""


@frozen(kw_only=True)
class Row:
    """One method's line of the table. ``difference`` is to the reference method, seed by seed (None for the reference)."""

    method: str
    metrics: Mapping[str, Interval]
    difference: Interval | None
    outer_steps: Interval
    oracle_calls: Interval
    seconds: Interval

    def as_dict(self) -> dict[str, Any]:
        def spell(interval: Interval | None) -> dict[str, Any] | None:
            if interval is None:
                return None
            half = interval.half_width
            return {"mean": interval.mean, "half_width": None if half != half else half, "n": interval.count}

        return {
            "method": self.method,
            "metrics": {name: spell(interval) for name, interval in self.metrics.items()},
            "difference": spell(self.difference),
            "outer_steps": spell(self.outer_steps),
            "oracle_calls": spell(self.oracle_calls),
            "seconds": spell(self.seconds),
        }


def table(results: Results, metric: str, reference: str | None = None) -> list[Row]:
    """Means with 95 % t-intervals over seeds; differences in ``metric`` to ``reference`` are taken within each seed."""
    base = {run.info.seed: run.summary["metrics"][metric] for run in results.get(reference or "", ())}
    rows = []
    for method, runs in results.items():
        names = list(runs[0].summary["metrics"])
        paired = [run.summary["metrics"][metric] - base[run.info.seed] for run in runs if run.info.seed in base]
        rows.append(
            Row(
                method=method,
                metrics={name: Interval.of([run.summary["metrics"][name] for run in runs]) for name in names},
                difference=Interval.of(paired) if paired and method != reference else None,
                outer_steps=Interval.of([run.summary["outer_steps"] for run in runs]),
                oracle_calls=Interval.of([run.summary["oracle_calls"] or 0 for run in runs]),
                seconds=Interval.of([run.seconds for run in runs]),
            )
        )
    return rows


def draw(results: Results, folder: Path, metric: str) -> list[Path]:
    """The pictures of a comparison, written into ``folder``; the paths."""
    runs = {method: [run.records for run in each] for method, each in results.items()}
    written = plots.accuracy(runs, folder / "accuracy", metric=f"metric.{metric}", label=f"{metric.replace('_', ' ')} (%)")
    return written + plots.weights(runs, folder / "weights")
