"""Run one cell of a comparison, record how it ends, and wrap it as a job of an executor."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from hgms.comparison.grid import Cell
from hgms.comparison.usage import measure_usage
from hgms.distributed import RankLost
from hgms.executors import BUSY, RemoteProgress, Tell, as_error, pack_error
from hgms.plugins import Registry
from hgms.runs import (
    LEAVING,
    Execution,
    RunConfig,
    RunFolder,
    Watcher,
    line_of,
    record_failure,
    run_config,
)
from hgms.store import DiskError, FolderInUse, replace_file
from hgms_core import HgmsError, Record, RunInfo
from hgms_core.errors import CheckpointError, ErrorGroup, OutOfMemory

PATIENCE = 0.5
"""Seconds to wait for a folder that another process has locked. An orphan of a killed comparison
exits automatically.
"""


@frozen(kw_only=True)
class Ending:
    """The end of a run, as a status.

    - ``done``
    - ``failed``: recorded in its summary
    - ``rejected``: its folder is damaged; no file was written
    - ``stopped``: the disk is full; the run resumes when it is requested again
    - ``elsewhere``: another process has the folder
    """

    cell: Cell
    status: str
    error: HgmsError | None = None


def carry_out(cell: Cell, watch: Watcher, execution: Execution | None = None) -> Ending:
    """Run one cell and measure its resources. Every exception except Ctrl-C becomes an Ending.

    ``execution`` states how the task's other runs are executed (``None``: this is the first).
    """
    executed = False  # False: read from the folder, because another process finished the run

    def see(info: RunInfo, record: Record, share: float) -> None:
        nonlocal executed
        executed = True
        watch(info, record, share)

    try:
        with measure_usage(cell.path, cell.config.run.device) as usage:
            run_config(
                cell.config,
                resume=True,
                watch=see,
                path=cell.path,
                patience=PATIENCE,
                execution=execution,
            )
            usage.ours = executed
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, SystemExit) and LEAVING.is_set():
            raise
        return _ended_by(cell, error)
    return Ending(cell=cell, status="done")


def _ended_by(cell: Cell, error: BaseException) -> Ending:
    """Convert the exception of a run to its Ending."""
    for kind, status in (
        (FolderInUse, "elsewhere"),
        (DiskError, "stopped"),
        (CheckpointError, "rejected"),
        (RankLost, "rejected"),
    ):
        if isinstance(error, kind):
            return Ending(cell=cell, status=status, error=error)
    if isinstance(error, MemoryError):
        return fail_cell(cell, OutOfMemory("out-of-memory", f"out of memory: {error}".rstrip(": ")))
    if isinstance(error, HgmsError):
        return fail_cell(cell, error)
    with contextlib.suppress(DiskError):
        text = "".join(traceback.format_exception(error))
        replace_file(RunFolder(cell.path).traceback, text.encode(errors="backslashreplace"))
    line = line_of(error, [cell.config.method, cell.config.task]) or " (see traceback.txt)"
    return fail_cell(cell, HgmsError("unexpected-error", f"{type(error).__name__}: {error}{line}"))


def fail_cell(cell: Cell, error: HgmsError) -> Ending:
    """Record a failure in the run's folder."""
    try:
        record_failure(RunFolder(cell.path), cell.config, str(error))
    except FolderInUse as why:
        return Ending(cell=cell, status="elsewhere", error=why)
    except (HgmsError, OSError) as why:
        status = "stopped" if isinstance(why, DiskError) else "rejected"
        second = as_error(why)
        unrecorded = HgmsError(
            "not-recorded",
            f"the failure cannot be recorded: {second.message}",
            place=second.place,
            hint=second.hint,
        )
        return Ending(cell=cell, status=status, error=ErrorGroup([*error.errors, unrecorded]))
    return Ending(cell=cell, status="failed", error=error)


@functools.cache
def _registry(plugins: tuple[str, ...]) -> Registry:
    """The components that are registered in a worker, loaded once."""
    return Registry.load(plugins)


def work(arguments: Mapping[str, Any], tell: Tell) -> Mapping[str, Any]:
    """Execute the run of ``arguments`` as a job; report its steps."""
    config = RunConfig.from_dict(
        arguments["config"], registry=_registry(tuple(arguments["plugins"]))
    )
    execution = None if arguments["execution"] is None else Execution.of(arguments["execution"])
    cell = Cell(config=config, path=Path(arguments["path"]))
    return work_here({"cell": cell, "execution": execution}, tell)


def work_here(arguments: Mapping[str, Any], tell: Tell) -> Mapping[str, Any]:
    """Execute a cell in this process; report its steps."""
    watch = RemoteProgress(tell).watch
    ending = carry_out(arguments["cell"], watch, arguments["execution"])
    if ending.status == "elsewhere":
        return BUSY
    return {
        "status": ending.status,
        "error": None if ending.error is None else pack_error(ending.error),
    }
