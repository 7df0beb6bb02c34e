"""The runs of a comparison as shared work, and how they are executed.

All runs of a task are executed in the same way: the first run decides how, and the others wait for
its decision.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from attrs import define, field, frozen

from hgms.comparison.cell import Ending, fail_cell
from hgms.comparison.grid import Cell
from hgms.config import Budget
from hgms.executors import BUSY, Job, Needs, Piece, unpack_error
from hgms.runs import Execution, RunFolder
from hgms.store import writing
from hgms_core import HgmsError

ROOM = 1 << 18
"""Bytes that must be free on the disk for a run to resume."""

PROGRAMS = logging.getLogger("hgms.programs")
"""The logger of messages about parts that cannot be compiled."""

Kind = tuple[str, Budget]


def _kind(cell: Cell) -> Kind:
    """Return the properties that runs with the same execution share."""
    return cell.task, cell.config.budget


@define(eq=False)
class Executions:
    """How the runs of each task and budget are executed, as the first of them decides.

    A longer budget may justify more preparation, so budgets differ.
    """

    decided: dict[Kind, Execution] = field(factory=dict, init=False)
    begun: dict[Path, Cell] = field(factory=dict, init=False)

    def recall(self, cell: Cell) -> None:
        """Store the execution of a run for the other runs of its task.

        It is read from the folder of the run, if it is recorded there.
        """
        if _kind(cell) not in self.decided:
            recorded = Execution.from_environment(RunFolder(cell.path).read_environment())
            if recorded is not None and recorded.compile is not None:  # else undecided
                self.decided[_kind(cell)] = recorded

    def is_known(self, cell: Cell) -> bool:
        """Return whether a run may start: the execution is decided, or the run is the first."""
        others = [other for other in self.begun.values() if _kind(other) == _kind(cell)]
        for other in others:
            self.recall(other)
        return not others or _kind(cell) in self.decided

    def of(self, cell: Cell) -> Execution | None:
        """Return the execution of a run, as far as runs of its task have decided it."""
        if _kind(cell) in self.decided:
            return self.decided[_kind(cell)]
        alike = [execution for (task, _), execution in self.decided.items() if task == cell.task]
        return attrs.evolve(alike[0], compile=None) if alike else None


@frozen(kw_only=True, eq=False)
class Run(Piece):
    """A cell as a work item; ``plugins`` are files that a worker loads.

    Without workers (``here``), this process executes the cell.
    """

    cell: Cell
    executions: Executions
    plugins: Sequence[str]
    here: bool

    def is_ready(self) -> bool:
        return self.executions.is_known(self.cell)

    def job(self) -> Job:
        cell = self.cell
        execution = self.executions.of(cell)
        self.executions.begun[cell.path] = cell
        if self.here:
            arguments = {"cell": cell, "execution": execution}
            return Job(
                title=self.title, function="hgms.comparison.cell:work_here", arguments=arguments
            )
        return Job(
            title=self.title,
            function="hgms.comparison.cell:work",
            arguments={
                "config": cell.config.as_dict(),
                "path": str(cell.path.absolute()),
                "execution": None if execution is None else execution.as_table(),
                "plugins": list(self.plugins),
            },
            needs=Needs.of_run(cell.config.run),
        )

    def release(self) -> None:
        self.executions.begun.pop(self.cell.path, None)

    def fail(self, error: HgmsError) -> Any:
        ending = fail_cell(self.cell, error)
        return BUSY if ending.status == "elsewhere" else self.ended(ending)

    def ended(self, ending: Ending) -> Ending:
        self.executions.recall(self.cell)
        self.release()
        if ending.status == "stopped":  # every other run would stop, too
            ensure_room(Path(self.cell.config.run.out))
        return ending


def runs_of(
    cells: Sequence[Cell], executions: Executions, plugins: Sequence[str], here: bool
) -> list[Run]:
    """Return cells as work items, whose results are endings."""

    def run_of(cell: Cell) -> Run:
        def finished() -> Ending | None:
            status, error = cell.state()
            unfinished = status in ("new", "begun")
            return None if unfinished else run.ended(Ending(cell=cell, status=status, error=error))

        def result(outcome: Mapping[str, Any]) -> Ending:
            error = None if outcome["error"] is None else unpack_error(outcome["error"])
            return run.ended(Ending(cell=cell, status=outcome["status"], error=error))

        run = Run(
            title=str(cell),
            path=cell.path,
            cell=cell,
            executions=executions,
            plugins=plugins,
            here=here,
            finished=finished,
            result=result,
            words=lambda ending: ending.status,
            error=lambda ending: ending.error,
        )
        return run

    return [run_of(cell) for cell in cells]


def ensure_room(folder: Path, size: int = ROOM) -> None:
    """Check the disk once instead of for every run.

    Raises
    ------
    DiskError
        If ``size`` bytes cannot be written to the folder.
    """
    with writing(folder), tempfile.TemporaryFile(dir=folder) as stream:
        stream.write(bytes(size))
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def distinct_warnings() -> Iterator[None]:
    """Log each warning about compilation once, ignoring numbers."""
    known: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = "".join(letter for letter in record.getMessage() if not letter.isdigit())
        is_known = text in known
        known.add(text)
        return not is_known

    PROGRAMS.addFilter(is_new)
    try:
        yield
    finally:
        PROGRAMS.removeFilter(is_new)
