"""A run killed with SIGKILL at random moments, resumed each time, equals the run that was left
alone, bit for bit.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from support.processes import Server, rows_written, strike

CONFIG = """
seed = 3

[task]
name = "hyper-cleaning"
dataset = "digits"
corruption = 0.5

[method]
name = "{method}"
generator.count = {count}
generator.steps = 5

[budget]
outer_steps = 32

[run]
threads = 1
evaluate_every = 3
checkpoint_seconds = 0.0
"""


def prepared(folder: Path, method: str, count: int) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG.format(method=method, count=count))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    [path] = folder.glob("runs/*/*/*")
    kept = [
        file
        for file in path.iterdir()
        if file.name.startswith(("checkpoint", "steps", "summary", "config"))
    ]
    assert len(kept) == 5, sorted(path.iterdir())
    return {file.name: file.read_bytes() for file in kept}


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.extended)])
def test_killed_and_resumed_equals_left_alone(tmp_path: Path, server: Server, kills: int) -> None:
    whole, killed = (prepared(tmp_path / name, "hg-ms", 3) for name in ("whole", "killed"))
    assert server.run(whole, "run", "config.toml").returncode == 0

    chance = random.Random(0)
    for kill in range(kills):
        # The run must move on, or all kills would be kills of the same step; then a random moment
        # more.
        rows = rows_written(killed) + chance.randint(1, 20 // kills)
        process = server.start(killed, "run", "config.toml", "--resume")
        strike(process, killed, rows, signal.SIGKILL, chance.uniform(0, 0.03))
        assert server.end() == -signal.SIGKILL, f"the run ended before kill {kill + 1}"
    assert server.run(killed, "run", "config.toml", "--resume").returncode == 0
    assert contents(whole) == contents(killed)


def test_ctrl_c_says_how_to_resume(tmp_path: Path, server: Server) -> None:
    folder = prepared(tmp_path / "run", "hg-implicit", 1)
    process = server.start(folder, "run", "config.toml")
    strike(process, folder, 3, signal.SIGINT)
    assert server.end() == 130
    errors = (folder / "err").read_text()
    assert "--resume" in errors
    assert "Traceback" not in errors
