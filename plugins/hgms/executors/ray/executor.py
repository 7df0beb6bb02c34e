"""Jobs as tasks of Ray Core.

A worker receives the name of a function and plain values, and calls the function in its local
installation. It rejects the job if that installation differs from the driver's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from attrs import define, field

from hgms.executors import Ending, Job, Report, ending_of, pack_job, run_message
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
    """Tasks of Ray, one per job, with the CPUs, GPUs and memory that the job needs.

    ``address`` is ``HOST:PORT`` of a cluster, or ``auto`` for the cluster on this machine. None
    starts a temporary cluster here: on the loopback address, without a dashboard, with Ray's token
    authentication. ``jobs`` is the number of simultaneous jobs; None: as many as fit in the
    cluster. Ray itself does not resume jobs. The caller submits a lost run a second time, and it
    resumes from its folder, which must be on a disk that all machines share.

    Raises
    ------
    MissingExtra
        Without ray.
    ConfigError
        If there is no such cluster, if its Ray or Python has another version, or if the
        installation of a worker has other versions of Python, torch or hgms.
    """

    name: ClassVar[str] = "ray"

    address: str | None = None
    jobs: int | None = field(default=None, validator=optional(at_least(1)))
    _ray: Any = field(default=None, init=False)
    _task: Any = field(default=None, init=False)
    _restore: contextlib.ExitStack = field(factory=contextlib.ExitStack, init=False)

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
            self._restore.close()

    def _start(self) -> None:
        if self._ray is not None:
            return
        ray = optional_module("ray", "the executor 'ray'", "ray", place=("--executor",))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        local: dict[str, Any] = (
            {"include_dashboard": False, "num_cpus": self.jobs} if self.address is None else {}
        )
        where = "local" if self.address is None else self.address
        _ensure_answer(where)
        before = os.umask(0o077)  # only the user may read the token that Ray writes
        try:
            if self.address is None:
                self._restore.enter_context(_on_loopback())
            ray.init(
                address=where,
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace="hgms",
                **local,
            )
        except (ConnectionError, ValueError) as error:
            self._restore.close()
            raise _nobody(where, error) from error
        except RuntimeError as error:
            self._restore.close()
            raise ConfigError(
                "no-cluster",
                f"Ray at {where} cannot be used from this machine: {first_line(error)[:200]}",
                place=("executor", "address"),
            ) from error
        finally:
            os.umask(before)
        _keep_quiet()
        self._ray = ray
        self._task = ray.remote(run_message)

    def _submit(self, job: Job) -> Any:
        needs = job.needs
        options = {"num_cpus": needs.cpus, "num_gpus": needs.gpus, "max_retries": 0}
        if needs.memory is not None:
            options["memory"] = needs.memory
        return self._task.options(name=job.title, **options).remote(pack_job(job))

    def _ending(self, job: Job, task: Any) -> Ending:
        try:
            result = self._ray.get(task)
        except self._ray.exceptions.TaskCancelledError:
            raise KeyboardInterrupt from None
        except self._ray.exceptions.RayError as error:
            return Ending(job=job, lost=f"its worker is gone ({first_line(error)[:200]})")
        return ending_of(job, result)

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
    if where in ("local", "auto"):
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
        hint=f"start it (ray start --head, {how}), or omit --address to start it automatically",
    )


SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch for the addresses that it listens on.

It is named after the systems on which the loopback address is the default. Ray reads the variable
at import, and its processes inherit it.
"""


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Make a Ray cluster that starts inside the context listen on the loopback address only."""
    from ray._private import ray_constants

    variable = os.environ.get(SWITCH)
    constant = ray_constants.ENABLE_RAY_CLUSTER
    os.environ[SWITCH] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = constant
        if variable is None:
            os.environ.pop(SWITCH, None)
        else:
            os.environ[SWITCH] = variable


def _keep_quiet() -> None:
    """Suppress Ray's messages about its workers on standard output.

    Standard output is reserved for a table or JSON, and HGMS reports these events itself.
    """
    with contextlib.suppress(ImportError):
        from ray._private import worker

        worker._worker_logs_enabled = False
