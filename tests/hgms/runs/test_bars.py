"""Progress in a notebook: one output that is replaced, not a line for each step."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hgms.runs import bars as module
from hgms.runs.bars import Bars


class Handle:
    """A notebook's output; what it showed, in order."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def update(self, text: str) -> None:
        self.shown.append(text)


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    """The outputs of a cell of a notebook in which a test runs."""
    handles: list[Handle] = []

    def display(shown: str, *, display_id: bool) -> Handle:
        assert display_id
        handles.append(Handle())
        handles[-1].update(shown)
        return handles[-1]

    package = ModuleType("IPython")
    displays = ModuleType("IPython.display")
    package.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    # type: ignore[attr-defined]
    displays.HTML = str
    displays.display = display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", displays)
    return handles


def test_a_notebook_has_one_output_that_is_replaced(
    outputs: list[Handle], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with Bars() as bars:
        assert bars.visible
        for step in range(1000):
            clock[0] += 0.01
            bars.show("seed <0>", step, f"step {step}", total=1000)
    [output] = outputs
    assert 30 < len(output.shown) < 50  # four a second
    assert "seed &lt;0&gt;" in output.shown[-1]
    assert "step 999" in output.shown[-1]
    assert 'value="0.9990"' in output.shown[-1]
    assert output.shown[-1].count("<progress") == 1


def test_in_a_notebook_errors_stay_and_ended_lines_go(outputs: list[Handle]) -> None:
    with Bars() as bars:
        bars.show("a", 0.5)
        bars.show("b", 2.0)
        bars.remove("a")
        bars.print_error("a: failed & gone")
    last = outputs[0].shown[-1]
    assert "a: failed &amp; gone" in last
    assert "<strong>a</strong>" not in last
    assert 'value="1.0000"' in last


@pytest.mark.parametrize(
    "shell", [None, SimpleNamespace()], ids=["no IPython is running", "IPython on a terminal"]
)
def test_elsewhere_a_notebook_is_not_assumed(
    shell: Any, outputs: list[Handle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: shell)
    with Bars() as bars:
        assert not bars.visible
        bars.show("a", 0.5)
    assert not outputs


def test_what_is_not_wanted_is_not_shown(outputs: list[Handle]) -> None:
    with Bars(enabled=False) as bars:
        bars.show("a", 0.5)
    assert not outputs
