"""Jobs through SLURM, by submitit: one batch job per job.

SLURM requeues a batch job when its time limit is reached.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from attrs import define, field

from hgms.executors import Ending, Job, Report, pack_job, run_message
from hgms.packages import optional_module
from hgms.runs import LEAVING
from hgms_core import ConfigError
from hgms_core.arguments import reports_errors
from hgms_core.components import read_by_annotation
from hgms_core.torch_errors import first_line
from hgms_core.validators import at_least, greater_than

LOOK = 2.0
"""Seconds between two checks of the queue; submitit queries SLURM less often."""
PATIENCE = 60.0
"""Seconds in which jobs must save their state after a user stops them."""


@reports_errors
@define(eq=False, field_transformer=read_by_annotation)
class Slurm:
    """Batch jobs of SLURM, at most ``jobs`` of them in the queue at a time.

    ``partition``, ``account`` and ``qos`` are SLURM's. ``hours`` is the time limit of a job. At
    the time limit the job is requeued and resumes from its checkpoint. ``folder``
    stores submitit's scripts, logs and pickles; no other user can read it.

    Raises
    ------
    MissingExtra
        Without submitit.
    ConfigError
        If SLURM is missing here or rejects a job, and if the installation of a node differs from
        this machine.
    """

    name: ClassVar[str] = "slurm"

    jobs: int = field(default=64, validator=at_least(1))
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    hours: float = field(default=4.0, validator=greater_than(0))
    folder: str = ".hgms-slurm"
    _running: dict[Any, Job] = field(factory=dict, init=False)

    def carry_out(self, jobs: Iterable[Job], report: Report) -> Iterator[Ending]:
        submitit = _submitit()
        running = self._running
        try:
            while True:
                while len(running) < self.jobs and (job := next(iter(jobs), None)) is not None:
                    running[self._submit(submitit, job)] = job
                if not running:
                    return
                ended = [task for task in running if task.done()]
                for task in ended:
                    yield self._ending(submitit, running.pop(task), task)
                if not ended:
                    time.sleep(LOOK)
        except KeyboardInterrupt:
            self._interrupt()
            raise

    def close(self) -> None:
        """Cancel the jobs that are still in the queue."""
        for task in self._running:
            with contextlib.suppress(Exception):
                task.cancel(check=False)
        self._running.clear()

    def _submit(self, submitit: Any, job: Job) -> Any:
        needs = job.needs
        folder = Path(self.folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings: dict[str, Any] = {
            "name": "hgms",
            "timeout_min": max(1, round(60 * self.hours)),
            "cpus_per_task": needs.cpus,
            "tasks_per_node": 1,
            "gpus_per_node": needs.gpus,
            "slurm_partition": self.partition,
            "slurm_account": self.account,
            "slurm_qos": self.qos,
        }
        before = os.umask(0o077)  # no other user may write to submitit's pickles
        try:
            executor = self._queue(submitit, folder)
            executor.update_parameters(
                **{key: value for key, value in settings.items() if value is not None}
            )
            return executor.submit(Work(), pack_job(job))
        except (
            RuntimeError,
            submitit.core.utils.FailedJobError,
            submitit.core.utils.FailedSubmissionError,
        ) as error:
            raise ConfigError(
                "no-cluster",
                f"SLURM cannot be used from this machine: {first_line(error)[:200]}",
                place=("executor",),
                hint="run the command on a machine with sbatch\n"
                "set the partition and account with --set executor.partition=NAME and "
                "--set executor.account=NAME",
            ) from error
        finally:
            os.umask(before)

    def _queue(self, submitit: Any, folder: Path) -> Any:
        return submitit.AutoExecutor(folder=folder, cluster="slurm")

    def _ending(self, submitit: Any, job: Job, task: Any) -> Ending:
        try:
            result: Mapping[str, Any] = task.result()
        except (
            submitit.core.utils.UncompletedJobError,
            submitit.core.utils.FailedJobError,
        ) as error:
            return Ending(
                job=job, lost=f"its batch job {task.job_id} is gone ({first_line(error)[:200]})"
            )
        return Ending.of(job, result)

    def _interrupt(self) -> None:
        """Let every job save its state and then leave the queue."""
        for task in self._running:
            task.cancel(check=False)
        until = time.monotonic() + PATIENCE
        with contextlib.suppress(KeyboardInterrupt):
            while time.monotonic() < until and not all(task.done() for task in self._running):
                time.sleep(0.1)


class Work:
    """Callable that submitit runs on a node: it runs the job of a message."""

    def __call__(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return run_message(message)

    def checkpoint(self, message: Mapping[str, Any]) -> Any:
        """Requeue the same job after its time limit or a preemption of the node.

        The job then resumes from the run's checkpoint.
        """
        LEAVING.set()
        return _submitit().helpers.DelayedSubmission(Work(), message)


def _submitit() -> Any:
    return optional_module("submitit", "the executor 'slurm'", "slurm", place=("--executor",))
