"""What the executors `ray` and `slurm` have in common, on this machine: the same files as from one
process, lost workers, Ctrl-C. `pytest -m nightly` on this file.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.executor_grids import PLUGIN, WALK, contents, grid, steps
from support.processes import started
from support.slurm_stand_in import SlurmHere
from support.slurm_stand_in import __file__ as slurm_here

from hgms.comparison.run_grid import run_grid
from hgms.executors.ray.executor import Ray

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("home")]

MAKES: dict[str, Callable[[str], Any]] = {
    "ray": lambda address: Ray(address=address, jobs=2),
    "slurm": lambda address: SlurmHere(jobs=2),
}


@pytest.fixture(params=["ray", "slurm"])
def name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip({"ray": "ray", "slurm": "submitit"}[request.param])
    monkeypatch.chdir(tmp_path)
    return str(request.param)


@pytest.fixture
def address(name: str) -> Iterator[str]:
    """A cluster of Ray on this machine."""
    if name != "ray":
        yield ""
        return
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    yield cluster.address
    cluster.shutdown()


def test_workers_write_what_one_process_writes_and_nobody_else_reads_their_secrets(
    name: str, address: str, tmp_path: Path
) -> None:
    alone = run_grid(grid(tmp_path / "alone"), jobs=0, progress=False)
    through = run_grid(grid(tmp_path / name), executor=MAKES[name](address), progress=False)
    assert contents(tmp_path / name) == contents(tmp_path / "alone")
    rows = [[row.metrics for row in each.tables[0].rows] for each in (through, alone)]
    assert rows[0] == rows[1]
    if name == "slurm":
        pickles = list((tmp_path / ".hgms-slurm").rglob("*.pkl"))
        secrets = [tmp_path / ".hgms-slurm", *pickles, pickles[0]]
        assert all(path.stat().st_mode & 0o077 == 0 for path in secrets)
    library = sys.modules.get("ray")
    assert library is None or not library.is_initialized(), "it ends with the grid"


def test_a_killed_workers_run_is_taken_up_again(
    name: str, address: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_grid(grid(tmp_path / "alone"), jobs=0, progress=False)
    (tmp_path / "marks").mkdir()
    kills = {"breaks": "kill", "at": 5, "seed": 2, "every": True, "once": str(tmp_path / "marks")}
    runs = grid(tmp_path / name, {**WALK, **kills})
    assert run_grid(runs, executor=MAKES[name](address), progress=False).complete
    assert "raylet" not in capfd.readouterr().out, "a table or JSON is to be there"
    assert sorted(path.name for path in (tmp_path / "marks").iterdir()) == ["0", "2"]
    assert steps(tmp_path / name) == steps(tmp_path / "alone")


def test_ctrl_c_saves_what_is_under_way(name: str, address: str, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(
        'budget = "400 steps"\nseeds = 2\nbaselines = false\ntask = ["bowl"]\n'
        '[run]\nout = "runs"\nthreads = 1\n'
        "checkpoint_seconds = 1000.0\n"
        '[[method]]\nname = "walk"\npause = 0.05\n'
    )
    words = ["compare", "grid.toml", "--plugin", str(PLUGIN), "--json", "--executor"]
    own = {"ray": ["ray", "--address", address, "--jobs", "2"]}
    own["slurm"] = ["slurm-here", "--plugin", slurm_here]
    process = started(tmp_path, *words, *own[name], start_new_session=True)
    while sum(path.read_bytes().count(b"\n") >= 5 for path in tmp_path.rglob("steps.jsonl")) < 2:
        assert process.poll() is None, process.communicate()
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=90)
    assert (process.returncode, out) == (130, ""), err
    assert "run the same command again to resume" in err
    assert "Traceback" not in err
    assert len(list(tmp_path.rglob("manifest.json"))) == 2
