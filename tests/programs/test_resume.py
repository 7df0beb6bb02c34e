"""A run killed with SIGKILL at random moments, resumed each time, equals the run that was left alone, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import steps_written

pytestmark = pytest.mark.plugins

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

# Imports once, then forks a process for every run that is asked for: fresh interpreters would spend their time importing.
SERVER = """
import os, sys
import torch, sklearn.datasets
torch.set_num_threads(1)
from hgms_run import load
from hgms_run import run_config
print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os.chdir(line.strip())
        run_config(load("config.toml"), resume=True)
        os._exit(0)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class Server:
    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def start(self, folder: Path) -> int:
        """Begins or resumes the run in ``folder``; its process number."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{folder}\n")
        self._process.stdin.flush()
        return int(self._line())

    def end(self) -> int:
        """Waits for the run to end; its exit code."""
        return int(self._line())

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def prepared(folder: Path, method: str, count: int) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG.format(method=method, count=count))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    [path] = folder.glob("runs/*/*/*")
    kept = [each for each in path.iterdir() if each.name.startswith(("checkpoint", "steps", "summary", "config"))]
    assert len(kept) == 5, sorted(path.iterdir())
    return {each.name: each.read_bytes() for each in kept}


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_and_resumed_equals_left_alone(tmp_path: Path, server: Server, kills: int) -> None:
    whole, killed = (prepared(tmp_path / name, "hg-ms", 3) for name in ("whole", "killed"))
    server.start(whole)
    assert server.end() == 0

    chance = random.Random(0)
    for kill in range(kills):
        # The run must move on, or all kills would be kills of the same step; then a random moment more.
        goal = steps_written(killed) + chance.randint(1, 3)
        process = server.start(killed)
        while steps_written(killed) < goal:
            time.sleep(0.0005)
        time.sleep(chance.uniform(0, 0.03))
        os.kill(process, signal.SIGKILL)
        assert server.end() == -signal.SIGKILL, f"the run ended before kill {kill + 1}"
    server.start(killed)
    assert server.end() == 0
    assert contents(whole) == contents(killed)


def test_ctrl_c_says_how_to_resume(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "run", "hg-implicit", 1)
    command = [sys.executable, "-m", "hgms_cli", "run", "config.toml"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and steps_written(folder) < 3:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in errors
    assert "Traceback" not in errors
