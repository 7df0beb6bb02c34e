"""The lines of a running comparison."""

from __future__ import annotations

import re

from hgms.executors import Board
from hgms_core import HgmsError


def test_a_board_shows_what_has_ended_and_why_it_failed() -> None:
    lines: list[str] = []
    with Board(2, bars=False, echo=lines.append) as board:
        board.began("t, a, seed 0")
        board.end("t, a, seed 0", "failed", HgmsError("out-of-memory", "out of memory\nand more"))
    assert [re.sub(r"\d\.\d", "…", line) for line in lines] == [
        "[1/2] t, a, seed 0: failed after … s: out of memory"
    ]
