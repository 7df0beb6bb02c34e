"""The executor `ray`: its addresses, nodes that are gone, workers that die again and again.
`pytest -m nightly` on this file.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import psutil
import pytest
from support.executor_grids import begun_twice, contents, grid
from support.helpers import rejects

from hgms.comparison.run_grid import run_grid
from hgms.executors.ray.executor import Ray
from hgms_core import ConfigError

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True, scope="module")
def installed(home: Path) -> None:
    pytest.importorskip("ray")


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
    assert "it is retried" in said
    assert len(begun_twice(tmp_path / "ray")) == 1, "what the node had begun, nothing else"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto", "nowhere.invalid:6379", "6379:"])
def test_a_bad_address_is_one_error(tmp_path: Path, address: str) -> None:
    with rejects("no-cluster", "executor", "address", of=ConfigError) as caught:
        run_grid(grid(tmp_path), executor=Ray(address=address), progress=False)
    assert f" at {address}: " in caught.value.message
    assert not list(tmp_path.rglob("steps.jsonl"))
