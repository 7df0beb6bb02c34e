"""Progress of runs: bars on a terminal, lines in a log."""

from __future__ import annotations

import contextlib
import re
import sys
from types import ModuleType

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


def test_on_a_terminal_there_is_a_line_for_each_title(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with Progress() as view:
        view.show("seed 0", 1.0, "step 1", total=4.0)
        view.show("gone", 1.0)
        view.show("seed 0", 3.0, "step 3", total=4.0)
        view.remove("gone")
        view.remove("never there")
        view.print_error("lost <one>")
    assert not view.visible
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "lost <one>" in text
    last = text.rpartition("seed 0")[2]
    assert [part for part in ("step 3", " 75%") if part not in last] == []
    assert "gone" not in last


class Output(contextlib.nullcontext[None]):
    """The output widget of ipywidgets."""

    def clear_output(self, wait: bool) -> None:
        assert wait


@pytest.mark.parametrize("has_widgets", [True, False])
def test_a_notebook_shows_bars_in_a_widget_or_no_progress(
    monkeypatch: pytest.MonkeyPatch,
    clock: Time,
    capsys: pytest.CaptureFixture[str],
    has_widgets: bool,
) -> None:
    displayed: list[object] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(progress, "find_spec", lambda name: has_widgets)
    for module, members in (
        ("ipywidgets", {"Output": Output}),
        ("IPython", {}),
        ("IPython.display", {"display": displayed.append}),
    ):
        fake = ModuleType(module)
        vars(fake).update(members)
        monkeypatch.setitem(sys.modules, module, fake)
    with Progress() as view:
        assert (view.visible, view.silent) == (has_widgets, not has_widgets)
        clock.now += 130.0
        view.watch(INFO, {"step": 1, "upper_loss": 0.5}, 0.1)
    assert any(isinstance(item, Output) for item in displayed) == has_widgets
    assert capsys.readouterr() == ("", "")
