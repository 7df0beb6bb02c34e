"""What a report says, as values: which runs belong together, their means, paired differences, curves and diagnostics.

One :class:`Section` for each task under one budget and version; every output (HTML, Markdown, LaTeX, Parquet) is written from
it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from hgms_core import Budget, CheckpointError, ConfigError, unknown
from hgms_core.registry import Registry
from hgms_report import mixture
from hgms_report.curves import POINTS, Curve, Line, band, binned
from hgms_report.mixture import Mixture
from hgms_results import (
    DEFAULT_REFERENCE,
    Interval,
    Point,
    Skipped,
    StoredRun,
    StoredSweep,
    is_share,
    scan,
    scan_sweeps,
    short_names,
    spell,
    table,
)
from hgms_run import UNCOMPARED

_MIXTURE = 150  # points of a small picture
_CURVES = 250_000  # points of all curves of a page together; with very many curves each gets fewer


@frozen(kw_only=True)
class Entry:
    """One method's runs on one task.

    ``metrics`` are means over the seeds where each is finite; ``nonfinite`` counts the others. ``difference`` is to the
    ``reference``, ``ahead`` whether its differences to all others exclude zero, in its favour, ``untrained`` whether its x is
    not one that was trained to the end, so that its losses are no measure of it.
    """

    label: str
    runs: list[StoredRun]
    failed: list[StoredRun] = field(factory=list)
    metrics: dict[str, Interval] = field(factory=dict)
    nonfinite: dict[str, int] = field(factory=dict)
    difference: Interval | None = None
    reference: str | None = None
    mark: str = ""
    ahead: bool = False
    untrained: bool = False

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    def values(self, key: str) -> list[float]:
        """A number of every summary: ``outer_steps``, ``oracle_calls``, or one of ``cost``; only where it is known."""
        found = [run.summary.get(key, (run.summary.get("cost") or {}).get(key)) for run in self.runs]
        return [float(value) for value in found if value is not None]

    @property
    def seconds(self) -> list[float]:
        return [run.seconds for run in self.runs if not math.isnan(run.seconds)]

    @property
    def peak_memory(self) -> list[float]:
        found = [run.resources.get("peak_memory_bytes") for run in self.runs]
        return [float(value) for value in found if value is not None]


@frozen(kw_only=True)
class Diagnosis:
    """How selection and differentiation went for one method, over all its seeds."""

    label: str
    gap: Curve | None
    residual: Curve | None
    branches: dict[int, int]
    outcomes: dict[str, int]
    iterations: float


@frozen(kw_only=True)
class Section:
    """One task under one budget: methods (best mean first), the differences between them, curves by axis and metric.

    ``name`` is the task's, without the budget and version that are in the title of one section of several; ``mixtures`` are
    over the ``axis`` that the budget counts, ``tokens`` the means of a step forward and backward.
    """

    title: str
    name: str
    task: str
    version: str | None
    budget: str
    metric: str
    higher: bool | None
    metrics: list[str]
    directions: Mapping[str, bool]
    entries: list[Entry]
    reference: str | None
    pairs: Mapping[tuple[str, str], Interval]
    winner: str | None
    curves: dict[str, dict[str, dict[str, Curve]]]
    diagnoses: list[Diagnosis]
    axis: str
    mixtures: dict[str, Mixture]
    tokens: dict[str, dict[StoredRun, tuple[float, float]]]
    environments: list[tuple[dict[str, Any], list[StoredRun]]]

    @property
    def runs(self) -> list[StoredRun]:
        return [run for entry in self.entries for run in entry.runs + entry.failed]

    @property
    def verdict(self) -> str:
        """One sentence on who is ahead, and whether that is more than chance."""
        ranked = [one for one in self.entries if not math.isnan(one.metrics[self.metric].mean) and not one.untrained]
        if len(ranked) < 2 or self.higher is None:
            return ""
        first = ranked[0].label
        rest = {entry.label: self.pairs.get((first, entry.label)) for entry in ranked[1:]}
        known = {label: pair for label, pair in rest.items() if pair is not None and pair.count > 1}
        if self.winner is not None:
            closest, pair = min(known.items(), key=lambda item: abs(item[1].mean))
            share = is_share(self.metric)
            lead = spell(pair, share=share, signed=True) + (" points" if share else "")
            return f"{first} is ahead of every other method; the closest is {closest}, at a difference of {lead}."
        if len(known) < len(rest):
            return f"{first} has the best mean; with fewer than two seeds in common nothing can be said about chance."
        unsure = [label for label, pair in known.items() if not pair.excludes_zero]
        if not unsure:
            return f"{first} has the best mean of the methods that finished; not all of its runs did."
        named = ", ".join(unsure[:3]) + (f" and {len(unsure) - 3} more" if len(unsure) > 3 else "")
        return f"{first} has the best mean, but no winner is marked: its difference to {named} may be chance."


@frozen(kw_only=True)
class Study:
    """All of a report."""

    title: str
    sources: list[str]
    sections: list[Section]
    skipped: list[Skipped]
    sweeps: list[StoredSweep]

    @property
    def runs(self) -> list[StoredRun]:
        return [run for section in self.sections for run in section.runs]

    @property
    def failed(self) -> list[StoredRun]:
        return [run for section in self.sections for entry in section.entries for run in entry.failed]

    @property
    def labels(self) -> list[str]:
        """Every method once, in an order that does not depend on who won: it gives the colours."""
        return sorted({entry.label for section in self.sections for entry in section.entries})


def build(
    folders: Iterable[str | Path],
    *,
    metrics: Sequence[str] = (),
    reference: str | None = None,
    separate: bool = False,
    title: str | None = None,
) -> Study:
    """Reads all runs below ``folders`` and computes everything a report says.

    ``metrics``: the first that a task has is its main one (default: the task's own first), all have curves. ``reference`` is
    the method that differences are taken to (default: ``uniform`` where it ran). ``separate`` gives runs of different task
    versions or budgets sections of their own.

    Raises:
        ConfigError: no run at all; an unknown metric or reference; runs of one task that may not be compared.
    """
    folders = [Path(folder) for folder in folders]
    runs, skipped = scan(folders)
    if not runs:
        where, plural = ", ".join(map(str, folders)), "s" * (len(skipped) != 1)
        lines = [f"  {each.path}: {each.reason}" for each in skipped[:20]]
        raise ConfigError("\n".join([f"no finished run below {where} ({len(skipped)} folder{plural} left out)", *lines]))
    _known(runs, metrics, reference)
    groups = _sections(runs, separate)

    sections = []
    count = 4 * len(groups) * max(len({run.label for run in each}) for _, each in groups.values())
    points = max(60, min(POINTS, _CURVES // (count * max(1, len(metrics)))))
    for heading, (name, each) in groups.items():
        kept, damaged = _read(each, metrics)
        skipped += damaged
        if kept:
            sections.append(_section(heading, name, kept, metrics, reference, points))
    found, damaged = scan_sweeps(folders)
    return Study(
        title=title or "Bilevel methods compared",
        sources=[str(folder) for folder in folders],
        sections=sections,
        skipped=skipped + damaged,
        sweeps=found,
    )


# --- what belongs together ---------------------------------------------------------------------------------------------


def _known(runs: Sequence[StoredRun], metrics: Sequence[str], reference: str | None) -> None:
    there = dict.fromkeys(name for run in runs for name in [*run.higher_is_better, *run.metrics])
    for metric in metrics:
        if metric not in there:
            raise ConfigError(unknown("metric", metric, there))
    labels = {run.label for run in runs}
    if reference is not None and reference not in labels:
        raise ConfigError(unknown("method", reference, labels) + "\n  --reference names a method of these runs")


def _sections(runs: Sequence[StoredRun], separate: bool) -> dict[str, tuple[str, list[StoredRun]]]:
    """The task's name and its runs, by title. One task under several budgets or versions is refused, or, if ``separate``,
    several sections."""
    groups = _named([(run.task, run.task_label, run) for run in runs])
    found: dict[str, tuple[str, list[StoredRun]]] = {}
    mixed: list[str] = []
    for name, each in sorted(groups.items()):
        budgets, versions = {run.budget for run in each}, {run.task_version for run in each}
        if len(budgets) == 1 and len(versions) == 1:
            found[name] = name, each
            continue
        parts: dict[str, list[StoredRun]] = {}
        for run in each:
            budget = [f"budget {run.budget}"] if len(budgets) > 1 else []
            version = [f"version {run.task_version or 'not recorded'}"] if len(versions) > 1 else []
            parts.setdefault(", ".join(budget + version), []).append(run)
        for told, part in sorted(parts.items()):
            found[f"{name}, {told}"] = name, part
            methods = ", ".join(sorted({run.label for run in part}))
            mixed.append(f"  {name}: {told}: {len(part)} runs ({methods}), the first is {part[0].path}")
    if mixed and not separate:
        raise ConfigError(
            "runs of one task under different budgets or task versions cannot be compared:\n"
            + "\n".join(mixed)
            + "\n  give only the folders that belong together, or add --separate for a section each"
        )
    return found


def _named(runs: Sequence[tuple[Mapping[str, Any], str, StoredRun]]) -> dict[str, list[StoredRun]]:
    """Runs by the name of a table of theirs (the task's, the method's), each given with that table and its label."""
    tables = {_key(one): one for one, _, _ in runs}
    labels: dict[str, str] = {}
    for one, label, _ in runs:
        labels.setdefault(_key(one), label)
    names = short_names(tables, labels)
    found: dict[str, list[StoredRun]] = {}
    for one, _, run in runs:
        found.setdefault(names[_key(one)], []).append(run)
    return found


def _key(table: Mapping[str, Any]) -> str:
    return json.dumps(table, sort_keys=True, default=str)


# --- one section -------------------------------------------------------------------------------------------------------

_Rows = Mapping[str, Any]


def _metric(runs: Sequence[StoredRun], metrics: Sequence[str]) -> tuple[str, dict[str, bool], list[str]]:
    """The main metric, which way each is better, and all of them in the task's order."""
    directions = next((dict(run.higher_is_better) for run in runs if run.higher_is_better), None)
    if directions is None:  # older than the record of it: what the installed task says
        found = Registry.load().find("task", runs[0].task_name)
        directions = dict(getattr(getattr(found, "target", None), "metrics", {}))
    names = list(dict.fromkeys([*directions, *(name for run in runs for name in run.metrics)]))
    names = [name for name in names if any(name in run.metrics for run in runs)]
    if not names:
        return "upper_loss", {"upper_loss": False}, ["upper_loss"]
    main = next((name for name in metrics if name in names), names[0])
    return main, directions, names


def _read(runs: Sequence[StoredRun], metrics: Sequence[str]) -> tuple[dict[StoredRun, _Rows], list[Skipped]]:
    """The rows of all runs, reduced to what a report needs."""
    main, _, names = _metric(runs, metrics)
    curves = list(dict.fromkeys([main, *(name for name in metrics if name in names)]))
    columns = [f"metric.{name}" for name in curves if name != "upper_loss"]
    wanted = ["seconds", "oracle_calls", "upper_loss", "gap", "selected", "residual", "iterations", "outcome", *columns]
    found: dict[StoredRun, _Rows] = {}
    skipped = []
    for run in runs:
        if run.status == "failed":
            found[run] = {}
            continue
        try:
            mixed = mixture.wanted(run)
            rows = run.columns([*wanted, *mixed])
            words = [name for name in ("seconds", "oracle_calls", "upper_loss", *columns, *mixed) if rows[name].dtype == object]
            if words:
                raise CheckpointError(f"steps.jsonl holds words where {' and '.join(words)} belong")
        except (CheckpointError, OSError) as error:
            skipped.append(Skipped(run.path, str(error)))
            continue
        rows["oracle_calls"][:1] = np.nan_to_num(rows["oracle_calls"][:1])  # the row before the first step has spent none
        found[run] = {**rows, "selected": _chosen(rows["selected"]), "outcome": _counted(rows["outcome"])}
    return found, skipped


def _chosen(indices: np.ndarray) -> Counter[int]:
    """How often each candidate was chosen; what is no index of one is not counted."""
    known = indices[(indices >= 0) & (indices % 1 == 0) & (indices < 2**53)] if indices.dtype == float else np.empty(0)
    values, counts = np.unique(known.astype(int), return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def _counted(texts: np.ndarray) -> Counter[str]:
    counts: Counter[str] = Counter(texts.tolist() if texts.dtype == object else ())
    del counts[None]
    return counts


def _section(
    title: str, name: str, rows: Mapping[StoredRun, _Rows], metrics: Sequence[str], reference: str | None, points: int
) -> Section:
    runs = list(rows)
    main, directions, names = _metric(runs, metrics)
    higher = directions.get(main)
    methods = _methods(sorted(runs, key=lambda run: run.seed))
    entries, pairs = _entries(methods, main, higher, names, reference)
    shown = list(dict.fromkeys([main, *(name for name in metrics if name in names), "upper_loss"]))
    budget = Budget.parse(runs[0].budget)
    axis = "seconds" if budget.seconds else "step" if budget.outer_steps else "oracle_calls"
    own = {entry.label: {run: rows[run] for run in entry.runs} for entry in entries}
    mixtures = {label: mixture.mixture(each, axis, min(points, _MIXTURE)) for label, each in own.items()}
    return Section(
        title=title,
        name=name,
        task=runs[0].task_name,
        version=runs[0].task_version,
        budget=runs[0].budget,
        metric=main,
        higher=higher,
        metrics=list(dict.fromkeys([main, *(name for run in runs for name in run.scores.get("metrics", {})), *names])),
        directions=directions,
        entries=entries,
        reference=next((entry.reference for entry in entries if entry.reference), None),
        pairs=pairs,
        winner=next((entry.label for entry in entries if entry.ahead), None),
        curves={
            axis: {
                name: {
                    entry.label: curve
                    for entry in entries
                    if (curve := band([_line(rows[run], axis, name) for run in entry.runs], points)) is not None
                }
                for name in shown
            }
            for axis in ("seconds", "oracle_calls")
        },
        diagnoses=[_diagnosis(entry, rows) for entry in entries if entry.runs],
        axis=axis,
        mixtures={label: found for label, found in mixtures.items() if found is not None},
        tokens={label: found for label, each in own.items() if (found := mixture.tokens(each))},
        environments=_environments(runs),
    )


def _methods(runs: Sequence[StoredRun]) -> dict[str, list[StoredRun]]:
    """Runs by method. Where a method has several of one seed, which no mean may count twice, they were carried out differently:
    then every way is a method of its own."""
    methods: dict[str, list[StoredRun]] = {}
    for label, alike in _named([(run.method, run.label, run) for run in runs]).items():
        if len({run.seed for run in alike}) < len(alike):
            methods |= _named([({**run.method, "run": carried_out(run)}, label, run) for run in alike])
        else:
            methods[label] = alike
    return methods


def carried_out(run: StoredRun) -> dict[str, Any]:
    """The settings of a run that are neither its method's nor names."""
    return {key: value for key, value in run.settings.items() if key not in UNCOMPARED}


def _rank(mean: float, higher: bool | None) -> tuple[bool, float]:
    return math.isnan(mean), 0.0 if math.isnan(mean) or higher is None else -mean if higher else mean


def _entries(
    methods: Mapping[str, Sequence[StoredRun]],
    main: str,
    higher: bool | None,
    names: Sequence[str],
    reference: str | None,
) -> tuple[list[Entry], Mapping[tuple[str, str], Interval]]:
    """The methods with their statistics, best mean first, and the differences between them."""
    done = {label: [run for run in runs if run.status == "done"] for label, runs in methods.items()}
    failed = {label: [run for run in runs if run.status != "done"] for label, runs in methods.items()}
    idle = next((label for label, runs in methods.items() if runs[0].method_name == DEFAULT_REFERENCE), None)
    base = reference if reference in methods else idle
    points = {
        label: [evolve(Point.of(run), metrics={name: _value(run, name) for name in names if _has(run, name)}) for run in runs]
        for label, runs in done.items()
    }
    found = table(
        points,
        main,
        base,
        higher_is_better=higher is not False,
        failed={label: len(runs) for label, runs in failed.items()},
    )
    none = Interval.of([])
    entries = [
        Entry(
            label=row.method,
            runs=done[row.method],
            failed=failed[row.method],
            metrics={name: row.metrics.get(name, none) for name in names},
            nonfinite={
                name: count
                for name in names
                if (count := sum(math.isnan(point.metrics.get(name, 0.0)) for point in points[row.method]))
            },
            difference=row.difference,
            reference=base,
            # without a direction there is no better and no worse
            mark="; ".join(row.notes) if higher is not None else "",
            ahead=row.winner and higher is not None,
            untrained=any(point.untrained for point in points[row.method]),
        )
        for row in found.rows
    ]
    return sorted(entries, key=lambda entry: _rank(entry.metrics[main].mean, higher)), found.pairs


def _has(run: StoredRun, name: str) -> bool:
    return name in run.metrics or name == "upper_loss"


def _value(run: StoredRun, name: str) -> float:
    if name == "upper_loss" and name not in run.metrics:
        value = run.summary.get("upper_loss")
        return math.nan if value is None else float(value)
    return run.metrics.get(name, math.nan)


def _line(rows: _Rows, axis: str, name: str) -> Line:
    y = rows["upper_loss" if name == "upper_loss" else f"metric.{name}"]
    # a row that has not been evaluated is no report; one that was and is not finite is NaN among evaluated ones
    there = ~np.isnan(rows[axis]) & (~np.isnan(y) if name == "upper_loss" else _evaluated(rows, y))
    return rows[axis][there], y[there]


def _evaluated(rows: _Rows, y: np.ndarray) -> np.ndarray:
    known: np.ndarray = ~np.isnan(y)
    if known.any() and not known[-1]:
        known[-1] = True  # the last row is always evaluated: here to NaN
    return known


def _diagnosis(entry: Entry, rows: Mapping[StoredRun, _Rows]) -> Diagnosis:
    def steps(name: str) -> Curve | None:
        lines = [(rows[run]["step"], rows[run][name]) for run in entry.runs if rows[run][name].dtype == float]
        return binned(lines)

    branches: Counter[int] = sum((rows[run]["selected"] for run in entry.runs), Counter())
    outcomes: Counter[str] = sum((rows[run]["outcome"] for run in entry.runs), Counter())
    iterations = np.concatenate([rows[run]["iterations"] for run in entry.runs])
    known = iterations[~np.isnan(iterations)] if iterations.dtype == float else iterations[:0]
    return Diagnosis(
        label=entry.label,
        gap=steps("gap"),
        residual=steps("residual"),
        branches=dict(sorted(branches.items())),
        outcomes=dict(outcomes.most_common()),
        iterations=float(np.median(known)) if known.size else math.nan,
    )


def _environments(runs: Sequence[StoredRun]) -> list[tuple[dict[str, Any], list[StoredRun]]]:
    """Equal environments once, with their runs; the one with the most runs first."""
    groups: dict[str, tuple[dict[str, Any], list[StoredRun]]] = {}
    for run in runs:
        table = _where(run.environment)
        before = table.pop("before", [])  # where a run was begun that was resumed elsewhere, or with other code
        earlier = [_where(place) for place in before if isinstance(place, Mapping)] if isinstance(before, list) else []
        if earlier := [place for place in earlier if place != table]:
            table["before"] = earlier
        groups.setdefault(_key(table), (table, []))[1].append(run)
    return sorted(groups.values(), key=lambda group: -len(group[1]))


def _where(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The task and the digests of components' code are of what was run, not of where."""
    return {key: value for key, value in environment.items() if key not in ("task", "code")}


__all__ = ["Diagnosis", "Entry", "Section", "Study", "build", "carried_out"]
