"""Runs in processes of their own: a killed one takes no other with it, and each has its share of the cores.

A worker (``python -m hgms_compare.workers``) imports once and carries out one run after another; after a failure, or with
``fresh``, the next run gets a new process. Parent and worker speak in lines of JSON over the worker's standard input and
output. A worker whose parent is gone ends at once: what it was doing resumes from its checkpoint.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from attrs import define, field, frozen

from hgms_compare.usage import measured
from hgms_core import CheckpointError, HgmsError
from hgms_core.registry import Registry
from hgms_run import (
    DiskError,
    FolderInUse,
    Interrupted,
    RunConfig,
    RunFolder,
    ignore,
    record_failure,
    replace_file,
    run_config,
    stoppable,
)

PATIENCE = 20.0
"""Seconds a worker waits for a folder that another process holds: the orphan of a killed comparison ends by itself."""

TELL_EVERY = 0.2
"""Seconds between two reports of a run's progress."""


@frozen(kw_only=True)
class Job:
    """One run to carry out in ``path``. A ``title`` is for people."""

    config: RunConfig
    path: Path
    title: str


@frozen(kw_only=True)
class Ending:
    """How a job ended: ``done``, ``failed`` (recorded in its summary), ``refused`` (its folder is damaged; nothing was
    written), ``stopped`` (the disk is full, or another process has the folder: it goes on when it is asked for again) or
    ``interrupted``."""

    job: Job
    status: str
    error: str | None = None


Report = Callable[[Job, float, Mapping[str, Any]], None]
"""``report(job, share of its budget spent, newest record)``."""


def cores() -> int:
    """The cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def threads_per_job(jobs: int) -> int:
    """An equal share of the cores, at least one, and at most OMP_NUM_THREADS where that is set."""
    share = max(1, cores() // jobs)
    with contextlib.suppress(KeyError, ValueError):
        share = min(share, max(1, int(os.environ["OMP_NUM_THREADS"])))
    return share


@define(eq=False)
class Crew:
    """``with Crew(count=2) as crew: for ending in crew.carry_out(jobs): …``: workers that stay for the next jobs.

    ``count`` workers at a time; 0 runs the jobs in this process, one by one. ``plugins`` are files that every worker loads;
    ``fresh`` gives each job a process of its own.
    """

    count: int
    plugins: Sequence[str] = ()
    fresh: bool = False
    _events: queue.Queue[tuple[_Worker, Mapping[str, Any]]] = field(factory=queue.Queue, init=False)
    _idle: list[_Worker] = field(factory=list, init=False)
    _running: dict[_Worker, Job] = field(factory=dict, init=False)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in [*self._idle, *self._running]:
            worker.close()
        self._idle.clear()
        self._running.clear()

    def carry_out(
        self, jobs: Iterable[Job], *, began: Callable[[Job], None] = ignore, report: Report = ignore
    ) -> Iterator[Ending]:
        """The endings of all jobs, as they come.

        Ctrl-C lets every running step finish and its state be saved, then goes on upwards.
        """
        try:
            if self.count == 0:
                for job in jobs:
                    began(job)
                    yield _in_process(job, report)
            else:
                yield from self._dispatch(deque(jobs), began, report)
        except KeyboardInterrupt:
            self._interrupt()
            raise

    def _dispatch(self, waiting: deque[Job], began: Callable[[Job], None], report: Report) -> Iterator[Ending]:
        while waiting or self._running:
            while waiting and len(self._running) < self.count:
                job = waiting.popleft()
                worker = self._idle.pop() if self._idle else self._start()
                self._running[worker] = job
                began(job)
                worker.send(job)
            worker, event = self._events.get()
            if worker not in self._running:
                continue  # one that is closed has told its end
            if event["event"] == "step":
                report(self._running[worker], event["share"], event["record"])
                continue
            job = self._running.pop(worker)
            ending = _ending(job, worker, event)
            if self.fresh or ending.status != "done":
                worker.close()
            else:
                self._idle.append(worker)
            if ending.status == "interrupted":
                raise KeyboardInterrupt
            yield ending

    def _start(self) -> _Worker:
        share = str(threads_per_job(self.count))
        environment = os.environ | dict.fromkeys(
            ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), share
        )
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (the worker's, as long as it lives)
        # A session of its own: Ctrl-C reaches the parent alone, which passes it on when it is ready.
        # The working directory is no place to import from (-P) before any other that this process knows.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hgms_compare.workers", share, json.dumps(sys.path), *self.plugins],
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
                if event["event"] != "step":
                    left.discard(worker)


def _ending(job: Job, worker: _Worker, event: Mapping[str, Any]) -> Ending:
    if event["event"] == "ended":
        return Ending(job=job, status=event["status"], error=event["error"])
    error = worker.obituary()
    with contextlib.suppress(HgmsError, OSError):
        summary = RunFolder(job.path).read_summary()
        if summary is not None:  # it died between the end of its run and telling us
            return Ending(job=job, status=str(summary.get("status")), error=summary.get("error"))
    return _failed(job, error)


def _failed(job: Job, error: str) -> Ending:
    try:
        job.path.mkdir(parents=True, exist_ok=True)
        record_failure(RunFolder(job.path), job.config, error)
    except (HgmsError, OSError) as why:
        status = "stopped" if isinstance(why, DiskError) else "refused"
        return Ending(job=job, status=status, error=f"{error}; and the failure could not be recorded: {why}")
    return Ending(job=job, status="failed", error=error)


def _in_process(job: Job, report: Report) -> Ending:
    """One run, with what it takes measured, and whatever ends it as an ending."""
    told = 0.0

    def watch(_info: object, record: Mapping[str, Any], share: float) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= TELL_EVERY:
            told = now
            report(job, share, record)

    folder = RunFolder(job.path)
    try:
        with contextlib.suppress(CheckpointError):
            summary = folder.read_summary()
            if summary is not None and summary.get("status") == "failed":
                folder.summary.unlink()  # asked for again: until it ends it is an unfinished run
        with measured(job.path, job.config.run.device):
            run_config(job.config, resume=True, watch=watch, path=job.path, patience=PATIENCE)
    except (KeyboardInterrupt, Interrupted):
        raise
    except (DiskError, FolderInUse) as error:
        return Ending(job=job, status="stopped", error=str(error))
    except CheckpointError as error:
        return Ending(job=job, status="refused", error=str(error))
    except MemoryError as error:
        return _failed(job, f"out of memory: {error}".rstrip(": "))
    except BaseException as error:
        if isinstance(error, HgmsError):
            return _failed(job, str(error))
        with contextlib.suppress(DiskError):
            text = "".join(traceback.format_exception(error))
            replace_file(RunFolder(job.path).traceback, text.encode(errors="backslashreplace"))
        return _failed(job, f"{type(error).__name__}: {error}{_place(error)}")
    return Ending(job=job, status="done")


def _place(error: BaseException) -> str:
    """The last line of somebody's own code, and where the rest stands."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
    library = sysconfig.get_path("stdlib")
    files = [(frame, frame.filename) for frame in frames if not frame.filename.startswith(ours)]
    own = [frame for frame, name in files if not name.startswith(library) or "site-packages" in name]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno}; all of it is in traceback.txt)" if own else ""


# --- the parent's side -------------------------------------------------------------------------------------------------


@define(eq=False)
class _Worker:
    process: subprocess.Popen[str]
    errors: IO[bytes]

    def send(self, job: Job) -> None:
        message = {"config": job.config.resolved(), "path": str(job.path), "title": job.title}
        with contextlib.suppress(OSError):  # it died already: its end is on the queue
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def obituary(self) -> str:
        """Why the process is gone, as far as its exit code and its standard error tell."""
        code = self.process.wait()
        if code < 0:
            name = signal.Signals(-code).name if -code in {one.value for one in signal.Signals} else f"signal {-code}"
            said = f"its process was killed by {name}"
            if name == "SIGKILL":
                said += " (out of memory, most often)"
        else:
            said = f"its process ended with exit code {code}"
        self.errors.seek(0)
        last = self.errors.read().decode(errors="replace").strip().splitlines()[-3:]
        return said + ("; its last words: " + " | ".join(last) if last else "")

    def close(self) -> None:
        """Kills it: it is idle, or what it does is of no more use, and every folder it wrote can be resumed."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        self.errors.close()


# --- the worker's side -------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    """A worker: one run per line of standard input, until that closes."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a plugin prints must not come between
    asked: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            asked.put(line)
        os._exit(0)  # the parent is gone, or done with us

    threading.Thread(target=listen, daemon=True).start()
    threads, places, files = int(arguments[0]), json.loads(arguments[1]), arguments[2:]
    sys.path += [place for place in places if place not in sys.path]
    registry = Registry.load(files)
    gc.collect()
    gc.freeze()  # what is imported stays: collecting between two runs need not look at it

    def tell(**event: Any) -> None:
        out.write(json.dumps(event) + "\n")

    with stoppable():
        while True:
            try:
                message = json.loads(asked.get())
            except KeyboardInterrupt:
                return
            torch.set_num_threads(threads)
            try:
                config = RunConfig.from_dict(message["config"], registry=registry)
                job = Job(config=config, path=Path(message["path"]), title=message["title"])
                ending = _in_process(job, lambda _job, share, record: tell(event="step", share=share, record=_numbers(record)))
            except KeyboardInterrupt:
                tell(event="ended", status="interrupted", error=None)
                continue
            tell(event="ended", status=ending.status, error=ending.error)


def _numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a progress line shows of a record."""
    return {key: value for key, value in record.items() if isinstance(value, (int, float, str))}


__all__ = ["Crew", "Ending", "Job", "Report", "cores", "threads_per_job"]


if __name__ == "__main__":
    main(sys.argv[1:])
