"""Comparisons in processes of their own: kills, signals and workers change no result."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from support.processes import Server, rows_written, strike
from support.run_folders import contents

pytestmark = pytest.mark.extended
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


def prepared(folder: Path, *held: str) -> Path:
    """Of seeds and steps that are held, so that no run passes them while blows fall."""
    folder.mkdir(exist_ok=True)
    (folder / "grid.toml").write_text(GRID)
    for name in held:
        (folder / name).touch()
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, server: Server) -> dict[str, bytes]:
    """What a comparison writes that is left alone."""
    folder = prepared(tmp_path_factory.mktemp("whole"))
    assert server.run(folder, *COMPARE, "0").returncode == 0
    return contents(folder / "runs")


def test_killed_again_and_again_it_equals_the_one_left_alone(
    tmp_path: Path, server: Server, whole: dict[str, bytes]
) -> None:
    folder = prepared(tmp_path / "killed", "hold-1-19")  # the 62nd of 84 rows
    chance = random.Random(0)
    for _ in range(6):
        goal = min(rows_written(folder) + chance.randint(2, 9), 62)
        process = server.start(folder, *COMPARE, "0")
        strike(process, folder, goal, signal.SIGKILL, chance.uniform(0, 0.05))
        assert server.end() == -signal.SIGKILL
    (folder / "hold-1-19").unlink()
    assert server.run(folder, *COMPARE, "0").returncode == 0
    assert contents(folder / "runs") == whole
    assert len(whole) == 4 * 3


@pytest.mark.parametrize(
    ("blow", "code"),
    [
        # of the parent alone, so that its workers have to end by themselves
        (signal.SIGKILL, -signal.SIGKILL),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.nightly),
        # as a batch system ends a job whose time is up
        pytest.param(signal.SIGTERM, 128 + signal.SIGTERM, marks=pytest.mark.nightly),
    ],
)
def test_with_workers_a_blow_saves_every_running_cell_and_changes_nothing(
    tmp_path: Path, server: Server, whole: dict[str, bytes], blow: int, code: int
) -> None:
    folder = prepared(tmp_path / "ended", "hold-0-12")
    strike(server.start(folder, *COMPARE, "2"), folder, 2 * 13, blow, 0.03)
    assert server.end() == code
    saved = (len(list(folder.rglob(name))) for name in ("manifest.json", "summary.json"))
    assert (*saved, "Traceback" in (folder / "err").read_text()) == (2, 0, False)
    (folder / "hold-0-12").unlink()
    done = server.run(folder, *COMPARE, "2")
    assert done.returncode == 0, done.stderr
    assert contents(folder / "runs") == whole
