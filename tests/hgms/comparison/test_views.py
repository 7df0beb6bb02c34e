"""What a comparison says while it lasts, and pictures of weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hgms.demo.pictures import draw_weights
from hgms.executors import Board
from hgms_core import HgmsError

KINDS = ("clean", "corrupted")


@pytest.mark.extended
def test_pictures_of_weights_are_written_as_png_and_svg(tmp_path: Path) -> None:
    weights = {f"metric.weight_{part}_q{share}": 0.5 for part in KINDS for share in (10, 50, 90)}
    rows: list[dict[str, Any]] = [{"step": step, "seconds": step} for step in (0, 1)]
    still = [{**row, **weights} for row in rows]
    # weights that never change say nothing
    assert draw_weights({"a": still, "b": rows}, tmp_path / "still") == []
    moving = [{**row, "metric.weight_clean_q50": 0.6 + 0.01 * row["step"]} for row in still]
    png, svg = draw_weights({"a": moving, "b": rows}, tmp_path / "new" / "folder" / "weights")
    assert (png.name, svg.name) == ("weights.png", "weights.svg")
    assert (png.read_bytes()[1:4], b"<svg" in svg.read_bytes()[:2000]) == (b"PNG", True)


def test_a_board_shows_what_has_ended_and_why_it_failed() -> None:
    lines: list[str] = []
    with Board(2, bars=False, echo=lines.append) as board:
        board.began("t, a, seed 0")
        board.ended("t, a, seed 0", "failed", HgmsError("out-of-memory", "out of memory\nand more"))
    assert [re.sub(r"\d\.\d", "…", line) for line in lines] == [
        "[1/2] t, a, seed 0: failed after … s: out of memory"
    ]
