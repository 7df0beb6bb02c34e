"""Progress of a run: lines in a log, and one output of a notebook that is replaced."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from hgms.runs import Progress, bars, progress
from hgms.runs.bars import Bars
from hgms_core import RunInfo
from hgms_core.budget import Budget

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
    monkeypatch.setattr(bars, "time", made)
    return made


# --- a log


def test_a_log_has_a_line_now_and_then_if_wanted(
    clock: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    """The remaining time excludes the start-up of the first step, which takes 110 s; each of the
    12 steps takes 20 s.
    """
    for enabled in (True, False):
        with Progress(enabled=enabled) as view:
            for step in range(6):
                clock.now += 130.0 if step == 1 else 20.0
                view.watch(INFO, {"step": step, "upper_loss": 0.5}, step / 12)
    first, second, third = capsys.readouterr().err.splitlines()  # every thirty seconds
    assert first.startswith("hg-ms seed 3: 8 % · step 1 · f 0.5")
    assert " left" not in first
    assert [line.rpartition("· ")[2] for line in (second, third)] == ["180 s left", "140 s left"]


# --- a notebook


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What each output of a notebook's cell showed, in order."""
    shown: list[list[str]] = []

    def display(text: str, *, display_id: bool) -> SimpleNamespace:
        assert display_id
        shown.append([text])
        return SimpleNamespace(update=shown[-1].append)

    package, displays = ModuleType("IPython"), ModuleType("IPython.display")
    package.__dict__["get_ipython"] = lambda: SimpleNamespace(kernel=object())
    displays.__dict__.update(HTML=str, display=display)
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", displays)
    return shown


def test_a_notebook_has_one_output_that_is_replaced_and_errors_stay_in_it(
    clock: Time, outputs: list[list[str]]
) -> None:
    with Bars() as view:
        for step in range(1000):
            clock.now += 0.01
            view.show("seed <0>", step, f"step {step}", total=1000)
        view.show("ended", 0.5)
        view.remove("ended")
        view.print_error("a: failed & gone")
    with Bars(enabled=False) as view:
        view.show("a", 0.5)
    [output] = outputs
    assert 30 < len(output) < 50  # four a second
    for part in ("seed &lt;0&gt;", "step 999", 'value="0.9990"', "a: failed &amp; gone"):
        assert part in output[-1]
    assert "ended" not in output[-1]
