"""Assignment of runs to workers, and the order of the runs.

All runs of a task are executed in the same way. The unfinished runs of a lost worker are repeated.
Runs that another process executes are not started.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from attrs import define, field

from hgms.comparison.cell import Ending, Report, carry_out, fail_cell, job_of
from hgms.comparison.grid import Cell
from hgms.config import Budget
from hgms.executors import Executor, Job, run_with_retries, unpack_error
from hgms.runs import Execution, RunFolder, ignore
from hgms.store import HeldFolders

PROGRAMS = logging.getLogger("hgms.programs")
"""The logger of messages about parts that cannot be compiled."""

POLL = 1.0
"""Seconds between two checks of runs that other processes execute."""

Kind = tuple[str, Budget]


def _kind(cell: Cell) -> Kind:
    """Return the properties that runs with the same execution share."""
    return cell.task, cell.config.budget


@define(eq=False)
class Coordinator:
    """Execute the cells of a comparison, in this process or by workers.

    If ``executor`` is ``None``, this process executes the cells, one by one. ``plugins`` are files
    that every worker loads.

    All runs of a task are executed in the same way: the first run decides how, and the others wait
    for its decision. ``executions`` contains the decisions by task and budget, because a longer
    budget may justify more preparation.

    Several coordinators may process the same cells, on any machines that share the folders. A run
    belongs to the coordinator with the worker that has its lease. The others check the run from
    time to time, and resume it if no process has its lease any more.
    """

    executor: Executor | None = None
    plugins: Sequence[str] = ()
    executions: dict[Kind, Execution] = field(factory=dict, init=False)
    _warnings: set[str] = field(factory=set, init=False)
    _waiting: deque[Cell] = field(factory=deque, init=False)
    _began: Callable[[Cell], None] = field(default=ignore, init=False)
    _running: dict[Job, Cell] = field(factory=dict, init=False)
    _elsewhere: list[Cell] = field(factory=list, init=False)
    _held: HeldFolders = field(factory=HeldFolders, init=False)
    _awaited: int = field(default=0, init=False)
    _idle: bool = field(default=True, init=False)
    """Whether this round has not started any runs."""

    def __iter__(self) -> Iterator[Job]:
        """Yield the jobs that may start now; a later iteration may yield more jobs."""
        while (job := self.take()) is not None:
            yield job

    def carry_out(
        self,
        cells: Iterable[Cell],
        *,
        began: Callable[[Cell], None] = ignore,
        report: Report = ignore,
        say: Callable[[str], None] = ignore,
    ) -> Iterator[Ending]:
        """Execute all cells and yield their endings in order of arrival.

        ``say`` receives messages for the user about lost workers and about runs of other processes.

        After Ctrl-C, every running step finishes and its state is saved. Then the interrupt
        propagates.
        """
        self._waiting = deque(cells)
        self._began = began
        PROGRAMS.addFilter(self._is_new)
        try:
            while self._waiting or self._elsewhere:
                self._idle = True
                yield from (
                    self._here(report)
                    if self.executor is None
                    else self._there(self.executor, report, say)
                )
                yield from self._look_after(say)
        finally:
            PROGRAMS.removeFilter(self._is_new)

    def _here(self, report: Report) -> Iterator[Ending]:
        while self._waiting:
            cell = self._waiting.popleft()
            self._idle = False
            self._began(cell)
            ending = carry_out(cell, report, self.execution_of(cell))
            self.recall(cell)
            if ending.status == "elsewhere":
                self._elsewhere.append(cell)
            else:
                yield ending

    def _there(
        self, executor: Executor, report: Report, say: Callable[[str], None]
    ) -> Iterator[Ending]:
        self._running.clear()

        def tell(job: Job, event: Mapping[str, Any]) -> None:
            cell = self._running[job]
            self.recall(cell)
            if event["event"] == "step":
                report(cell, event["share"], event["record"])

        for end in run_with_retries(executor, self, tell, say):
            cell = self._running.pop(end.job)
            self.recall(cell)
            if end.outcome is not None:
                packed = end.outcome["error"]
                ending = Ending(
                    cell=cell,
                    status=end.outcome["status"],
                    error=None if packed is None else unpack_error(packed),
                )
            else:
                ending = fail_cell(cell, end.failure)
            if ending.status == "elsewhere":
                self._elsewhere.append(cell)
            else:
                yield ending

    def _look_after(self, say: Callable[[str], None]) -> Iterator[Ending]:
        """Yield the endings of runs that other processes executed.

        Runs that no process executes any more are queued again.
        """
        if not self._elsewhere:
            self._awaited = 0
            return
        # Waiting runs may depend on another process, until it has decided on the execution of
        # their task.
        if (not self._waiting or self._idle) and not all(
            RunFolder(cell.path).summary.exists() for cell in self._elsewhere
        ):
            if (count := len(self._elsewhere)) != self._awaited:
                say(f"waiting for {count} run{'s' * (count > 1)} of other processes")
            self._awaited = count
            time.sleep(POLL)
        others = self._elsewhere
        self._elsewhere = []
        for cell in others:
            self.recall(cell)
            free = self._held.free(cell.path)  # first: a lease ends after its run is stored
            status, error = cell.state()
            if status not in ("new", "begun"):
                yield Ending(cell=cell, status=status, error=error)
            elif free:
                say(f"{cell}: its process has ended; it resumes here")
                self._waiting.append(cell)
            else:
                self._elsewhere.append(cell)

    def take(self) -> Job | None:
        """Return the job of the first run that may start.

        A run may start if the execution of its task is known, or if the run itself is the first to
        decide it.
        """
        for other in self._running.values():
            self.recall(other)
        undecided = {
            _kind(cell) for cell in [*self._running.values(), *self._elsewhere]
        } - self.executions.keys()
        cell = next((cell for cell in self._waiting if _kind(cell) not in undecided), None)
        if cell is None:
            return None
        self._waiting.remove(cell)
        self._idle = False
        job = job_of(cell, self.execution_of(cell), self.plugins)
        self._running[job] = cell
        self._began(cell)
        return job

    def recall(self, cell: Cell) -> None:
        """Store the execution of a run for the other runs of its task.

        It is read from the folder of the run, if it is recorded there.
        """
        if _kind(cell) not in self.executions:
            recorded = Execution.from_environment(RunFolder(cell.path).read_environment())
            if recorded is not None and recorded.compile is not None:  # else undecided
                self.executions[_kind(cell)] = recorded

    def execution_of(self, cell: Cell) -> Execution | None:
        """Return the execution of a run, as far as runs of its task have decided it."""
        if _kind(cell) in self.executions:
            return self.executions[_kind(cell)]
        alike = [execution for (task, _), execution in self.executions.items() if task == cell.task]
        return attrs.evolve(alike[0], compile=None) if alike else None

    def _is_new(self, record: logging.LogRecord) -> bool:
        """Return whether no other run has logged the same warning, ignoring numbers."""
        text = "".join(letter for letter in record.getMessage() if not letter.isdigit())
        known = text in self._warnings
        self._warnings.add(text)
        return not known
