"""Comparisons: a grid of runs carried out, and what they say.

All methods of one seed see the same data, split and start, so differences are taken seed by seed and their intervals are those
of paired samples. :func:`table` makes the statistics of any runs; :func:`compare` carries out a whole grid.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen

from hgms_core import plots, plugins, results, workers
from hgms_core import registry as registries
from hgms_core import sweep as sweeps
from hgms_core.budget import Budget
from hgms_core.config import RunSettings
from hgms_core.errors import CheckpointError, ConfigError, HgmsError
from hgms_core.folder import RunFolder
from hgms_core.grid import UNIFORM, Cell, Grid, SweepSettings, load
from hgms_core.launch import holds
from hgms_core.progress import Board
from hgms_core.results import StoredRun
from hgms_core.runner import Interrupted, RunResult
from hgms_core.statistics import Interval, paired, spell
from hgms_core.structure import plain

# --- statistics --------------------------------------------------------------------------------------------------------


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
    """All methods on one task."""

    task: str
    metric: str
    higher_is_better: bool
    reference: str | None
    rows: Sequence[Row]

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
    return f"{mean:.4g}" if abs(mean) < 1000 else f"{mean:.0f}"


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
    """Means with 95 % t-intervals over seeds, and differences in ``metric`` to ``reference`` within each seed.

    ``runs`` are finished ones by the method's label; ``failed`` counts the others. A value that is NaN is left out of means and
    differences and counted; a method with undefined values or failed runs is never marked as the winner, and a method
    without any value is not one that others have to beat.
    """
    points = {label: [run if isinstance(run, Point) else Point.of(run) for run in each] for label, each in runs.items()}
    failed, notes = failed or {}, notes or {}
    values = {
        label: {one.seed: one.metrics[metric] for one in each if math.isfinite(one.metrics.get(metric, math.nan))}
        for label, each in points.items()
    }
    whole = {label for label, each in points.items() if each and len(values[label]) == len(each) and not failed.get(label)}
    winner = _winner(values, whole, higher_is_better)
    idle = next((label for label, each in points.items() if each and each[0].method == UNIFORM), None)
    rows = []
    for label, each in points.items():
        names = list(dict.fromkeys(name for one in each for name in one.metrics))
        said = list(notes.get(label, ()))
        if idle is not None and label != idle:
            said += _against_uniform(paired(values[label], values[idle]), higher_is_better)
        steps = [one.outer_steps for one in each]
        rows.append(
            Row(
                method=label,
                metrics={name: _defined(one.metrics.get(name, math.nan) for one in each) for name in names},
                difference=paired(values[label], values.get(reference, {})) if reference and label != reference else None,
                outer_steps=Interval.of(steps),
                outer_steps_range=(min(steps), max(steps)) if steps else None,
                oracle_calls=Interval.of([one.oracle_calls for one in each]),
                seconds=_defined(one.seconds for one in each),
                peak_memory=_defined(one.peak_memory for one in each),
                undefined=len(each) - len(values[label]),
                failed=failed.get(label, 0),
                winner=label == winner,
                notes=tuple(said),
            )
        )
    return Table(task=task, metric=metric, higher_is_better=higher_is_better, reference=reference, rows=rows)


def _defined(values: Iterable[float]) -> Interval:
    return Interval.of([value for value in values if math.isfinite(value)])


def _winner(values: Mapping[str, Mapping[int, float]], whole: set[str], higher: bool) -> str | None:
    """The method whose paired differences to all others exclude zero, in its favour."""
    rivals = [label for label, each in values.items() if each]
    for label in rivals:
        ahead = [paired(values[label], values[other]) for other in rivals if other != label]
        if label in whole and ahead and all(one.excludes_zero and (one.mean > 0) == higher for one in ahead):
            return label
    return None


def _against_uniform(difference: Interval, higher: bool) -> list[str]:
    if difference.count == 0 or difference.mean == 0 or (difference.mean > 0) == higher:
        return []
    if difference.count < 2:
        return ["behind uniform on the one seed they share"]
    return ["worse than uniform" if difference.excludes_zero else "behind uniform, within the interval"]


Results = Mapping[str, Sequence[RunResult]]
"""Finished runs by method, in the order of their seeds."""


def draw(results: Results, folder: Path, metric: str) -> list[Path]:
    """The pictures of a comparison, written into ``folder``; the paths."""
    runs = {method: [run.records for run in each] for method, each in results.items()}
    written = plots.accuracy(runs, folder / "accuracy", metric=f"metric.{metric}", label=f"{metric.replace('_', ' ')} (%)")
    return written + plots.weights(runs, folder / "weights")


ALIKE = "equal candidates"
"""The note of a method whose candidates never differed."""

# --- whole comparisons -------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Failure:
    """A cell without a result, and why. ``failed`` runs are on record; ``damaged`` folders were not touched."""

    task: str
    method: str
    seed: int
    path: Path
    status: str
    reason: str

    def __str__(self) -> str:
        return f"{self.status}: {self.task}, {self.method}, seed {self.seed}: {self.reason}\n    {self.path}"


@frozen(kw_only=True)
class Comparison:
    """The end of a comparison: a table for each task, the cells without a result, and the pilot sweeps."""

    tables: Sequence[Table]
    failures: Sequence[Failure]
    sweeps: Sequence[Mapping[str, Any]]
    grid: Grid = field(repr=False)

    @property
    def complete(self) -> bool:
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        grid = self.grid
        return {
            "budget": str(grid.budget),
            "seeds": list(grid.seeds),
            "out": str(grid.out),
            "tasks": [one.as_dict() for one in self.tables],
            "failed": [attrs.asdict(one) | {"path": str(one.path)} for one in self.failures],
            "sweeps": [dict(one) for one in self.sweeps],
        }

    def __str__(self) -> str:
        lines = []
        for one in self.tables:
            lines.append(f"{one.task}: {self.heading}")
            columns = one.columns
            width = {name: max(len(name), *(len(row[name]) for row in columns)) for name in columns[0]}
            lines.append("  ".join(name.ljust(width[name]) for name in width).rstrip())
            lines += ["  ".join(row[name].ljust(width[name]) for name in width).rstrip() for row in columns]
            lines.append("")
        return "\n".join([*lines, *self.remarks]).rstrip()

    @property
    def heading(self) -> str:
        seeds = len(self.grid.seeds)
        return f"{self.grid.budget} each, {seeds} seed{'s' * (seeds > 1)}; mean ± half width of the 95 % interval"

    @property
    def remarks(self) -> list[str]:
        """What the tables do not say: how settings were chosen, what has no result."""
        said = []
        if any(one.winner for one in self.tables):
            said.append("★ the intervals of its paired differences to all other methods exclude zero")
        if any(ALIKE in row.notes for one in self.tables for row in one.rows):
            said.append(f"{ALIKE}: they never differed, so nothing was selected; the generator's noise tells them apart")
        for each in self.sweeps:
            chosen = ", ".join(f"{key} = {value}" for key, value in each["chosen_values"].items())
            said.append(
                f"sweep: {each['task']}, {each['method']}: trial {each['chosen'] + 1} of {len(each['trials'])} ({chosen})"
                + (f"; {lost} trials failed" if (lost := sum(one["loss"] is None for one in each["trials"])) else "")
                + (f"; {each['note']}" if each["note"] else "")
            )
        if any(one.status == "failed" for one in self.failures):
            said.append("failed runs keep their place; --retry-failed runs them once more")
        return [*said, *map(str, self.failures)]


def state_of(cell: Cell) -> tuple[str, str | None]:
    """``new``, ``begun``, ``done``, ``failed`` or ``damaged``, and the reason of the last two."""
    folder = RunFolder(cell.path)
    try:
        if folder.config.exists() and not holds(folder, cell.config.to_toml()):
            return "damaged", "it holds a run of another configuration"
        summary = folder.read_summary()
        if summary is None:
            return ("begun" if folder.config.exists() else "new"), None
        if summary.get("status") == "done":
            return "done", None
        if summary.get("status") == "failed":
            return "failed", str(summary.get("error") or "no reason on record")
        return "damaged", f"summary.json has no status 'done' or 'failed': {summary.get('status')!r}"
    except (HgmsError, OSError, ValueError, TypeError) as error:
        return "damaged", str(error)


def run_grid(
    grid: Grid,
    *,
    jobs: int | None = None,
    retry_failed: bool = False,
    fresh: bool = False,
    files: Sequence[str] = (),
    progress: bool = True,
    say: Callable[[str], None] = lambda _line: None,
) -> Comparison:
    """Carries out a grid: sweeps first, then every cell that has no result yet.

    Finished cells are kept as they are, broken ones go on from their checkpoint, failed ones keep their reason unless
    ``retry_failed``; what fails does not stop the rest. ``jobs`` processes at a time: by default one where the budget is in
    seconds or the device is not the CPU, else one a core; 0 runs in this process. ``fresh`` gives every cell a process of its
    own. ``say`` is told what a person should know.
    """
    plugins.notify("hgms_ready")
    planned = sweeps.plan(grid)
    _ensure_writable(grid.out)
    timed = any(one.seconds is not None for one in (grid.budget, grid.sweep.budget if grid.sweep else None) if one is not None)
    if jobs is None:
        jobs = 1 if timed or grid.run.device != "cpu" else workers.cores()
    elif jobs > 1 and timed:
        say(f"{jobs} runs at a time share this machine, and so do their seconds: do not read the timings as those of one alone")
    ended: dict[Path, workers.Ending] = {}
    # plugins that no distribution announces (files, modules) are told to the workers; the others they find themselves
    known = plugins.host().infos.values()
    loaded = [info.module for info in known if info.distribution is None and info.status in ("loaded", "incomplete")]
    try:
        with workers.Crew(count=jobs, plugins=list(dict.fromkeys([*files, *loaded])), fresh=fresh) as crew:

            def carry_out(cells: list[Cell]) -> None:
                wanted = {"new", "begun"} | ({"failed"} if retry_failed else set())
                waiting = [
                    workers.Job(config=cell.config, path=cell.path, title=str(cell))
                    for cell in cells
                    if state_of(cell)[0] in wanted
                ]
                with Board(len(waiting), enabled=progress) as board:
                    for ending in crew.carry_out(
                        waiting,
                        began=lambda job: board.began(job.title),
                        report=lambda job, share, record: board.step(job.title, share, record),
                    ):
                        board.ended(ending.job.title, ending.status, ending.error)
                        ended[ending.job.path] = ending

            chosen = sweeps.carry_out(planned, carry_out)
            cells = grid.cells(chosen)
            carry_out(cells)
    except KeyboardInterrupt:  # wherever it came, also between two runs
        raise Interrupted("interrupted; run the same command again to go on") from None
    return _gather(grid, cells, planned, ended)


def _ensure_writable(folder: Path) -> None:
    """Better now than once for every run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error.strerror or error}; choose another --out") from None


def _gather(
    grid: Grid, cells: Sequence[Cell], planned: Sequence[sweeps.Sweep], ended: Mapping[Path, workers.Ending]
) -> Comparison:
    runs: dict[str, dict[str, list[StoredRun]]] = {}
    failures: list[Failure] = []
    for cell in cells:
        mine = runs.setdefault(cell.task, {}).setdefault(cell.method, [])
        status, reason = state_of(cell)
        if status == "done":
            try:
                mine.append(results.read(cell.path))
                continue
            except CheckpointError as error:
                status, reason = "damaged", str(error)
        ending = ended.get(cell.path)
        if ending is not None and ending.status == "refused":
            status, reason = "damaged", ending.error
        failures.append(
            Failure(
                task=cell.task, method=cell.method, seed=cell.config.seed, path=cell.path, status=status,
                reason=reason or "it did not end",
            )
        )  # fmt: skip
    swept = {(one.task, one.method) for one in planned}
    tables = []
    for task, by_method in runs.items():
        metric = grid.metrics[task]
        notes = {method: [ALIKE] for method in by_method if _alike(by_method[method])}
        for method in by_method if planned else ():
            if (task, method) not in swept:
                notes.setdefault(method, []).append("not swept")
        tables.append(
            table(
                by_method,
                metric,
                grid.reference,
                task=task,
                higher_is_better=next(one for key, one in grid.pairs.items() if key[0] == task).task.metrics[metric],
                failed={method: sum(one.task == task and one.method == method for one in failures) for method in by_method},
                notes=notes,
            )
        )
    return Comparison(tables=tables, failures=failures, sweeps=[one.as_dict() for one in planned], grid=grid)


def _alike(runs: Sequence[StoredRun]) -> bool:
    """Whether there were several candidates and never a difference between them: nothing was selected. With one candidate the
    gap is infinite, and other methods have none: both read as NaN."""
    gaps = [run.columns(["gap"])["gap"][1:] for run in runs]
    return bool(gaps) and all(gap.dtype != object and len(gap) and bool((gap == 0).all()) for gap in gaps)


def compare(
    tasks: Sequence[Any] | Any,
    methods: Sequence[Any] | Any,
    budget: str | Budget,
    seeds: int | Sequence[int] = 5,
    out: str | Path = "runs",
    *,
    run: RunSettings | Mapping[str, Any] | None = None,
    metric: str | None = None,
    reference: str | None = None,
    sweep: SweepSettings | Mapping[str, Any] | None = None,
    jobs: int | None = None,
    retry_failed: bool = False,
    progress: bool = False,
) -> Comparison:
    """``hgms compare`` from Python: every task with every method and seed under one budget, in run folders below ``out``.

    Tasks and methods are names, tables as in a grid file (``{"name": "hg-ms", "label": …, "outer": {"lr": …}}``, with objects
    for parts where you like) or objects of registered classes; methods may also be a table from labels to those. Results that
    are on disk already are used.

    Raises:
        ConfigError: something about the grid is wrong; all of it is listed, and nothing was run.
    """

    def listed(value: Any) -> list[Any]:
        return list(value) if isinstance(value, (list, tuple)) else [value]

    settings = dict(plain(run)) if isinstance(run, RunSettings) else dict(run or {})
    whole: dict[str, Any] = {
        "budget": plain(budget) if isinstance(budget, Budget) else budget,
        "seeds": seeds if isinstance(seeds, int) else list(seeds),
        "task": [_as_table("task", one) for one in listed(tasks)],
        "method": [_as_table("method", one) for one in _labelled(listed(methods))],
        "run": {key: value for key, value in settings.items() if value != "none"} | {"out": str(out)},
    }
    whole |= {key: value for key, value in (("metric", metric), ("reference", reference)) if value is not None}
    if sweep is not None:
        whole["sweep"] = dict(plain(sweep)) if isinstance(sweep, SweepSettings) else dict(sweep)
    return run_grid(load(whole), jobs=jobs, retry_failed=retry_failed, progress=progress)


def _labelled(methods: list[Any]) -> list[Any]:
    """A table from labels to methods (it has no key ``name``) as a list of tables with their labels."""
    found = []
    for one in methods:
        if isinstance(one, Mapping) and "name" not in one:
            for label, each in one.items():
                table = {"name": each} if isinstance(each, str) else _as_table("method", each)
                found.append({**table, "label": label} if isinstance(table, Mapping) else table)
        else:
            found.append(one)
    return found


def _as_table(kind: str, one: Any) -> Any:
    """A component object as the table that makes it, also where it is a part in a table; names as they are."""
    if isinstance(one, str):
        return one
    if isinstance(one, Mapping):
        return {
            key: _as_table(kind, value) if attrs.has(type(value)) or isinstance(value, Mapping) else value
            for key, value in one.items()
        }
    if not attrs.has(type(one)):
        raise ConfigError(
            f"{one!r} is no object of a registered {kind}; give a name, a table, or an object of a class that has a name"
        )
    _ensure_registered(one)
    return plain(one)


def _ensure_registered(one: Any) -> None:
    """Workers build the objects anew from their names, so their classes and those of their parts have to have some."""
    found = registries.default()
    kinds = registries.kinds_of(type(one))
    if kinds and not any((known := found.find(kind.name, one.name)) and known.target is type(one) for kind in kinds):
        raise ConfigError(
            f"{type(one).__name__} is no registered {kinds[0].label}, so no other process could build {one!r}\n"
            f"  put the class into a file with its hook, and load it: from hgms_core.running import host; "
            f'host(["./my_{kinds[0].name}.py"])'
        )
    for part in attrs.fields(type(one)):
        value = getattr(one, part.name)
        if attrs.has(type(value)):
            _ensure_registered(value)


__all__ = [
    "Comparison",
    "Failure",
    "Point",
    "Row",
    "Table",
    "compare",
    "draw",
    "is_share",
    "run_grid",
    "state_of",
    "table",
]
