"""The executor `slurm` with a stand-in for submitit: what is asked of the queue, and how jobs end.
With submitit itself: test_slurm.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hgms.executors import Ending, Job
from hgms.executors.slurm import executor as module
from hgms.executors.slurm.executor import Slurm
from hgms_core import ConfigError


class Gone(Exception):
    """Stands for submitit's UncompletedJobError."""


class Batch:
    """Stands for a batch job, which is done at the second look."""

    def __init__(self, queue: Queue, call: Callable[[], Any]) -> None:
        self.queue, self.call = queue, call
        self.job_id = f"{len(queue.jobs)}"
        self.looks = 0

    def done(self) -> bool:
        self.looks += 1
        return self.looks > 1

    def result(self) -> Any:
        if self.job_id in self.queue.gone:
            raise Gone("node failure\nat length")
        return self.call()


class Queue:
    """Stands for submitit: the settings of each job, and the jobs; those in ``gone`` are lost."""

    Failed = type("FailedJobError", (Exception,), {})

    def __init__(self, *gone: str) -> None:
        self.gone, self.jobs = gone, list[Batch]()
        self.parameters: dict[str, Any] = {}
        names = {"FailedJobError": self.Failed, "FailedSubmissionError": self.Failed}
        self.core = SimpleNamespace(utils=SimpleNamespace(UncompletedJobError=Gone, **names))

    def AutoExecutor(self, *, folder: Path, cluster: str) -> Any:
        return SimpleNamespace(update_parameters=self.parameters.update, submit=self.submit)

    def submit(self, work: Callable[[Any], Any], message: Mapping[str, Any]) -> Batch:
        self.jobs.append(Batch(self, lambda: work(message)))
        return self.jobs[-1]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "LOOK", 0.0)


def use(monkeypatch: pytest.MonkeyPatch, queue: Queue) -> Queue:
    monkeypatch.setitem(sys.modules, "submitit", queue)  # type: ignore[arg-type]
    return queue


def acts(arguments: Mapping[str, Any], _tell: Any) -> Mapping[str, Any]:
    if arguments.get("raises"):
        raise ConfigError("missing-file", "no such data", place=("train.jsonl",))
    return dict(arguments)


def jobs_of(count: int) -> list[Job]:
    return [
        Job(
            title=f"{number}",
            function="test_slurm_settings:acts",
            arguments={"number": number, "raises": number == 1},
        )
        for number in range(count)
    ]


def test_jobs_end_with_outcomes_and_errors_or_are_lost_and_never_crowd_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = use(monkeypatch, Queue("2"))
    executor = Slurm(jobs=2)
    ended: list[Ending] = []
    waiting = iter(jobs_of(5))
    for ending in executor.carry_out(waiting, lambda job, event: None):
        ended.append(ending)
        assert len(executor._running) <= 2
    assert (queue.parameters["timeout_min"], queue.parameters["cpus_per_task"]) == (240, 1)
    by_title = {ending.job.title: ending for ending in ended}
    assert sorted(by_title) == ["0", "1", "2", "3", "4"]
    assert [by_title[n].outcome for n in "034"] == [
        {"number": int(n), "raises": False} for n in "034"
    ]
    error = by_title["1"].error
    assert error is not None
    assert (error.code, error.place) == ("missing-file", ("train.jsonl",))
    assert by_title["2"].lost.startswith("its batch job 2 is gone (node failure)")
