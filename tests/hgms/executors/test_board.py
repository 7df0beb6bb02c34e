"""Jobs under way: lines of a log, and a view of all of them on a terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from attrs import frozen

from hgms.executors import Board, board
from hgms_core import ConfigError


@frozen
class Work:
    """A job with a folder, as a cell has it."""

    path: Path

    def __str__(self) -> str:
        return self.path.name


ERROR = ConfigError("missing-file", "no such data\nat all", place=("train.jsonl",))


def test_on_a_terminal_a_job_is_shown_with_its_owner_until_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose it is, is looked up now and then; a job without a folder is nobody's."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    owners: list[Path] = []

    def holder(path: Path, *names: str) -> str:
        owners.append(path)
        return "process 7"

    monkeypatch.setattr(board, "holder", holder)
    work, other = Work(tmp_path / "one"), "no folder"

    def shown() -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)

    with Board(3) as seen:
        for each in (work, other):
            seen.began(each)
        seen.stage(work, "compiles")
        seen.step(work, 0.5, {"step": 3, "upper_loss": 0.25})
        seen._view.bars._progress.refresh()  # type: ignore[union-attr]
        middle = shown()
        seen.say("worker 3 is lost")
        seen.end(work, "failed", ERROR)
        seen.end(other, "done")
    after = shown()
    line = next(line for line in middle.splitlines() if "one" in line and "50%" in line)
    assert all(part in line for part in ("process 7", "step 3", "f 0.25"))
    assert owners == [work.path], "the second look comes later"
    parts = ("worker 3 is lost", "one: failed: no such data", "2 of 3", " s left")
    assert [part for part in parts if part not in after] == []
