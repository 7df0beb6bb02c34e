"""Run the grid of a comparison and collect its results: one table per task, and missing results.

Running a grid again resumes it: a cell is run only if its folder contains no result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hgms.arguments import require
from hgms.comparison.comparison import Comparison, gather
from hgms.comparison.coordinator import Executions, distinct_warnings, ensure_room, runs_of
from hgms.comparison.grid import Grid
from hgms.config.as_table import plain
from hgms.executors import Executor, Here, Local, cores, run_together, to_stderr
from hgms.runs import RunFolder, ignore, undeclared_plugins
from hgms.store import LEASE, DiskError, hold_lease, writing
from hgms_core import ConfigError
from hgms_core.errors import CheckpointError


def run_grid(
    grid: Grid,
    *,
    jobs: int | None = None,
    executor: Executor | None = None,
    retry_failed: bool = False,
    progress: bool = True,
    say: Callable[[str], None] = lambda _line: None,
) -> Comparison:
    """Run every cell of a grid that has no result.

    Finished cells are skipped and interrupted cells resume from their checkpoint. Failed cells keep
    their reason unless ``retry_failed``; a failure does not stop the other cells.

    ``jobs`` is the number of parallel processes. The default is 1 if the budget is in seconds or
    the device is not the CPU, else one per core. With 0, runs are executed in this process; objects
    that no other process can build always are.
    ``executor`` replaces these processes. ``say`` receives messages for the user.

    Several calls may run the same grid at once, from any machines that share its folder. Each run
    is executed by one call, and all calls return the same tables.
    """
    require(
        not grid.own or not (jobs or executor),
        "not-supported",
        f"{f'jobs={jobs}' if jobs else 'an executor'} is not supported for problems and "
        "methods that are objects of this process",
        place=("jobs" if jobs else "executor",),
        hint="omit it to run everything in this process, or register the objects in a plugin "
        "(hgms new plugin)",
    )
    host = grid.registry.host
    host.notify("hgms_ready", settings=plain(grid.run))
    _ensure_writable(grid.out)
    timed = grid.budget.seconds is not None
    if grid.own:
        jobs = 0
    elif jobs is None:
        jobs = 1 if timed or grid.run.device != "cpu" else cores()
    elif jobs > 1 and timed and grid.run.clock == "wall":  # processor time is per run
        say(
            f"{jobs} runs at a time share this machine, and so do their seconds: do not read the "
            "timings as those of one alone"
        )
    wanted = {"new", "begun"} | ({"failed"} if retry_failed else set())
    executor = executor or (Local(jobs=jobs) if jobs else Here())
    executions = Executions()
    cells = grid.cells()
    for cell in cells:  # finished cells too: the other cells use the same execution
        executions.recall(cell)
    states = [(cell, cell.state()[0]) for cell in cells]
    finished = {cell.path for cell, state in states if state == "done"}
    for path in finished:
        _remove_leftovers(path)
    waiting = [cell for cell, state in states if state in wanted]
    runs = runs_of(waiting, executions, undeclared_plugins(host), here=isinstance(executor, Here))
    echo = to_stderr if progress else ignore
    with distinct_warnings():
        results, _ = run_together(runs, executor, bars=progress, say=echo, look=False)
    endings = {ending.cell.path: ending for ending in results.values()}
    return gather(grid, cells, endings, finished)


def _remove_leftovers(folder: Path) -> None:
    """Remove the files of a process that was killed after its run had finished.

    These are its lease and the state before the last one.
    """
    if (folder / LEASE).exists():
        with contextlib.suppress(CheckpointError), hold_lease(folder, patience=None):
            RunFolder(folder).remove_old_states()


def _ensure_writable(folder: Path) -> None:
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        ensure_room(folder, 0)
    except DiskError as error:
        raise ConfigError(
            error.code, error.message, place=error.place, hint="choose another --out"
        ) from None


def listing(grid: Grid) -> list[dict[str, Any]]:
    """List every run of the grid."""
    return [
        {
            "task": cell.task,
            "method": cell.method,
            "seed": cell.config.seed,
            "state": cell.state()[0],
            "folder": cell.path,
        }
        for cell in grid.cells()
    ]
