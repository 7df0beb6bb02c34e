"""Jobs under way: lines of a log, and a view of all of them on a terminal."""

from __future__ import annotations

import re

import pytest

from hgms.executors import Board
from hgms_core import ConfigError

ERROR = ConfigError("missing-file", "no such data\nat all", place=("train.jsonl",))


def test_on_a_terminal_a_job_is_shown_until_it_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")

    def shown() -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)

    with Board(3) as seen:
        for each in ("one", "other"):
            seen.began(each)
        seen.show("one", 0.0, "compiles")
        seen.step("one", 0.5, {"step": 3, "upper_loss": 0.25})
        seen._bars.refresh()  # type: ignore[union-attr]
        middle = shown()
        seen.say("worker 3 is lost")
        seen.end("one", "failed", ERROR)
        seen.end("other", "done")
    after = shown()
    line = next(line for line in middle.splitlines() if "one" in line and "50%" in line)
    assert all(part in line for part in ("step 3", "f 0.25"))
    parts = ("worker 3 is lost", "one: failed: no such data", "2 of 3")
    assert [part for part in parts if part not in after] == []
