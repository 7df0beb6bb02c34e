"""Jobs as tasks of Ray Core.

A worker receives the name of a function and plain values, and calls the function in its local
installation. It rejects the job if that installation differs from the driver's.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from attrs import define, field

from hgms.executors import Ending, Job, Report, pack_job, run_message
from hgms.packages import optional_module
from hgms_core import ConfigError
from hgms_core.arguments import reports_errors
from hgms_core.components import read_by_annotation
from hgms_core.torch_errors import first_line
from hgms_core.validators import at_least, optional

LOOK = 1.0
"""Seconds between two checks of running jobs."""
ANSWER = 10.0
"""Time limit in seconds for a reply from the machine of an address."""
PATIENCE = 60.0
"""Seconds in which jobs must save their state after a user stops them."""


@reports_errors
@define(eq=False, field_transformer=read_by_annotation)
class Ray:
    """Tasks of Ray, one per job, with the CPUs and GPUs that the job needs.

    ``address`` is ``HOST:PORT`` of a cluster, or ``auto`` for the cluster on this machine.
    ``jobs`` is the number of simultaneous jobs; None: as many as fit in the cluster. Ray itself
    does not resume jobs. The caller submits a lost run a second time, and it resumes from its
    folder, which must be on a disk that all machines share.

    Raises
    ------
    MissingExtra
        Without ray.
    ConfigError
        If there is no such cluster, if its Ray or Python has another version, or if the
        installation of a worker has other versions of Python, torch or hgms.
    """

    name: ClassVar[str] = "ray"

    address: str = "auto"
    jobs: int | None = field(default=None, validator=optional(at_least(1)))
    _ray: Any = field(default=None, init=False)
    _task: Any = field(default=None, init=False)

    def carry_out(self, jobs: Iterable[Job], report: Report) -> Iterator[Ending]:
        self._start()
        running: dict[Any, Job] = {}
        try:
            while True:
                # the cluster may grow
                cpus = int(self._ray.cluster_resources().get("CPU", 1))
                room = (self.jobs or max(1, cpus)) - len(running)
                while room > 0 and (job := next(iter(jobs), None)) is not None:
                    running[self._submit(job)] = job
                    room -= 1
                if not running:
                    return
                ended, _ = self._ray.wait(list(running), timeout=LOOK)
                for task in ended:
                    yield self._ending(running.pop(task), task)
        except KeyboardInterrupt:
            self._interrupt(list(running))
            raise

    def close(self) -> None:
        if self._ray is not None:
            self._ray.shutdown()
            self._ray = None

    def _start(self) -> None:
        if self._ray is not None:
            return
        ray = optional_module("ray", "the executor 'ray'", "ray", place=("--executor",))
        _ensure_answer(self.address)
        try:
            ray.init(
                address=self.address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace="hgms",
            )
        except (ConnectionError, ValueError) as error:
            raise _nobody(self.address, error) from error
        except RuntimeError as error:
            raise ConfigError(
                "no-cluster",
                f"Ray at {self.address} cannot be used from this machine: "
                f"{first_line(error)[:200]}",
                place=("executor", "address"),
            ) from error
        _keep_quiet()
        self._ray = ray
        self._task = ray.remote(run_message)

    def _submit(self, job: Job) -> Any:
        needs = job.needs
        return self._task.options(
            name=job.title, num_cpus=needs.cpus, num_gpus=needs.gpus, max_retries=0
        ).remote(pack_job(job))

    def _ending(self, job: Job, task: Any) -> Ending:
        try:
            result = self._ray.get(task)
        except self._ray.exceptions.TaskCancelledError:
            raise KeyboardInterrupt from None
        except self._ray.exceptions.RayError as error:
            return Ending(job=job, lost=f"its worker is gone ({first_line(error)[:200]})")
        return Ending.of(job, result)

    def _interrupt(self, running: list[Any]) -> None:
        """Raise a KeyboardInterrupt in every task, which then saves its state.

        Tasks that do not end in time are killed.
        """
        with contextlib.suppress(KeyboardInterrupt):
            for task in running:
                self._ray.cancel(task, force=False)
            until = time.monotonic() + PATIENCE
            while running and time.monotonic() < until:
                _, running = self._ray.wait(running, num_returns=len(running), timeout=LOOK)
        for task in running:
            self._ray.cancel(task, force=True)


def _ensure_answer(where: str) -> None:
    """Check that the machine replies; Ray itself would retry for minutes."""
    if where == "auto":
        return
    host, _, port = where.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _nobody(where, error) from error


def _nobody(where: str, error: Exception) -> ConfigError:
    how = "on this machine" if where == "auto" else "there; HOST:PORT is what it prints"
    return ConfigError(
        "no-cluster",
        f"Ray does not run at {where}: {first_line(error)[:200]}",
        place=("executor", "address"),
        hint=f"start it (ray start --head, {how})",
    )


def _keep_quiet() -> None:
    """Suppress Ray's messages about its workers on standard output.

    Standard output is reserved for a table or JSON, and HGMS reports these events itself.
    """
    with contextlib.suppress(ImportError):
        from ray._private import worker

        worker._worker_logs_enabled = False
