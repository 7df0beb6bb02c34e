"""What a comparison and a run show on a terminal while they last, and pictures of weights."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hgms.demo.pictures import draw_weights
from hgms.executors import Board
from hgms.runs import Progress, leased
from hgms_core import HgmsError, RunInfo
from hgms_core.budget import Budget

INFO = RunInfo(task="t", method="a", seed=0, budget=Budget(outer_steps=4))
WEIGHTS = {
    f"metric.weight_{part}_q{share}": level + share / 1000
    for part, level in (("clean", 0.5), ("corrupted", 0.1))
    for share in (10, 50, 90)
}


def test_pictures_of_weights_are_written_as_png_and_svg(tmp_path: Path) -> None:
    without: list[dict[str, Any]] = [{"step": step, "seconds": step} for step in (0, 1)]
    still = [{**row, **WEIGHTS} for row in without]
    # weights that never change say nothing
    assert draw_weights({"a": still, "b": without}, tmp_path / "still") == []
    moving = [{**row, "metric.weight_clean_q50": 0.6 + 0.01 * row["step"]} for row in still]
    out = tmp_path / "new" / "folder" / "weights"
    png, svg = draw_weights({"a": moving, "b": without}, out)
    assert (png.name, svg.name) == ("weights.png", "weights.svg")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in svg.read_bytes()[:2000]


def test_a_view_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as view:
        view.watch(INFO, {"step": 3, "upper_loss": 0.5}, 0.5)
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    import rich.console

    written = io.StringIO()
    original = rich.console.Console
    settings: dict[str, Any] = {"force_terminal": True, "width": 250, "color_system": None}
    monkeypatch.setattr(rich.console, "Console", lambda **_: original(file=written, **settings))
    return written


TERMINAL = """
import os, pty
process, handle = pty.fork()
if process == 0:
    import termios
    from hgms.executors import Board
    from hgms.runs import Progress
    flag = lambda: bool(termios.tcgetattr(0)[3] & termios.ECHOCTL)
    flags = [flag()]
    for view in (Progress(), Board(2)):
        with view:
            flags.append(flag())
        flags.append(flag())
    print(flags, flush=True)
    os._exit(0)
said = b""
try:
    while part := os.read(handle, 1000):
        said += part
except OSError:
    pass
print(said.decode().splitlines()[-1])
"""


def test_ctrl_c_is_not_echoed_into_a_view() -> None:
    """It would push the last line down, and the first one would stand twice."""
    environment = {**os.environ, "TERM": "xterm"}
    command = [sys.executable, "-c", TERMINAL]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.splitlines()[-1].endswith("[True, False, True, False, True]"), done.stderr


def missing(parts: str, shown: str) -> list[str]:
    return [part for part in parts.split("|") if part not in shown]


def test_a_board_shows_which_process_carries_out_what(
    terminal: io.StringIO, tmp_path: Path
) -> None:
    job = SimpleNamespace(path=tmp_path)
    marker = tmp_path / ".lease"
    with leased(tmp_path):
        with Board(1) as board:
            board.stage(job, "finetune: 24 rows")
        with Board(1) as board:
            board.say("one: its process was killed; it is taken up again")
            board.step(job, 0.5, {"step": 3})
        marker.write_text(re.sub("pid=.*\nhost=.*", "pid=77\nhost=node-2", marker.read_text()))
        with Board(1) as board:
            board.step(job, 0.75, {"step": 4})
    here = f"process {os.getpid()}"
    parts = (
        f"{here} · finetune: 24 rows|{here} · step 3|taken up again|process 77 on node-2 · step 4"
    )
    assert missing(parts, terminal.getvalue()) == []


def test_a_comparison_shows_its_running_cells_and_its_failures(terminal: io.StringIO) -> None:
    with Board(2) as board:
        for title in ("t, a, seed 0", "t, b, seed 0"):
            board.began(title)
            board.step(title, 0.0, {"step": 0})
            board.step(title, 0.5, {"step": 3, "upper_loss": 0.25})
        board.ended("t, a, seed 0", "failed", HgmsError("out-of-memory", "out of memory\nand more"))
        board.ended("t, b, seed 0", "done", None)
    shown = terminal.getvalue()
    assert missing("all|f 0.25|50%|t, a, seed 0: failed: out of memory|2 of 2", shown) == []
    assert "and more" not in shown
