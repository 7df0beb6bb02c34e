"""A run's numbers in a log, and what a person hears at the first Ctrl-C."""

from __future__ import annotations

import os
import signal

import pytest

from hgms.runs import Interrupted, Interrupts, Progress, progress
from hgms_core import RunInfo
from hgms_core.budget import Budget

INFO = RunInfo(task="t", method="hg-ms", seed=3, budget=Budget(outer_steps=10))


def test_a_log_has_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Progress() as view:
        for step in range(100):
            clock[0] += 1.0
            view.watch(INFO, {"step": step, "upper_loss": 0.5}, step / 100)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3  # every thirty seconds of a hundred
    assert lines[0].startswith("hg-ms seed 3: 29 % · step 29 · f 0.5 · 1.0 steps/s")


def test_the_remaining_time_excludes_the_start_up_of_the_first_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading and compiling takes 110 s, each of the 12 steps 20 s."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(progress, "LOG_SECONDS", 10.0)
    with Progress() as view:
        view.watch(INFO, {"step": 0}, 0.0)
        for step, seconds in enumerate((130.0, 150.0, 170.0), start=1):
            clock[0] = seconds
            view.watch(INFO, {"step": step}, step / 12)
    first, second, third = capsys.readouterr().err.splitlines()
    assert " left" not in first
    assert second.endswith("step 2 · 20 s a step · 200 s left")
    assert third.endswith("step 3 · 20 s a step · 180 s left")


def test_what_is_not_wanted_leaves_no_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    with Progress(enabled=False) as view:
        view.watch(INFO, {"step": 1}, 0.1)
    assert not capsys.readouterr().err


def test_the_first_ctrl_c_says_that_it_was_heard(capsys: pytest.CaptureFixture[str]) -> None:
    with Interrupts() as interrupts:
        assert not capsys.readouterr().err
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.number == signal.SIGINT
        assert "a second Ctrl-C stops at once" in capsys.readouterr().err
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)
