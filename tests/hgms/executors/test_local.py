"""The executor `local`: jobs in processes of this machine, and what a killed one leaves."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.executor_grids import WALK, grid, steps

from hgms.comparison.run_grid import run_grid
from hgms.executors import Job, Local, as_error, pack_error, run_with_retries, unpack_error
from hgms_core import ConfigError
from hgms_core.errors import CheckpointError, ErrorGroup, MissingExtra


@pytest.fixture(scope="module")
def local() -> Iterator[Local]:
    """One loaded process, which finds the functions of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        patch.setenv("OMP_NUM_THREADS", "1")
        executor = Local(jobs=1)
        yield executor
        executor.close()


def acts(arguments: Mapping[str, Any], tell: Any) -> Mapping[str, Any]:
    """A job that does what its arguments say."""
    if "kill" in arguments:
        os.kill(os.getpid(), signal.SIGKILL)
    if "raise" in arguments:
        raise ConfigError("missing-file", "no such data", place=("train.jsonl", 3))
    if "hang" in arguments:
        Path(arguments["hang"]).write_text(str(os.getpid()))
        time.sleep(600)
    tell(event="step", share=0.5)
    threads = os.environ["OMP_NUM_THREADS"]
    return {"threads": threads, "process": os.getpid()}


def jobs_of(*arguments: Mapping[str, Any]) -> Iterator[Job]:
    """As a coordinator gives them: iterated again, those that are left."""
    return (
        Job(title=f"job {number}", function="test_local:acts", arguments=each)
        for number, each in enumerate(arguments)
    )


def test_a_lost_job_is_tried_three_times_in_new_processes(local: Local) -> None:
    told: list[tuple[str, Any]] = []
    said: list[str] = []
    # longer than an argument of a command may be
    jobs = jobs_of({"long": "a" * 200_000}, {"kill": True}, {}, {"raise": True})
    report = lambda job, event: told.append((job.title, event["event"]))  # noqa: E731
    endings = {each.job.title: each for each in run_with_retries(local, jobs, report, said.append)}
    before, lost, after, failed = (endings[f"job {number}"] for number in range(4))
    assert lost.lost.startswith("its process was killed by SIGKILL")
    assert (len(said), lost.lost.endswith("for the 3rd time")) == (2, True)
    assert isinstance(failed.error, ConfigError)
    assert (failed.error.code, failed.error.place) == ("missing-file", ("train.jsonl", 3))
    assert told == [("job 0", "step"), ("job 2", "step")]
    first, last = before.outcome or {}, after.outcome or {}
    assert first["threads"] == last["threads"] == "1"
    assert first["process"] != last["process"]


@pytest.mark.extended
def test_a_run_whose_worker_is_killed_is_taken_up_again(
    local: Local, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_grid(grid(tmp_path / "alone", seeds=2), jobs=0, progress=False)
    (tmp_path / "marks").mkdir()
    kills = {"breaks": "kill", "at": 5, "seed": 2, "every": True, "once": str(tmp_path / "marks")}
    comparison = run_grid(grid(tmp_path / "local", {**WALK, **kills}, seeds=2), executor=local)
    assert comparison.complete, comparison
    assert [path.name for path in (tmp_path / "marks").iterdir()] == ["0"]
    assert capsys.readouterr().err.count("it is retried") == 1
    assert steps(tmp_path / "local") == steps(tmp_path / "alone")


@pytest.mark.extended
def test_a_worker_that_is_killed_is_replaced(local: Local, tmp_path: Path) -> None:
    mark = tmp_path / "at-work"
    endings = iter(local.carry_out(jobs_of({"hang": str(mark)}), lambda job, event: None))
    with ThreadPoolExecutor(1) as waiting:
        ending = waiting.submit(next, endings)
        until = time.monotonic() + 60
        while not (mark.exists() and mark.read_text()):
            assert time.monotonic() < until
            time.sleep(0.01)
        worker = int(mark.read_text())
        os.kill(worker, signal.SIGKILL)
        assert "killed by SIGKILL" in ending.result(60).lost
    assert not psutil.pid_exists(worker)


# --- what goes to and comes from workers


class LostHere(CheckpointError):
    """An error of a class that the other machine may lack."""


@pytest.mark.extended
def test_errors_come_back_from_workers_as_they_were_raised() -> None:
    wrong = MissingExtra(
        "missing-package",
        "the sampler needs it",
        place=("grid", 0),
        hint="or set another",
        install="pip install it",
        did_you_mean=("a", "b"),
    )
    several = ErrorGroup([wrong, LostHere("worker-lost", "it is gone")])
    for error in (wrong, several):
        back = unpack_error(json.loads(json.dumps(pack_error(error))))
        assert (type(back), str(back)) == (type(error), str(error))
        assert [each.as_dict() for each in back.errors] == [each.as_dict() for each in error.errors]
    assert as_error(KeyError("a")).code == "unexpected-error"
