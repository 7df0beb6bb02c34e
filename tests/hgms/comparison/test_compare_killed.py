"""Comparisons in processes of their own: kills, signals and workers change no result."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
from support.processes import Server, rows_written, strike

GRID = """
budget = "20 steps"
seeds = 2
baselines = false
task = ["bowl"]

[run]
out = "runs"
checkpoint_seconds = 0.0

[[method]]
name = "walk"
pause = 0.02

[[method]]
name = "walk"
label = "quick"
move.lr = 0.3
pause = 0.02
"""
PLUGIN = Path(__file__).parents[2] / "support" / "grid_plugin.py"
COMPARE = ("compare", "grid.toml", "--plugin", str(PLUGIN), "--jobs")


def prepared(folder: Path, text: str = GRID) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "grid.toml").write_text(text)
    return folder


def contents(out: Path) -> dict[str, bytes]:
    """Everything that has to be the same for every run of one seed."""
    kept = ("checkpoint", "steps", "summary")
    files = (path for path in sorted(out.rglob("*")) if path.name.startswith(kept))
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, server: Server) -> dict[str, bytes]:
    """What a comparison writes that is left alone."""
    folder = prepared(tmp_path_factory.mktemp("whole"))
    server.start(folder, *COMPARE, "0")
    assert server.end() == 0
    files = contents(folder / "runs")
    assert len(files) == 4 * 4
    return files


@pytest.mark.parametrize("kills", [2, pytest.param(6, marks=pytest.mark.extended)])
def test_killed_again_and_again_it_equals_the_one_left_alone(
    tmp_path: Path, server: Server, whole: dict[str, bytes], kills: int
) -> None:
    folder = prepared(tmp_path / "killed")
    chance = random.Random(0)
    (folder / "hold-1-19").touch()  # nothing passes the 62nd of 84 rows while kills fall
    for _ in range(kills):
        goal = min(rows_written(folder) + chance.randint(2, 54 // kills), 62)
        process = server.start(folder, *COMPARE, "0")
        strike(process, folder, goal, signal.SIGKILL, chance.uniform(0, 0.05))
        assert server.end() == -signal.SIGKILL
    (folder / "hold-1-19").unlink()
    server.start(folder, *COMPARE, "0")
    assert server.end() == 0
    assert contents(folder / "runs") == whole


@pytest.mark.extended
def test_sigterm_saves_every_running_cell(
    tmp_path: Path, server: Server, whole: dict[str, bytes]
) -> None:
    """As a batch system ends a job whose time is up: checkpoints are written, and nothing is
    recorded as a failure.
    """
    text = GRID.replace("checkpoint_seconds = 0.0", "checkpoint_seconds = 1000.0")
    folder = prepared(tmp_path / "ended", text)
    (folder / "hold-0-12").touch()
    process = server.start(folder, *COMPARE, "2")
    strike(process, folder, 2 * 13, signal.SIGTERM, 0.03)
    assert server.end() == 128 + signal.SIGTERM
    assert len(list(folder.rglob("checkpoint.json"))) == 2
    assert not list(folder.rglob("summary.json"))
    (folder / "hold-0-12").unlink()
    server.start(folder, *COMPARE, "0")
    assert server.end() == 0
    left, went_on = (
        sorted(data for name, data in files.items() if name.endswith("steps.jsonl"))
        for files in (whole, contents(folder / "runs"))
    )
    assert went_on == left


@pytest.mark.extended
def test_with_workers_kills_and_ctrl_c_change_nothing(
    tmp_path: Path, server: Server, whole: dict[str, bytes]
) -> None:
    """SIGKILL of the parent alone, so that its workers have to end by themselves; then Ctrl-C;
    then to the end.
    """
    folder = prepared(tmp_path / "killed")
    # the first run ends after the first blow, the third after the second
    (folder / "hold-0-19").touch()
    process = server.start(folder, *COMPARE, "1")
    strike(process, folder, 5, signal.SIGKILL, 0.03)
    assert server.end() == -signal.SIGKILL
    (folder / "hold-0-19").unlink()
    (folder / "hold-1-19").touch()
    process = server.start(folder, *COMPARE, "1")
    strike(process, folder, rows_written(folder) + 25, signal.SIGINT, 0.03)
    assert server.end() == 130
    (folder / "hold-1-19").unlink()
    errors = (folder / "err").read_text()
    assert "run the same command again" in errors
    assert "Traceback" not in errors
    server.start(folder, *COMPARE, "2", "--json")
    assert server.end() == 0, (folder / "err").read_text()
    assert contents(folder / "runs") == whole
    printed = json.loads((folder / "out").read_text())
    assert [row["method"] for row in printed["tasks"][0]["methods"]] == ["walk", "quick"]


@pytest.mark.extended
def test_a_killed_worker_takes_no_other_cell_with_it(tmp_path: Path, server: Server) -> None:
    text = GRID.replace('label = "quick"', 'label = "quick"\nbreaks = "kill"\nseed = 0')
    folder = prepared(tmp_path, text.replace("20 steps", "4 steps").replace("0.02", "0.0"))
    server.start(folder, *COMPARE, "1", "--json")
    assert server.end() == 1
    printed = json.loads((folder / "out").read_text())
    [failure] = printed["failed"]
    assert (failure["method"], failure["seed"], failure["status"]) == ("quick", 0, "failed")
    assert "killed by SIGKILL" in failure["reason"]
    methods = printed["tasks"][0]["methods"]
    counts = [(row["failed"], row["metrics"]["distance"]["n"]) for row in methods]
    assert counts == [(0, 2), (1, 1)]
    assert methods[0]["peak_memory_bytes"]["mean"] > 1e7
