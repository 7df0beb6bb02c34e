"""Comparisons: a grid of runs carried out, and its end: a table for each task, what has no result, how settings were chosen.

Carrying out is resuming: a cell is run only where its folder holds no result yet. :func:`compare` makes the grid from Python.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from attrs import field, frozen

from hgms_compare import sweep as sweeps
from hgms_compare import workers
from hgms_compare.board import Board
from hgms_compare.grid import Cell, Grid, SweepSettings
from hgms_compare.grid_file import load
from hgms_core import Budget, CheckpointError, ConfigError, HgmsError
from hgms_core.registry import Registry, kinds_of
from hgms_results import StoredRun, Table, read_run, table
from hgms_run import Interrupted, RunFolder, RunSettings, plain, stoppable

ALIKE = "equal candidates"
"""The note of a method whose candidates never differed."""


@frozen(kw_only=True)
class Failure:
    """A cell without a result, and why. ``failed`` runs are on record; ``damaged`` folders were not touched; ``begun`` and
    ``new`` ones go on when the comparison is asked for again."""

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
            said.append("★ ahead of every other method: each difference's interval excludes zero")
        pairs = [pair for one in self.tables for pair in one.pairs.values() if pair.count > 1]
        if pairs:
            said.append(
                "differences: paired by seed, intervals by Holm's rule over all pairs (chance of a false one: at most 5 %)"
            )
        if any(pair.half_width == 0 for pair in pairs):
            said.append("± 0: the same in every seed, which says nothing about chance")
        if any(ALIKE in row.notes for one in self.tables for row in one.rows):
            said.append(f"{ALIKE}: they never differed, so nothing was selected; the generator's noise tells them apart")
        if any("sources" in getattr(one.task, "traits", ()) for one in self.grid.pairs.values()):
            said.append(
                "losses are those of the x that each method learned its weights with; "
                "to compare mixtures, tune on each (hgms mix GRID --method LABEL)"
            )
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


# --- carrying out ------------------------------------------------------------------------------------------------------


def state_of(cell: Cell) -> tuple[str, str | None]:
    """``new``, ``begun``, ``done``, ``failed`` or ``damaged``, and the reason of the last two."""
    folder = RunFolder(cell.path)
    try:
        if folder.config.exists() and not folder.holds(cell.config.to_toml()):
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
    progress: bool = True,
    say: Callable[[str], None] = lambda _line: None,
) -> Comparison:
    """Carries out a grid: sweeps first, then every cell that has no result yet.

    Finished cells are kept as they are, broken ones go on from their checkpoint, failed ones keep their reason unless
    ``retry_failed``; what fails does not stop the rest. ``jobs`` processes at a time: by default one where the budget is in
    seconds or the device is not the CPU, else one a core; 0 runs in this process. ``fresh`` gives every cell a process of its
    own. ``say`` is told what a person should know.
    """
    host = grid.registry.host
    host.notify("hgms_ready", settings=plain(grid.run))
    planned = sweeps.plan(grid)
    _ensure_writable(grid.out)
    timed = any(one.seconds is not None for one in (grid.budget, grid.sweep.budget if grid.sweep else None) if one is not None)
    if jobs is None:
        jobs = 1 if timed or grid.run.device != "cpu" else workers.cores()
    elif jobs > 1 and timed:
        say(f"{jobs} runs at a time share this machine, and so do their seconds: do not read the timings as those of one alone")
    ended: dict[Path, workers.Ending] = {}
    # plugins that no distribution announces (files, modules) are told to the workers; the others they find themselves
    files = [
        info.module for info in host.infos.values() if info.distribution is None and info.status in ("loaded", "incomplete")
    ]
    try:
        with stoppable(), workers.Crew(count=jobs, plugins=files, fresh=fresh) as crew:

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
    except KeyboardInterrupt as error:  # wherever it came, also between two runs
        number = getattr(error, "number", signal.SIGINT)
        raise Interrupted("interrupted; run the same command again to go on", number) from None
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
    gaps: dict[tuple[str, str], list[np.ndarray]] = {}
    for cell in cells:
        mine = runs.setdefault(cell.task, {}).setdefault(cell.method, [])
        status, reason = state_of(cell)
        if status == "done":
            try:
                run = read_run(cell.path)
                gaps.setdefault((cell.task, cell.method), []).append(run.columns(["gap"])["gap"][1:])
                mine.append(run)
                continue
            except CheckpointError as error:
                status, reason = "damaged", str(error)
        ending = ended.get(cell.path)
        if ending is not None and ending.status == "refused":
            status, reason = "damaged", ending.error
        elif ending is not None and ending.status == "stopped":
            reason = ending.error
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
        notes = {method: [ALIKE] for method in by_method if _alike(gaps.get((task, method), []))}
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


def _alike(gaps: Sequence[np.ndarray]) -> bool:
    """Whether there were several candidates and never a difference between them in any run: nothing was selected. With one
    candidate the gap is infinite, and other methods have none: both read as NaN."""
    return bool(gaps) and all(gap.dtype != object and len(gap) and bool((gap == 0).all()) for gap in gaps)


# --- from Python -------------------------------------------------------------------------------------------------------


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
    registry: Registry | None = None,
) -> Comparison:
    """``hgms compare`` from Python: every task with every method and seed under one budget, in run folders below ``out``.

    Tasks and methods are names, tables as in a grid file (``{"name": "hg-ms", "label": …, "outer": {"lr": …}}``, with objects
    for parts where you like) or objects of classes in ``registry`` (None: what is installed); methods may also be a table from
    labels to those. Results that are on disk already are used.

    Raises:
        ConfigError: something about the grid is wrong; all of it is listed, and nothing was run.
    """

    def listed(value: Any) -> list[Any]:
        return list(value) if isinstance(value, (list, tuple)) else [value]

    registry = registry or Registry.load()
    settings = dict(plain(run)) if isinstance(run, RunSettings) else dict(run or {})
    whole: dict[str, Any] = {
        "budget": plain(budget) if isinstance(budget, Budget) else budget,
        "seeds": seeds if isinstance(seeds, int) else list(seeds),
        "task": [_as_table("task", task, registry) for task in listed(tasks)],
        "method": [_as_table("method", method, registry) for method in _labelled(listed(methods), registry)],
        "run": {key: value for key, value in settings.items() if value != "none"} | {"out": str(out)},
    }
    whole |= {key: value for key, value in (("metric", metric), ("reference", reference)) if value is not None}
    if sweep is not None:
        whole["sweep"] = dict(plain(sweep)) if isinstance(sweep, SweepSettings) else dict(sweep)
    return run_grid(load(whole, registry=registry), jobs=jobs, retry_failed=retry_failed, progress=progress)


def _labelled(methods: list[Any], registry: Registry) -> list[Any]:
    """A table from labels to methods (it has no key ``name``) as a list of tables with their labels."""
    tables = []
    for method in methods:
        if not isinstance(method, Mapping) or "name" in method:
            tables.append(method)
            continue
        for label, component in method.items():
            table = {"name": component} if isinstance(component, str) else _as_table("method", component, registry)
            tables.append({**table, "label": label} if isinstance(table, Mapping) else table)
    return tables


def _as_table(kind: str, component: Any, registry: Registry) -> Any:
    """A component object as the table that makes it, also where it is a part in a table; names as they are."""
    if isinstance(component, str):
        return component
    if isinstance(component, Mapping):
        return {
            key: _as_table(kind, value, registry) if attrs.has(type(value)) or isinstance(value, Mapping) else value
            for key, value in component.items()
        }
    if not attrs.has(type(component)):
        raise ConfigError(
            f"{component!r} is no object of a registered {kind}; give a name, a table, or an object of a class that has a name"
        )
    _ensure_registered(component, registry)
    return plain(component)


def _ensure_registered(component: Any, registry: Registry) -> None:
    """Workers build the objects anew from their names, so their classes and those of their parts have to have some."""
    cls = type(component)
    kinds = kinds_of(cls)
    known = [registry.find(kind.name, component.name) for kind in kinds]
    if kinds and not any(other is not None and other.target is cls for other in known):
        raise ConfigError(
            f"{cls.__name__} is no registered {kinds[0].label}, so no other process could build {component!r}\n"
            f"  put the class into a file with its hook, and load it: from hgms_core.registry import Registry; "
            f'compare(…, registry=Registry.load(["./my_{kinds[0].name}.py"]))'
        )
    for part in attrs.fields(cls):
        value = getattr(component, part.name)
        if attrs.has(type(value)):
            _ensure_registered(value, registry)


__all__ = ["Comparison", "Failure", "compare", "run_grid", "state_of"]
