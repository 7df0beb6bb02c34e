"""The executor `slurm`, in processes of this machine: submitit's own stand-in for batch jobs.
`pytest -m nightly` on this file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.executor_grids import WALK, grid, steps
from support.helpers import rejects
from support.slurm_stand_in import SlurmHere

from hgms.comparison.run_grid import run_grid
from hgms.executors.slurm.executor import Slurm
from hgms_core import ConfigError

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.chdir(tmp_path)


def test_a_job_whose_time_is_up_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run_grid(grid(tmp_path / "alone", seeds=1, budget="60 steps"), jobs=0, progress=False)
    executor = SlurmHere(jobs=1)

    def interrupt() -> None:
        while (
            sum(
                path.read_bytes().count(b"\n") for path in (tmp_path / "slurm").rglob("steps.jsonl")
            )
            < 10
        ):
            time.sleep(0.01)
        [task] = executor._running
        # as SLURM does: to the job itself, whose parent is submitit's stand-in for SLURM
        children = subprocess.run(
            ["pgrep", "-P", str(task._process.pid)], capture_output=True, text=True, check=True
        )
        os.kill(int(children.stdout), signal.SIGUSR2)

    threading.Thread(target=interrupt, daemon=True).start()
    comparison = run_grid(
        grid(tmp_path / "slurm", {**WALK, "pause": 0.05}, seeds=1, budget="60 steps"),
        executor=executor,
        progress=False,
    )
    assert comparison.complete, comparison
    assert steps(tmp_path / "slurm") == steps(tmp_path / "alone")
    logs = "".join(path.read_text() for path in (tmp_path / ".hgms-slurm").rglob("*_log.*"))
    assert "Caught signal SIGUSR2" in logs
    assert "Requeued job" in logs


def test_where_there_is_no_slurm_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    with rejects("no-cluster", "executor", of=ConfigError):
        run_grid(grid(tmp_path / "slurm"), executor=Slurm(), progress=False)
    assert not list(tmp_path.rglob("steps.jsonl"))
