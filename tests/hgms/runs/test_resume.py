"""A run that is stopped by a signal or killed, and resumed, equals the run that was left alone,
bit for bit.
"""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from pathlib import Path

import pytest
from support.descent import Descent, descend, files, resumed, signals
from support.helpers import run_files
from support.processes import Server, forked, rows_written, strike

from hgms.runs import Interrupted, RunFolder, RunSettings

# --- signals


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("whole")
    descend(folder=path)
    return run_files(path)


@pytest.mark.parametrize(
    ("number", "step"), [(signal.SIGINT, 0), (signal.SIGTERM, 4), (signal.SIGHUP, 7)]
)
def test_a_signal_saves_and_the_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, whole: dict[str, bytes], number: signal.Signals, step: int
) -> None:
    folder = RunFolder(tmp_path / "run")
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as caught:
        descend(signals(number, step), folder=folder)
    assert caught.value.number == number
    assert "resume=True" in (caught.value.hint or "")
    assert signal.getsignal(number) == before
    assert (folder.load() or ({}, -1))[1] == step + 1, "the running step was finished"
    assert folder.read_summary() is None
    assert resumed(folder).info.resumed_from == step + 1
    assert run_files(folder.path) == whole


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    folder, settings = RunFolder(tmp_path / "run"), RunSettings(checkpoint_seconds=0)
    for step in (1, 5):
        dies = partial(descend, signals(signal.SIGKILL, step), settings=settings, resume=True)
        process = forked(partial(dies, folder=folder))
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    assert resumed(folder).info.resumed_from == 5
    assert run_files(folder.path) == whole


def test_the_first_signal_is_heard_and_a_second_one_stops_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    heard: list[str] = []

    def twice(step: int) -> None:
        signal.raise_signal(signal.SIGINT)
        heard.append(capsys.readouterr().err)
        signal.raise_signal(signal.SIGTERM)
        heard.append("the step went on")

    with pytest.raises(KeyboardInterrupt):
        descend(Descent(before=twice))
    assert len(heard) == 1
    assert "a second Ctrl-C stops at once" in heard[0]


def test_a_kill_right_after_the_end_leaves_no_old_state(tmp_path: Path) -> None:
    descend(folder=tmp_path / "run")
    before = files(tmp_path / "run")
    (tmp_path / "run" / "checkpoint-3.safetensors").write_bytes(b"of an earlier step")
    assert descend(folder=tmp_path / "run", resume=True).summary["status"] == "done"
    assert files(tmp_path / "run") == before


# --- the command, in a process of its own

CONFIG = """
seed = 3

[task]
name = "hyper-cleaning"
dataset = "digits"
corruption = 0.5

[method]
name = "hg-ms"
generator.count = 3
generator.steps = 5

[budget]
outer_steps = 32

[run]
threads = 1
evaluate_every = 3
checkpoint_seconds = 0.0
"""


def contents(folder: Path) -> dict[str, bytes]:
    [path] = folder.glob("runs/*/*/*")
    kept = run_files(path) | {"config.toml": (path / "config.toml").read_bytes()}
    assert len(kept) == 4, sorted(path.iterdir())
    return kept


@pytest.mark.extended
def test_commands_that_are_killed_and_resumed_equal_one_left_alone(
    tmp_path: Path, server: Server
) -> None:
    alone, killed = (tmp_path / name for name in ("alone", "killed"))
    for folder in (alone, killed):
        folder.mkdir()
        (folder / "config.toml").write_text(CONFIG)
    assert server.run(alone, "run", "config.toml").returncode == 0

    chance = random.Random(0)
    for kill in range(10):
        # The run must move on, or all kills would be kills of the same step; then a random moment
        # more.
        rows = rows_written(killed) + chance.randint(1, 2)
        process = server.start(killed, "run", "config.toml", "--resume")
        strike(process, killed, rows, signal.SIGKILL, chance.uniform(0, 0.03))
        assert server.end() == -signal.SIGKILL, f"the run ended before kill {kill + 1}"
    process = server.start(killed, "run", "config.toml", "--resume")
    strike(process, killed, rows_written(killed) + 1, signal.SIGINT)
    assert server.end() == 130
    errors = (killed / "err").read_text()
    assert ("--resume" in errors, "Traceback" in errors) == (True, False)
    assert server.run(killed, "run", "config.toml", "--resume").returncode == 0
    assert contents(alone) == contents(killed)
