"""Comparisons: a grid of runs carried out, and its end: a table for each task, what has no result, how settings were chosen.

Carrying out is resuming: a cell is run only where its folder holds no result yet. :func:`compare` makes the grid from Python.
"""

from __future__ import annotations

import itertools
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from hgms_compare import sweep as sweeps
from hgms_compare.board import Board
from hgms_compare.comparison import Comparison, gather
from hgms_compare.crew import Crew, cores
from hgms_compare.grid import Cell, Grid, SweepSettings
from hgms_compare.grid_file import load
from hgms_compare.worker import Ending
from hgms_core import Budget, ConfigError
from hgms_core.registry import Registry
from hgms_run import Interrupted, RunFolder, RunSettings, kinds_of, plain, stoppable


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
    own. ``say`` gets what a person should know.
    """
    host = grid.registry.host
    host.notify("hgms_ready", settings=plain(grid.run))
    planned = sweeps.plan(grid)
    _ensure_writable(grid.out)
    trial = grid.sweep.budget if grid.sweep else None
    timed = any(budget is not None and budget.seconds is not None for budget in (grid.budget, trial))
    if jobs is None:
        jobs = 1 if timed or grid.run.device != "cpu" else cores()
    elif jobs > 1 and timed:
        say(f"{jobs} runs at a time share this machine, and so do their seconds: do not read the timings as those of one alone")
    wanted = {"new", "begun"} | ({"failed"} if retry_failed else set())
    endings: dict[Path, Ending] = {}
    # the workers load the plugins that no distribution announces (files, modules); the others they find themselves
    files = [
        info.module for info in host.infos.values() if info.distribution is None and info.status in ("loaded", "incomplete")
    ]
    try:
        with stoppable(), Crew(count=jobs, plugins=files, fresh=fresh) as crew:

            def carry_out(cells: Sequence[Cell]) -> None:
                for cell in cells:  # those that are finished, too: the others are carried out as they were
                    crew.recall(cell)
                waiting = [cell for cell in cells if cell.state()[0] in wanted]
                with Board(len(waiting), enabled=progress) as board:
                    for ending in crew.carry_out(waiting, began=board.began, report=board.step):
                        board.ended(ending.cell, ending.status, ending.error)
                        endings[ending.cell.path] = ending

            chosen = sweeps.carry_out(planned, carry_out)
            cells = grid.cells(chosen)
            carry_out(cells)
    except KeyboardInterrupt as error:  # wherever it came, also between two runs
        number = getattr(error, "number", signal.SIGINT)
        raise Interrupted("interrupted; run the same command again to go on", number) from None
    return gather(grid, cells, planned, endings)


def _ensure_writable(folder: Path) -> None:
    """Better now than once for every run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error.strerror or error}; choose another --out") from None


def listing(grid: Grid) -> list[dict[str, Any]]:
    """Every run of the grid: the sweep's trials, whose settings it says when it comes to them, then the cells."""
    trials = []
    for sweep in sweeps.plan(grid):
        for number, seed in itertools.product(range(sweep.settings.trials), sweep.settings.seeds):
            folder = RunFolder(sweep.path(number, seed))
            state = (folder.read_summary() or {}).get("status", "begun" if folder.begun else "new")
            row = {"task": sweep.task, "method": sweep.method, "trial": number, "seed": seed}
            trials.append({**row, "state": str(state), "folder": folder.path})
    cells: list[dict[str, Any]] = [
        {"task": cell.task, "method": cell.method, "seed": cell.config.seed, "state": cell.state()[0], "folder": cell.path}
        for cell in grid.cells()
    ]
    return [*trials, *({**cell, "trial": None} for cell in cells)] if trials else cells


def work_left(grid: Grid, rows: Sequence[Mapping[str, Any]]) -> str:
    """How much of a listing is left to do, in seconds where the budgets are."""
    left = [row for row in rows if row["state"] in ("new", "begun")]
    trial = (grid.sweep.budget if grid.sweep is not None else None) or grid.budget
    budgets = [trial if row.get("trial") is not None else grid.budget for row in left]
    seconds = [budget.seconds for budget in budgets if budget.seconds is not None]
    time = f": {sum(seconds):,.0f} s of steps, one run at a time" if seconds and len(seconds) == len(left) else ""
    return f"{len(left)} of {len(rows)} runs to do{time}"


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
