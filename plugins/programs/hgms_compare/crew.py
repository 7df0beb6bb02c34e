"""Runs in processes of their own (:mod:`hgms_compare.worker`): a killed one takes no other with it, and each has its share of
the cores. After a failure, or with ``fresh``, the next run gets a new process. Parent and worker exchange lines of JSON over
the worker's standard input and output."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import attrs
from attrs import define, field

from hgms_compare.grid import Cell
from hgms_compare.usage import frozen_heap
from hgms_compare.worker import PROGRAMS, Ending, Report, carry_out, failed
from hgms_core import Budget, HgmsError
from hgms_run import Execution, RunFolder, ignore


def cores() -> int:
    """The cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


Kind = tuple[str, Budget]


def _kind(cell: Cell) -> Kind:
    """What runs have in common that are carried out alike."""
    return cell.task, cell.config.budget


@define(eq=False)
class Crew:
    """``with Crew(count=2) as crew: for ending in crew.carry_out(cells): …``: workers that stay for the next cells.

    ``count`` workers at a time; 0 carries out the cells in this process, one by one. ``plugins`` are files that every worker
    loads; ``fresh`` gives each cell a process of its own. All runs of a task are carried out alike: the first decides how, and
    the others wait until it has; ``executions`` holds what was decided, by task and budget (a longer one may pay for more).
    """

    count: int
    plugins: Sequence[str] = ()
    fresh: bool = False
    executions: dict[Kind, Execution] = field(factory=dict, init=False)
    _warnings: set[str] = field(factory=set, init=False)
    _events: queue.Queue[tuple[_Worker, Mapping[str, Any]]] = field(factory=queue.Queue, init=False)
    _idle: list[_Worker] = field(factory=list, init=False)
    _running: dict[_Worker, Cell] = field(factory=dict, init=False)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in [*self._idle, *self._running]:
            worker.close()
        self._idle.clear()
        self._running.clear()

    def carry_out(
        self, cells: Iterable[Cell], *, began: Callable[[Cell], None] = ignore, report: Report = ignore
    ) -> Iterator[Ending]:
        """The endings of all cells, as they come.

        Ctrl-C lets every running step finish and its state be saved, then goes on upwards.
        """
        cells = list(cells)
        PROGRAMS.addFilter(self._is_new)
        try:
            if self.count == 0:
                with frozen_heap() if cells else contextlib.nullcontext():
                    for cell in cells:
                        began(cell)
                        yield carry_out(cell, report, self.known(cell))
                        self.recall(cell)
            else:
                yield from self._dispatch(deque(cells), began, report)
        except KeyboardInterrupt:
            self._interrupt()
            raise
        finally:
            PROGRAMS.removeFilter(self._is_new)

    def _is_new(self, record: logging.LogRecord) -> bool:
        """Whether no other run gave the same warning, whatever its numbers."""
        text = "".join(letter for letter in record.getMessage() if not letter.isdigit())
        known = text in self._warnings
        self._warnings.add(text)
        return not known

    def recall(self, cell: Cell) -> None:
        """Takes how a run is carried out, if its folder tells, for the other runs of its task."""
        if _kind(cell) not in self.executions:
            recorded = Execution.recorded(RunFolder(cell.path).read_environment())
            if recorded is not None and recorded.compile is not None:  # else it is not decided yet
                self.executions[_kind(cell)] = recorded

    def known(self, cell: Cell) -> Execution | None:
        """How a run is to be carried out, as far as runs of its task have decided it."""
        if _kind(cell) in self.executions:
            return self.executions[_kind(cell)]
        alike = [execution for (task, _), execution in self.executions.items() if task == cell.task]
        return attrs.evolve(alike[0], compile=None) if alike else None

    def _next(self, waiting: deque[Cell]) -> Cell | None:
        """The first cell that may begin: its task's execution is known, or it is the one to decide it."""
        deciding = {_kind(cell) for cell in self._running.values()} - self.executions.keys()
        cell = next((cell for cell in waiting if _kind(cell) not in deciding), None)
        if cell is not None:
            waiting.remove(cell)
        return cell

    def _dispatch(self, waiting: deque[Cell], began: Callable[[Cell], None], report: Report) -> Iterator[Ending]:
        while waiting or self._running:
            while len(self._running) < self.count and (cell := self._next(waiting)) is not None:
                worker = self._idle.pop() if self._idle else self._start()
                self._running[worker] = cell
                began(cell)
                worker.send(cell, self.known(cell))
            if waiting and len(self._running) + len(self._idle) < self.count:
                self._idle.append(self._start())  # which loads while the first run decides
            worker, event = self._events.get()
            if worker not in self._running:  # one that is closed has ended already
                if event["event"] == "gone" and worker in self._idle:
                    self._idle.remove(worker)
                    worker.close()
                continue
            self.recall(self._running[worker])
            if event["event"] == "warning":
                PROGRAMS.warning("%s", event["text"])
                continue
            if event["event"] == "step":
                report(self._running[worker], event["share"], event["record"])
                continue
            ending = worker.ending(self._running.pop(worker), event)
            if self.fresh or ending.status != "done":
                worker.close()
            else:
                self._idle.append(worker)
            if ending.status == "interrupted":
                raise KeyboardInterrupt
            yield ending

    def _start(self) -> _Worker:
        threads = max(1, cores() // self.count)  # an equal share of the cores, and no more than the person said
        with contextlib.suppress(KeyError, ValueError):
            threads = min(threads, max(1, int(os.environ["OMP_NUM_THREADS"])))
        libraries = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
        environment = os.environ | dict.fromkeys(libraries, str(threads))
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (the worker's, as long as it lives)
        # A session of its own: Ctrl-C reaches the parent alone, which passes it on when it is ready.
        # The working directory is no place to import from (-P) before any other that this process knows.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hgms_compare.worker", str(threads), json.dumps(sys.path), *self.plugins],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True, start_new_session=True,
        )  # fmt: skip
        worker = _Worker(process, errors)
        threading.Thread(target=self._listen, args=(worker,), daemon=True).start()
        return worker

    def _listen(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        with worker.process.stdout as stream:
            for line in stream:
                with contextlib.suppress(ValueError):  # a line that a kill cut off
                    self._events.put((worker, json.loads(line)))
        self._events.put((worker, {"event": "gone"}))

    def _interrupt(self, seconds: float = 60.0) -> None:
        """Asks the running workers to save and stop; those that do not in time, or at a second Ctrl-C, are killed."""
        for worker in self._running:
            with contextlib.suppress(OSError, ValueError):
                worker.process.send_signal(signal.SIGINT)
        left, until = set(self._running), time.monotonic() + seconds
        with contextlib.suppress(KeyboardInterrupt, queue.Empty):
            while left:
                worker, event = self._events.get(timeout=max(0.0, until - time.monotonic()))
                if event["event"] not in ("step", "warning"):
                    left.discard(worker)


@define(eq=False)
class _Worker:
    """A worker's process, as its parent sees it."""

    process: subprocess.Popen[str]
    errors: IO[bytes]

    def send(self, cell: Cell, execution: Execution | None) -> None:
        how = None if execution is None else execution.as_table()
        message = {"config": cell.config.resolved(), "path": str(cell.path), "execution": how}
        with contextlib.suppress(OSError):  # it died already: its end is on the queue
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def ending(self, cell: Cell, event: Mapping[str, Any]) -> Ending:
        """How its cell ended, by its own word or because it is gone."""
        if event["event"] == "ended":
            return Ending(cell=cell, status=event["status"], error=event["error"])
        error = self.obituary()
        with contextlib.suppress(HgmsError, OSError):
            summary = RunFolder(cell.path).read_summary()
            if summary is not None:  # it died between the end of its run and its report
                return Ending(cell=cell, status=str(summary.get("status")), error=summary.get("error"))
        return failed(cell, error)

    def obituary(self) -> str:
        """Why the process is gone, as far as its exit code and its standard error tell."""
        code = self.process.wait()
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            why = f"its process was killed by {name}" + (" (out of memory, most often)" if name == "SIGKILL" else "")
        else:
            why = f"its process ended with exit code {code}"
        self.errors.seek(0)
        last = self.errors.read().decode(errors="replace").strip().splitlines()[-3:]
        return why + ("; its last words: " + " | ".join(last) if last else "")

    def close(self) -> None:
        """Kills it: it is idle, or what it does is of no more use, and every folder it wrote can be resumed."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        self.errors.close()
