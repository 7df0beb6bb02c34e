"""Read runs and compute the content of a report.

It groups the runs, and computes their means, paired differences, curves and diagnostics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve

from hgms.arguments import require, require_known
from hgms.config.tables import group_values
from hgms.report import mixture
from hgms.report.curves import POINTS, Curve, Line, band
from hgms.report.study import Entry, Section, Study, axis_of
from hgms.results import (
    DEFAULT_REFERENCES,
    ORDER,
    Interval,
    Point,
    Skipped,
    StoredRun,
    scan,
    short_names,
    table,
)
from hgms.runs import UNCOMPARED
from hgms_core.errors import CheckpointError

_MIXTURE = 150  # points of a small picture
_CURVES = 250_000  # points of all curves of a page; many curves get fewer points each
_LOSS = "upper_loss"

_Rows = Mapping[str, np.ndarray]
"""Columns of a run's rows."""


def build(
    folders: Iterable[str | Path],
    *,
    metrics: Sequence[str] = (),
    reference: str | None = None,
    title: str | None = None,
) -> Study:
    """Read all runs below ``folders`` and compute the content of a report.

    ``metrics``: the first metric that a task has is its main metric (default: the task's first
    metric); all listed metrics have curves. Differences are relative to the method
    ``reference`` (default: ``uniform`` if it ran). Runs of different task versions or budgets have
    separate sections.

    Raises
    ------
    ConfigError
        There is no run; or a metric or reference is unknown.
    """
    folders = [Path(folder) for folder in folders]
    runs, skipped = scan(folders)
    lines = [f"{folder.path}: {folder.reason}" for folder in skipped[:20]]
    require(
        runs,
        "no-runs",
        "\n".join([f"no run is finished; skipped folders: {len(skipped)}", *lines]),
        place=(", ".join(map(str, folders)),),
    )
    known = dict.fromkeys(name for run in runs for name in [*run.higher_is_better, *run.metrics])
    for metric in metrics:
        require_known("metric", metric, known, ("metrics",))
    if reference is not None:
        require_known("method", reference, {run.label for run in runs}, ("reference",))

    groups = _groups(runs)
    sections = []
    count = 4 * len(groups) * max(len({run.label for run in group}) for _, group in groups.values())
    points = max(60, min(POINTS, _CURVES // (count * max(1, len(metrics)))))
    for heading, (name, group) in groups.items():
        rows, damaged = _read(group, metrics)
        skipped += damaged
        if rows:
            sections.append(_section(heading, name, rows, metrics, reference, points))
    return Study(
        title=title or "Bilevel methods compared",
        sources=[str(folder) for folder in folders],
        sections=sections,
        skipped=skipped,
    )


# --- groups of runs
# --------------------------------------------------------------------------------------------------


def _groups(runs: Sequence[StoredRun]) -> dict[str, tuple[str, list[StoredRun]]]:
    """Return the task's name and its runs, by title.

    A task has one group per budget and version. If it has several, its titles contain them.
    """
    groups: dict[str, tuple[str, list[StoredRun]]] = {}
    for name, group in sorted(
        _group_by_name(runs, lambda run: run.task, lambda run: run.task_label).items()
    ):
        several_budgets = len({run.budget for run in group}) > 1
        several_versions = len({run.task_version for run in group}) > 1
        parts: dict[str, list[StoredRun]] = {}
        for run in group:
            budget = [f"budget {run.budget}"] * several_budgets
            version = [f"version {run.task_version or 'not recorded'}"] * several_versions
            parts.setdefault(", ".join([name, *budget, *version]), []).append(run)
        groups |= {title: (name, part) for title, part in sorted(parts.items())}
    return groups


def _methods(runs: Sequence[StoredRun]) -> dict[str, list[StoredRun]]:
    """Group runs by method and dtype.

    A mean must not count two runs of one seed. If a method has several runs of one seed, they used
    different execution settings. Then each combination of settings becomes a separate method.
    """
    methods: dict[str, list[StoredRun]] = {}
    for name, alike in _group_by_name(
        runs,
        lambda run: {**run.method, "run": {"dtype": run.settings.get("dtype", "float32")}},
        lambda run: run.label,
    ).items():
        if len({run.seed for run in alike}) == len(alike):
            methods[name] = alike
        else:
            ways = {run: {**run.method, "run": carried_out(run)} for run in alike}
            methods |= _group_by_name(
                alike, ways.__getitem__, dict.fromkeys(alike, name).__getitem__
            )
    return methods


def carried_out(run: StoredRun) -> dict[str, Any]:
    """Return the settings of a run that are neither method settings nor names."""
    return {key: value for key, value in run.settings.items() if key not in UNCOMPARED}


def _group_by_name(
    runs: Sequence[StoredRun],
    table_of: Callable[[StoredRun], Mapping[str, Any]],
    label_of: Callable[[StoredRun], str],
) -> dict[str, list[StoredRun]]:
    """Group runs by the name of one of their tables (the task's or the method's).

    The name is the label, with the differing settings if several tables share a label.
    """
    keys = {run: json.dumps(table_of(run), sort_keys=True, default=str) for run in runs}
    labels = {keys[run]: label_of(run) for run in reversed(runs)}  # of the first run
    names = short_names({keys[run]: table_of(run) for run in runs}, labels)
    return group_values((names[keys[run]], run) for run in runs)


# --- the rows of the runs
# --------------------------------------------------------------------------------------------------


def _metric(
    runs: Sequence[StoredRun], metrics: Sequence[str]
) -> tuple[str, dict[str, bool], list[str]]:
    """Return the main metric, the directions, and all metrics.

    All metrics are in the task's order.
    """
    directions = next((dict(run.higher_is_better) for run in runs if run.higher_is_better), {})
    names = list(dict.fromkeys([*directions, *(name for run in runs for name in run.metrics)]))
    names = [name for name in names if any(name in run.metrics for run in runs)]
    if not names:
        return _LOSS, {_LOSS: False}, [_LOSS]
    main = next((name for name in metrics if name in names), names[0])
    return main, directions, names


def _read(
    runs: Sequence[StoredRun], metrics: Sequence[str]
) -> tuple[dict[StoredRun, _Rows], list[Skipped]]:
    """Read the rows of all runs, reduced to the data that a report needs."""
    main, _, names = _metric(runs, metrics)
    drawn = dict.fromkeys([main, *(name for name in metrics if name in names)])
    numbers = [
        "step",
        "seconds",
        "oracle_calls",
        _LOSS,
        *(f"metric.{name}" for name in drawn if name != _LOSS),
    ]
    read: dict[StoredRun, _Rows] = {}
    skipped = []
    for run in runs:
        if run.status == "failed":
            read[run] = {}
            continue
        try:
            weights = [name for name in run.fields if name.startswith(mixture.PREFIX)]
            required = [*numbers, *weights]
            rows = run.columns(required)
            words = [name for name in required if rows[name].dtype == object]
            require(
                not words,
                "wrong-type",
                f"{' and '.join(words)} contain text instead of numbers",
                place=("steps.jsonl",),
                error=CheckpointError,
            )
        except CheckpointError as error:
            skipped.append(Skipped.of(run.path, error))
            continue
        # the row before the first step used no calls
        rows["oracle_calls"][:1] = np.nan_to_num(rows["oracle_calls"][:1])
        read[run] = rows
    return read, skipped


# --- one section
# --------------------------------------------------------------------------------------------------


def _section(
    title: str,
    name: str,
    rows: Mapping[StoredRun, _Rows],
    metrics: Sequence[str],
    reference: str | None,
    points: int,
) -> Section:
    """Compute the methods with their statistics, and the differences between them.

    Methods are sorted by mean, best first; references follow.
    """
    runs = list(rows)
    main, directions, names = _metric(runs, metrics)
    methods = _methods(sorted(runs, key=lambda run: run.seed))
    done = {label: [run for run in runs if run.status == "done"] for label, runs in methods.items()}
    failed = {
        label: [run for run in runs if run.status != "done"] for label, runs in methods.items()
    }
    default = next(
        (label for label, runs in methods.items() if runs[0].method_name in DEFAULT_REFERENCES),
        None,
    )
    base = reference if reference in methods else default
    values = {label: [_point(run, names) for run in runs] for label, runs in done.items()}
    compared = table(
        values,
        main,
        base,
        higher_is_better=directions.get(main),
        failed={label: [run.seed for run in runs] for label, runs in failed.items()},
    )
    drawn = list(dict.fromkeys([main, *(name for name in metrics if name in names), _LOSS]))
    axis = axis_of(runs[0].budget)
    entries = []
    for row in sorted(compared.rows, key=lambda row: (ORDER.index(row.role), *compared.rank(row))):
        own = {run: rows[run] for run in done[row.method]}
        means = {name: row.metrics.get(name, Interval.of([])) for name in names}
        undefined = {
            name: sum(math.isnan(run.metrics.get(name, 0.0)) for run in values[row.method])
            for name in names
        }
        entries.append(
            Entry(
                row=evolve(row, metrics=means),
                runs=done[row.method],
                failed=failed[row.method],
                nonfinite={name: count for name, count in undefined.items() if count},
                unjudged=any(point.why_unranked(main) for point in values[row.method]),
                curves=_curves(own, drawn, points),
                mixture=mixture.mixture(own, axis, min(points, _MIXTURE)),
            )
        )
    later = (name for run in runs for name in run.scores.get("metrics", {}))
    return Section(
        title=title,
        name=name,
        compared=compared,
        metrics=list(dict.fromkeys([main, *later, *names])),
        drawn=drawn,
        directions=directions,
        entries=entries,
    )


def _point(run: StoredRun, names: Sequence[str]) -> Point:
    metrics = dict(run.metrics)
    if _LOSS in names and _LOSS not in metrics:
        loss = run.summary.get(_LOSS)
        metrics[_LOSS] = math.nan if loss is None else float(loss)
    return evolve(Point.of(run), metrics={name: metrics[name] for name in names if name in metrics})


def _curves(
    rows: Mapping[StoredRun, _Rows], metrics: Sequence[str], points: int
) -> dict[tuple[str, str], Curve]:
    """Compute the curves of one method's runs, by axis and metric."""
    curves = {
        (axis, name): band([_line(columns, axis, name) for columns in rows.values()], points)
        for axis in ("seconds", "oracle_calls")
        for name in metrics
    }
    return {key: curve for key, curve in curves.items() if curve is not None}


def _line(rows: _Rows, axis: str, name: str) -> Line:
    y = rows[_LOSS if name == _LOSS else f"metric.{name}"]
    reported = ~np.isnan(y)  # a row without an evaluation has no value
    if name != _LOSS and reported.any() and not reported[-1]:
        reported[-1] = True  # the last row is always evaluated; here the result is NaN
    reported &= ~np.isnan(rows[axis])
    return rows[axis][reported], y[reported]
