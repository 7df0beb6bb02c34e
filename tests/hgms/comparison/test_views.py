"""What a comparison and a run show on a terminal while they last, and pictures of weights."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hgms.demo.pictures import draw_weights
from hgms.executors import Board
from hgms.runs import leased
from hgms_core import HgmsError

KINDS = ("clean", "corrupted")


def test_pictures_of_weights_are_written_as_png_and_svg(tmp_path: Path) -> None:
    weights = {f"metric.weight_{part}_q{share}": 0.5 for part in KINDS for share in (10, 50, 90)}
    rows: list[dict[str, Any]] = [{"step": step, "seconds": step} for step in (0, 1)]
    still = [{**row, **weights} for row in rows]
    # weights that never change say nothing
    assert draw_weights({"a": still, "b": rows}, tmp_path / "still") == []
    moving = [{**row, "metric.weight_clean_q50": 0.6 + 0.01 * row["step"]} for row in still]
    png, svg = draw_weights({"a": moving, "b": rows}, tmp_path / "new" / "folder" / "weights")
    assert (png.name, svg.name) == ("weights.png", "weights.svg")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in svg.read_bytes()[:2000]


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


@pytest.mark.extended
def test_ctrl_c_is_not_echoed_into_a_view() -> None:
    """It would push the last line down, and the first one would stand twice."""
    environment = {**os.environ, "TERM": "xterm"}
    command = [sys.executable, "-c", TERMINAL]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.splitlines()[-1].endswith("[True, False, True, False, True]"), done.stderr


def test_a_board_shows_running_cells_who_carries_them_out_and_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rich.console

    shown = io.StringIO()
    settings: dict[str, Any] = {"force_terminal": True, "width": 250, "color_system": None}
    console = rich.console.Console(file=shown, **settings)
    monkeypatch.setattr(rich.console, "Console", lambda **_: console)
    job = SimpleNamespace(path=tmp_path)
    with leased(tmp_path), Board(1) as board:
        board.say("one: its process was killed; it is taken up again")
        board.step(job, 0.5, {"step": 3})
    with Board(2) as board:
        for title in ("t, a, seed 0", "t, b, seed 0"):
            board.began(title)
            board.step(title, 0.0, {"step": 0})
            board.step(title, 0.5, {"step": 3, "upper_loss": 0.25})
        board.ended("t, a, seed 0", "failed", HgmsError("out-of-memory", "out of memory\nand more"))
        board.ended("t, b, seed 0", "done", None)
    parts = [f"process {os.getpid()} · step 3", "taken up again", "f 0.25", "2 of 2"]
    parts += ["t, a, seed 0: failed: out of memory"]
    assert [part for part in parts if part not in shown.getvalue()] == []
    assert "and more" not in shown.getvalue()
