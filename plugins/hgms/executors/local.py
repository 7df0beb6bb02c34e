"""Jobs in processes of this machine (:mod:`hgms.executors.worker`).

A killed process does not affect the others, and each process has its share of the cores. Parent and
worker exchange lines of JSON over the worker's standard input and output.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, ClassVar

from attrs import define, field

from hgms.distributed import LIBRARIES, describe_exit
from hgms.executors.jobs import Ending, Job, Report
from hgms_core.arguments import reports_errors
from hgms_core.components import read_by_annotation
from hgms_core.validators import at_least, optional

_LAST = ("ended", "interrupted", "gone")
"""Events that end a job."""
_LOOK = 1.0
"""Seconds between two checks for a KeyboardInterrupt that arrives without a signal."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@reports_errors
@define(eq=False, field_transformer=read_by_annotation)
class Local:
    """Processes of this machine, reused for the next jobs.

    ``jobs`` is the number of simultaneous jobs, by default one per core. ``fresh`` starts a new
    process for each job. A killed process is detected at once.

    Examples
    --------
    >>> job = Job(title="a pair", function="hgms.executors.local:echo", arguments={"number": 2})
    >>> executor = Local(jobs=1)
    >>> from hgms.executors import run_with_retries
    >>> [ending.outcome for ending in run_with_retries(executor, iter([job]))]
    [{'number': 2}]
    >>> executor.close()
    """

    name: ClassVar[str] = "local"

    jobs: int | None = field(default=None, validator=optional(at_least(1)))
    fresh: bool = False
    _events: queue.Queue[tuple[_Worker, Mapping[str, Any]]] = field(factory=queue.Queue, init=False)
    _idle: list[_Worker] = field(factory=list, init=False)
    _running: dict[_Worker, Job] = field(factory=dict, init=False)

    @property
    def count(self) -> int:
        return cores() if self.jobs is None else self.jobs

    def carry_out(self, jobs: Iterable[Job], report: Report) -> Iterator[Ending]:
        try:
            yield from self._dispatch(jobs, report)
        except KeyboardInterrupt:
            self._interrupt()
            raise

    def close(self) -> None:
        for worker in [*self._idle, *self._running]:
            worker.close()
        self._idle.clear()
        self._running.clear()

    def _dispatch(self, jobs: Iterable[Job], report: Report) -> Iterator[Ending]:
        self._begin(jobs)
        while self._running:
            try:
                # Ray raises KeyboardInterrupt without a signal; it takes effect between two checks
                worker, event = self._events.get(timeout=_LOOK)
            except queue.Empty:
                continue
            if worker not in self._running:  # the worker was closed, or ended while it was idle
                if event["event"] == "gone" and worker in self._idle:
                    self._idle.remove(worker)
                    worker.close()
            elif event["event"] not in _LAST:
                report(self._running[worker], event)
            else:
                yield self._ending(worker, event)
            self._begin(jobs)

    def _begin(self, jobs: Iterable[Job]) -> None:
        """Assign a worker to every job that may start, while workers are available."""
        while len(self._running) < self.count and (job := next(iter(jobs), None)) is not None:
            worker = self._idle.pop() if self._idle else self._start()
            self._running[worker] = job
            worker.write({"function": job.function, "arguments": job.arguments})

    def _ending(self, worker: _Worker, event: Mapping[str, Any]) -> Ending:
        """Return how a worker's job ended: by its own event, or by the loss of the worker."""
        job = self._running.pop(worker)
        if event["event"] == "interrupted":
            self._idle.append(worker)
            raise KeyboardInterrupt
        if event["event"] == "ended":
            ending = Ending.of(job, event)
        else:
            ending = Ending(job=job, lost=worker.obituary())
        if self.fresh or ending.lost:
            worker.close()
        else:
            self._idle.append(worker)
        return ending

    def _start(self) -> _Worker:
        # an equal share of the cores, limited by the user's setting
        threads = max(1, cores() // self.count)
        with contextlib.suppress(KeyError, ValueError):
            threads = min(threads, max(1, int(os.environ["OMP_NUM_THREADS"])))
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (the worker's, as long as it lives)
        # The worker has a separate session: Ctrl-C reaches only the parent, which forwards it when
        # it is ready. With -P, modules of the working directory do not take precedence over other
        # import locations.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hgms.executors.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | dict.fromkeys(LIBRARIES, str(threads)),
            text=True,
            start_new_session=True,
        )
        worker = _Worker(process, errors)
        worker.write({"threads": threads, "places": sys.path})
        threading.Thread(target=self._listen, args=(worker,), daemon=True).start()
        return worker

    def _listen(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        with worker.process.stdout as stream:
            for line in stream:
                with contextlib.suppress(ValueError):  # an incomplete line after a kill
                    self._events.put((worker, json.loads(line)))
        self._events.put((worker, {"event": "gone"}))

    def _interrupt(self, seconds: float = 60.0) -> None:
        """Request the running workers to save and stop.

        Workers that do not stop in time, or before a second Ctrl-C, are killed.
        """
        for worker in self._running:
            with contextlib.suppress(OSError, ValueError):
                worker.process.send_signal(signal.SIGINT)
        left = set(self._running)
        until = time.monotonic() + seconds
        with contextlib.suppress(KeyboardInterrupt, queue.Empty):
            while left:
                worker, event = self._events.get(timeout=max(0.0, until - time.monotonic()))
                if event["event"] in _LAST:
                    left.discard(worker)


@define(eq=False)
class _Worker:
    """A worker's process, as seen by its parent."""

    process: subprocess.Popen[str]
    errors: IO[bytes]

    def write(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it ended already: the event is in the queue
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def obituary(self) -> str:
        """Return why the process ended, from its exit code and its standard error."""
        code = self.process.wait()
        why = f"its process {describe_exit(code)}"
        if code == -9:
            why += " (out of memory, most often)"
        self.errors.seek(0)
        last = self.errors.read().decode(errors="replace").strip().splitlines()[-3:]
        return why + ("; its last words: " + " | ".join(last) if last else "")

    def close(self) -> None:
        """Kill the worker and its child processes.

        It is idle, or its work is no longer needed. Every folder that it wrote can be resumed.
        """
        if sys.platform == "win32":
            self.process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        self.errors.close()


def echo(arguments: Mapping[str, Any], _tell: object) -> Mapping[str, Any]:
    """Return the arguments of the job: a job function for tests of an executor."""
    return arguments
