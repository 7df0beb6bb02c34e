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
from typing import Any

import pytest
from support.executor_grids import PLUGIN, WALK, contents, grid, steps
from support.helpers import rejects

from hgms.comparison.run_grid import run_grid
from hgms.executors.slurm import executor as module
from hgms.executors.slurm.executor import Slurm
from hgms_core import ConfigError, MissingExtra

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.chdir(tmp_path)


def test_batch_jobs_write_what_one_process_writes(tmp_path: Path) -> None:
    alone = run_grid(grid(tmp_path / "alone"), jobs=0, progress=False)
    through = run_grid(
        grid(tmp_path / "slurm"), executor=Slurm(cluster="local", jobs=2), progress=False
    )
    assert contents(tmp_path / "slurm") == contents(tmp_path / "alone")
    assert [row.metrics for row in through.tables[0].rows] == [
        row.metrics for row in alone.tables[0].rows
    ]
    pickles = list((tmp_path / ".hgms-slurm").rglob("*.pkl"))
    assert pickles
    assert all(path.stat().st_mode & 0o077 == 0 for path in [tmp_path / ".hgms-slurm", *pickles])


def test_a_job_whose_time_is_up_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run_grid(grid(tmp_path / "alone", seeds=1, budget="60 steps"), jobs=0, progress=False)
    executor = Slurm(cluster="local", jobs=1)

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


def test_a_killed_jobs_run_is_taken_up_again(tmp_path: Path) -> None:
    run_grid(grid(tmp_path / "alone"), jobs=0, progress=False)
    (tmp_path / "marks").mkdir()
    kills = {"breaks": "kill", "at": 5, "seed": 2, "every": True, "once": str(tmp_path / "marks")}
    comparison = run_grid(
        grid(tmp_path / "slurm", {**WALK, **kills}),
        executor=Slurm(cluster="local", jobs=2),
        progress=False,
    )
    assert comparison.complete, comparison
    assert sorted(path.name for path in (tmp_path / "marks").iterdir()) == ["0", "2"]
    assert steps(tmp_path / "slurm") == steps(tmp_path / "alone")


@pytest.mark.parametrize("terminal", [True, False])
def test_ctrl_c_saves_what_is_under_way(tmp_path: Path, terminal: bool) -> None:
    """Of a terminal, where every process of the group hears it, or of a batch system, which
    tells the first alone.
    """
    (tmp_path / "grid.toml").write_text(
        'budget = "400 steps"\nseeds = 2\nbaselines = false\ntask = ["bowl"]\n'
        '[run]\nout = "runs"\nthreads = 1\n'
        "checkpoint_seconds = 1000.0\n"
        '[[method]]\nname = "walk"\npause = 0.05\n'
    )
    words = [
        "compare",
        "grid.toml",
        "--plugin",
        str(PLUGIN),
        "--executor",
        "slurm",
        "--set",
        "executor.cluster=local",
        "--json",
    ]
    command = [sys.executable, "-P", "-m", "hgms.cli", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while sum(path.read_bytes().count(b"\n") >= 5 for path in tmp_path.rglob("steps.jsonl")) < 2:
        assert process.poll() is None, process.communicate()
    (os.killpg if terminal else os.kill)(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 130, err
    assert err.strip() == "interrupted\n  run the same command again to resume"
    assert len(list(tmp_path.rglob("checkpoint.json"))) == 2


def test_where_there_is_no_slurm_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    with rejects("no-cluster", "executor", of=ConfigError):
        run_grid(grid(tmp_path / "slurm"), executor=Slurm(), progress=False)
    assert not list(tmp_path.rglob("steps.jsonl"))


def test_another_installation_on_a_node_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = module.packed

    def other(job: Any) -> Any:
        message = true(job)
        return message | {"installation": message["installation"] | {"hgms_core": "0123456789ab"}}

    monkeypatch.setattr(module, "packed", other)
    with rejects("other-installation", of=ConfigError) as caught:
        run_grid(grid(tmp_path / "slurm"), executor=Slurm(cluster="local", jobs=1), progress=False)
    assert "there, 0123456789ab here" in caught.value.message
    assert not list(tmp_path.rglob("steps.jsonl"))


def test_without_submitit_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with rejects("missing-package", "--executor", of=MissingExtra) as caught:
        run_grid(grid(tmp_path / "slurm"), executor=Slurm(), progress=False)
    assert caught.value.install == "pip install 'hgms[slurm]'"
