"""One run of a comparison, carried out in this process; ``python -m hgms_compare.worker`` is a process that carries out one run
after another.

A worker reads jobs and writes what happens as lines of JSON. When its parent is gone it ends at once: what it was doing resumes
from its checkpoint.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import logging
import os
import queue
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from hgms_compare.grid import Cell
from hgms_compare.usage import measured
from hgms_core import CheckpointError, HgmsError
from hgms_core.registry import Registry
from hgms_run import (
    DiskError,
    Execution,
    FolderInUse,
    Interrupted,
    RunConfig,
    RunFolder,
    record_failure,
    replace_file,
    run_config,
    stoppable,
)

PATIENCE = 20.0
"""Seconds a worker waits for a folder that another process holds: the orphan of a killed comparison ends by itself."""

PROGRAMS = logging.getLogger("hgms.programs")
"""Where what cannot be compiled is said."""

REPORT_EVERY = 0.2
"""Seconds between two reports of a run's progress."""

Report = Callable[[Cell, float, Mapping[str, Any]], None]
"""``report(cell, share of its budget spent, newest record)``."""


@frozen(kw_only=True)
class Ending:
    """How a run ended: ``done``, ``failed`` (recorded in its summary), ``refused`` (its folder is damaged; nothing was
    written), ``stopped`` (the disk is full, or another process has the folder: it goes on when it is asked for again) or
    ``interrupted``."""

    cell: Cell
    status: str
    error: str | None = None


def carry_out(cell: Cell, report: Report, execution: Execution | None = None) -> Ending:
    """One run, with its use of the machine measured; whatever ends it, but for Ctrl-C, is an ending. ``execution`` is how the
    task's other runs are carried out (None: this is the first)."""
    reported = 0.0

    def watch(_info: object, record: Mapping[str, Any], share: float) -> None:
        nonlocal reported
        now = time.monotonic()
        if now - reported >= REPORT_EVERY:
            reported = now
            report(cell, share, record)

    folder = RunFolder(cell.path)
    try:
        with contextlib.suppress(CheckpointError):
            summary = folder.read_summary()
            if summary is not None and summary.get("status") == "failed":
                folder.summary.unlink()  # asked for again: until it ends it is an unfinished run
        with measured(cell.path, cell.config.run.device):
            run_config(cell.config, resume=True, watch=watch, path=cell.path, patience=PATIENCE, execution=execution)
    except (KeyboardInterrupt, Interrupted):
        raise
    except (DiskError, FolderInUse) as error:
        return Ending(cell=cell, status="stopped", error=str(error))
    except CheckpointError as error:
        return Ending(cell=cell, status="refused", error=str(error))
    except MemoryError as error:
        return failed(cell, f"out of memory: {error}".rstrip(": "))
    except HgmsError as error:
        return failed(cell, str(error))
    except BaseException as error:
        with contextlib.suppress(DiskError):
            text = "".join(traceback.format_exception(error))
            replace_file(folder.traceback, text.encode(errors="backslashreplace"))
        return failed(cell, f"{type(error).__name__}: {error}{_place(error)}")
    return Ending(cell=cell, status="done")


def failed(cell: Cell, error: str) -> Ending:
    """A failure, recorded in the run's folder."""
    try:
        cell.path.mkdir(parents=True, exist_ok=True)
        record_failure(RunFolder(cell.path), cell.config, error)
    except (HgmsError, OSError) as why:
        status = "stopped" if isinstance(why, DiskError) else "refused"
        return Ending(cell=cell, status=status, error=f"{error}; and the failure could not be recorded: {why}")
    return Ending(cell=cell, status="failed", error=error)


def _place(error: BaseException) -> str:
    """The last line of somebody's own code, and where the rest stands."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = (*(f"{Path(inspect.getfile(part)).parent}{os.sep}" for part in (torch, HgmsError, RunFolder, Cell)), "<")
    library = sysconfig.get_path("stdlib")
    files = [(frame, frame.filename) for frame in frames if not frame.filename.startswith(ours)]
    own = [frame for frame, name in files if not name.startswith(library) or "site-packages" in name]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno}; all of it is in traceback.txt)" if own else ""


class _Warnings(logging.Handler):
    """Hands on what a worker has to say of programs: its parent has the terminal."""

    def __init__(self, tell: Callable[..., None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(event="warning", text=record.getMessage())


def main(arguments: Sequence[str]) -> None:
    """A worker: one run per line of standard input, until that closes."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a plugin prints must not come between
    lines: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # the parent is gone, or done with us

    threading.Thread(target=listen, daemon=True).start()
    threads, places, files = int(arguments[0]), json.loads(arguments[1]), arguments[2:]
    sys.path += [place for place in places if place not in sys.path]
    registry = Registry.load(files)
    gc.collect()
    gc.freeze()  # what is imported stays: collecting between two runs need not look at it

    def tell(**event: Any) -> None:
        out.write(json.dumps(event) + "\n")

    def report(_cell: Cell, share: float, record: Mapping[str, Any]) -> None:
        shown = {key: value for key, value in record.items() if isinstance(value, (int, float, str))}
        tell(event="step", share=share, record=shown)

    PROGRAMS.addHandler(_Warnings(tell))
    with stoppable():
        while True:
            try:
                message = json.loads(lines.get())
            except KeyboardInterrupt:
                return
            torch.set_num_threads(threads)
            try:
                config = RunConfig.from_dict(message["config"], registry=registry)
                execution = None if message["execution"] is None else Execution.of(message["execution"])
                ending = carry_out(Cell(config=config, path=Path(message["path"])), report, execution)
            except KeyboardInterrupt:
                tell(event="ended", status="interrupted", error=None)
                continue
            tell(event="ended", status=ending.status, error=ending.error)


if __name__ == "__main__":
    main(sys.argv[1:])
