"""Progress of a run: lines in a log."""

from __future__ import annotations

import pytest

from hgms.config import Budget
from hgms.runs import Progress, progress
from hgms_core import RunInfo

INFO = RunInfo(task="t", method="hg-ms", seed=3, budget=Budget(outer_steps=10))


class Time:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    """A clock that goes on where a test says so."""
    made = Time()
    monkeypatch.setattr(progress, "time", made)
    return made


def test_a_log_has_a_line_now_and_then_if_wanted(
    clock: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    for enabled in (True, False):
        with Progress(enabled=enabled) as view:
            for step in range(6):
                clock.now += 130.0 if step == 1 else 20.0
                view.watch(INFO, {"step": step, "upper_loss": 0.5}, step / 12)
    lines = capsys.readouterr().err.splitlines()  # every thirty seconds
    assert lines == [
        f"hg-ms seed 3: {share} % · step {step} · f 0.5"
        for step, share in ((1, 8), (3, 25), (5, 42))
    ]
