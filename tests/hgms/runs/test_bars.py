"""Progress bars: on a terminal, and in a cell of a notebook."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hgms.runs.bars import Bars


def used(title: str = "seed <0>") -> None:
    """A line comes, goes on, and another one goes; something stays above them."""
    with Bars() as bars:
        bars.show(title, 1.0, "step 1", total=4.0)
        bars.show("gone", 1.0)
        bars.show(title, 3.0, "step 3", total=4.0)
        bars.remove("gone")
        bars.remove("never there")
        bars.print_error("lost <one>")
    assert not bars.visible


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error is a terminal, as far as rich can tell."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.usefixtures("terminal")
def test_on_a_terminal_there_is_a_line_for_each_title(capsys: pytest.CaptureFixture[str]) -> None:
    used("seed 0")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "lost <one>" in text
    last = text.rpartition("seed 0")[2]
    assert [part for part in ("step 3", " 75%") if part not in last] == []
    assert "gone" not in last


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook shows, newest last."""
    pages: list[str] = []

    def display(page: str, *, display_id: bool) -> Any:
        pages.append(page)
        return SimpleNamespace(update=pages.append)

    python, drawing = ModuleType("IPython"), ModuleType("IPython.display")
    python.get_ipython = lambda: SimpleNamespace(kernel=1)  # type: ignore[attr-defined]
    drawing.HTML, drawing.display = str, display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", python)
    monkeypatch.setitem(sys.modules, "IPython.display", drawing)
    return pages


def test_in_a_notebook_one_output_is_replaced_and_texts_are_escaped(shown: list[str]) -> None:
    used()
    assert len(shown) == 2, "the first line, and the last state: no message for each change"
    assert all(part in shown[0] for part in ("seed &lt;0&gt;", " 25%", "step 1"))
    assert all(part in shown[-1] for part in (" 75%", "step 3", "lost &lt;one&gt;"))
    assert "gone" not in shown[-1]
