"""The executor `ray`: the same files as from one process, lost workers, bad addresses, another
installation. `pytest -m nightly` on this file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest
from click.testing import CliRunner
from support.executor_grids import PLUGIN, WALK, contents, grid, steps
from support.helpers import rejects

from hgms.cli import main
from hgms.comparison.run_grid import run_grid
from hgms.executors import Needs
from hgms.executors.ray import executor as module
from hgms.executors.ray.executor import Ray
from hgms_core import ConfigError, MissingExtra

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True, scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ray keeps its token in the home folder, and reads it once in a process."""
    pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """No Ray outlives its test."""
    import ray

    yield
    ray.shutdown()


def test_ray_writes_what_one_process_writes(tmp_path: Path, home: Path) -> None:
    alone = run_grid(grid(tmp_path / "alone"), jobs=0, progress=False)
    through = run_grid(grid(tmp_path / "ray"), executor=Ray(jobs=2), progress=False)
    assert contents(tmp_path / "ray") == contents(tmp_path / "alone")
    assert [row.metrics for row in through.tables[0].rows] == [
        row.metrics for row in alone.tables[0].rows
    ]
    token = home / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o077 == 0, "nobody else can read it"
    import ray as library

    assert not library.is_initialized(), "it ends with the grid"


def test_a_ray_of_its_own_listens_on_the_loopback_address_only() -> None:
    ray = Ray(jobs=1)
    ray._start()
    try:
        own = psutil.Process()
        listening = [
            connection.laddr.ip
            for process in [own, *own.children(recursive=True)]
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        ]
    finally:
        ray.close()
    assert len(listening) >= 4, "the driver, the control store and the node"
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    assert module.SWITCH not in os.environ, "another Ray of this process is as it was"


def test_a_killed_workers_run_is_taken_up_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_grid(grid(tmp_path / "alone"), jobs=0, progress=False)
    (tmp_path / "marks").mkdir()
    kills = {"breaks": "kill", "at": 5, "seed": 2, "every": True, "once": str(tmp_path / "marks")}
    comparison = run_grid(
        grid(tmp_path / "ray", {**WALK, **kills}), executor=Ray(jobs=2), progress=False
    )
    assert comparison.complete, comparison
    assert "raylet" not in capfd.readouterr().out, "a table or JSON is to be there"
    assert sorted(path.name for path in (tmp_path / "marks").iterdir()) == ["0", "2"]
    assert steps(tmp_path / "ray") == steps(tmp_path / "alone")


def test_runs_of_a_node_that_is_gone_are_taken_up_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two nodes of a cluster on this machine, of which one is killed while each carries out a
    run.
    """
    from ray.cluster_utils import Cluster

    run_grid(grid(tmp_path / "alone"), jobs=0, progress=False)
    monkeypatch.chdir(tmp_path)
    # on a busy machine a node gives up after 30 s
    monkeypatch.setenv("RAY_agent_register_timeout_ms", "300000")
    holds = [tmp_path / f"hold-{seed}-6" for seed in (1, 2, 3)]
    for hold in holds:
        hold.touch()
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    over = threading.Event()
    thread = None
    try:
        node = cluster.add_node(num_cpus=1)

        def take_away() -> None:
            while [
                path.read_bytes().count(b"\n") for path in (tmp_path / "ray").rglob("steps.jsonl")
            ].count(7) < 2:
                if over.wait(0.05):
                    return
            raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
            # a machine that is gone takes all of them with it
            of_node = raylet.children(recursive=True)
            cluster.remove_node(node, allow_graceful=False)
            for process in of_node:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            for hold in holds:
                hold.unlink()

        thread = threading.Thread(target=take_away)
        thread.start()
        comparison = run_grid(grid(tmp_path / "ray"), executor=Ray(address=cluster.address, jobs=2))
    finally:
        over.set()
        if thread is not None:
            thread.join()
        cluster.shutdown()
    assert not any(hold.exists() for hold in holds), "no two runs were under way at once"
    assert comparison.complete, comparison
    assert contents(tmp_path / "ray") == contents(tmp_path / "alone")
    said = capsys.readouterr().err
    assert said.count("its worker is gone") == 1, said
    assert "it is taken up again" in said
    counted = [
        json.loads(path.read_text())["processor_seconds"]
        for path in (tmp_path / "ray").rglob("resources.json")
    ]
    assert (len(counted), counted.count(None)) == (4, 1), (
        "what the node had begun was begun twice, nothing else"
    )


def test_what_kills_three_workers_has_failed_and_stops_no_other(tmp_path: Path) -> None:
    comparison = run_grid(
        grid(tmp_path, {**WALK, "breaks": "kill", "seed": 1}), executor=Ray(jobs=2), progress=False
    )
    [failure] = comparison.failures
    assert (failure.seed, failure.status) == (1, "failed")
    assert failure.reason.endswith("for the 3rd time")
    assert len(comparison.runs) == 3


def test_ctrl_c_saves_what_is_under_way(tmp_path: Path) -> None:
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
        "ray",
        "--jobs",
        "2",
        "--json",
    ]
    command = [sys.executable, "-P", "-m", "hgms.cli", *words]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while sum(path.read_bytes().count(b"\n") >= 5 for path in tmp_path.rglob("steps.jsonl")) < 2:
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 130, err
    assert "run the same command again to resume" in err
    assert "Traceback" not in err
    assert out == ""
    assert len(list(tmp_path.rglob("checkpoint.json"))) == 2


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto", "nowhere.invalid:6379", "6379:"])
def test_a_bad_address_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "compare",
        "--task",
        "bowl",
        "--methods",
        "walk",
        "--budget",
        "2 steps",
        "--seeds",
        "1",
        "--plugin",
        str(PLUGIN),
    ]
    done = CliRunner().invoke(main, [*words, "--executor", "ray", "--address", address])
    assert done.exit_code == 2, done.output
    assert f" at {address}: " in done.stderr
    assert "(executor.address)" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("steps.jsonl"))


def test_another_installation_on_a_worker_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = module.packed

    def other(job: Any) -> Any:
        message = true(job)
        return message | {"installation": message["installation"] | {"hgms_core": "0123456789ab"}}

    monkeypatch.setattr(module, "packed", other)
    with rejects("other-installation", of=ConfigError) as caught:
        run_grid(grid(tmp_path), executor=Ray(jobs=1), progress=False)
    assert "there, 0123456789ab here" in caught.value.message
    assert not list(tmp_path.rglob("steps.jsonl"))


def test_without_ray_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with rejects("missing-package", "--executor", of=MissingExtra) as caught:
        run_grid(grid(tmp_path), executor=Ray(), progress=False)
    assert caught.value.install == "pip install 'hgms[ray]'"


def test_a_job_that_needs_more_memory_than_there_is_waits_for_a_node_that_has_it() -> None:
    """Ray schedules by what a job needs; what that is comes from the job."""
    import ray

    job = attrs.evolve(module_job(), needs=Needs(cpus=1, memory=2**50))
    executor = Ray(jobs=1)
    executor._start()
    task = executor._submit(job)
    ended, left = ray.wait([task], timeout=1.0)
    assert (ended, left) == ([], [task])
    executor.close()


def module_job() -> Any:
    from hgms.executors import Job

    return Job(title="echo", function="hgms.executors.local:echo", arguments={"a": 1})


def test_progress_is_read_from_the_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[float] = []
    from hgms.executors import Board

    class Looked(Board):
        def step(self, cell: object, share: float, record: Any) -> None:
            seen.append(share)
            assert record["step"] >= 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hgms.comparison.run_grid.Board", Looked)
        patch.setattr(module, "LOOK", 0.1)
        run_grid(
            grid(tmp_path, {**WALK, "pause": 0.05}, seeds=1, budget="30 steps"),
            executor=Ray(jobs=1),
            progress=False,
        )
    assert len(seen) >= 3
    assert seen == sorted(seen)
    assert 0 < seen[-1] <= 1
    assert "raylet" not in capsys.readouterr().out
