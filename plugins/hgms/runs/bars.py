"""Progress bars, on a terminal and in a notebook."""

from __future__ import annotations

import contextlib
import html
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

from attrs import define

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Bars:
    """Progress bars: ``with Bars() as bars: bars.show("seed 0", 0.5, "step 3")``.

    Each title has one line with a bar, on standard error or below a notebook's cell. Nothing is
    shown if neither is available, or if ``enabled`` is False.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._view: View | None = None

    @property
    def visible(self) -> bool:
        return self._view is not None

    def __enter__(self) -> Bars:
        if self.enabled:
            self._view = Cell() if in_notebook() else Terminal.open()
        return self

    def __exit__(self, *_: object) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None

    def show(self, title: str, completed: float, numbers: str = "", total: float = 1.0) -> None:
        """Update the line of this title, or add it."""
        if self._view is not None:
            self._view.show(title, completed, numbers, total)

    def remove(self, title: str) -> None:
        if self._view is not None:
            self._view.remove(title)

    def print_error(self, text: str) -> None:
        """Print a permanent line above the bars."""
        if self._view is not None:
            self._view.print_error(text)


class View(Protocol):
    """A display for bars."""

    def show(self, title: str, completed: float, numbers: str, total: float) -> None: ...
    def remove(self, title: str) -> None: ...
    def print_error(self, text: str) -> None: ...
    def close(self) -> None: ...


# --- a terminal
# --------------------------------------------------------------------------------------------------


class Terminal:
    """Bars drawn by rich on standard error."""

    def __init__(self, display: Progress) -> None:
        self._display = display
        self._lines: dict[str, TaskID] = {}
        _echo_control_keys(False)
        display.start()

    @classmethod
    def open(cls) -> Terminal | None:
        """Return the display, or ``None`` if standard error is not a terminal."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        console = Console(stderr=True)
        if not console.is_terminal:
            return None
        numbers = TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.fields[numbers]}")
        title = TextColumn("[bold]{task.description}")
        bar = BarColumn(bar_width=18)
        return cls(
            Progress(SpinnerColumn(), title, bar, *numbers, console=console, refresh_per_second=4)
        )

    def show(self, title: str, completed: float, numbers: str, total: float) -> None:
        if title not in self._lines:
            self._lines[title] = self._display.add_task(title, total=total, numbers="")
        line = self._lines[title]
        self._display.update(line, completed=completed, total=total, numbers=numbers)

    def remove(self, title: str) -> None:
        if title in self._lines:
            self._display.remove_task(self._lines.pop(title))

    def print_error(self, text: str) -> None:
        self._display.console.print(text, style="red", markup=False, highlight=False)

    def close(self) -> None:
        self._display.stop()
        _echo_control_keys(True)


def _echo_control_keys(wanted: bool) -> None:
    """Set whether the terminal prints ^C at the cursor.

    After a full line, ^C starts another line, which the view does not know about. The first line of
    the view would then stay on the terminal, and the view would draw it below a second time.
    """
    # on Windows, or without a terminal
    with contextlib.suppress(ImportError, OSError, ValueError, AttributeError):
        import termios

        handle = sys.stdin.fileno()
        if os.tcgetpgrp(handle) != os.getpgrp():
            return  # a background process must not change the terminal
        with contextlib.suppress(termios.error):
            flags = termios.tcgetattr(handle)
            flags[3] = flags[3] | termios.ECHOCTL if wanted else flags[3] & ~termios.ECHOCTL
            termios.tcsetattr(handle, termios.TCSANOW, flags)


# --- a notebook
# --------------------------------------------------------------------------------------------------

_PAUSE = 0.25  # seconds between two updates: each is a message to the browser


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")


@define
class _Line:
    share: float
    numbers: str


class Cell:
    """Bars as one output of a notebook's cell, which is replaced at every change."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._errors: list[str] = []
        self._handle: Any = None
        self._drawn = float("-inf")

    def show(self, title: str, completed: float, numbers: str, total: float) -> None:
        self._lines[title] = _Line(min(1.0, max(0.0, completed / total)) if total else 1.0, numbers)
        self._draw()

    def remove(self, title: str) -> None:
        self._lines.pop(title, None)
        self._draw()

    def print_error(self, text: str) -> None:
        self._errors.append(text)
        self._draw()

    def close(self) -> None:
        self._draw(at_once=True)

    def _draw(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if now - self._drawn < _PAUSE and not at_once:
            return
        self._drawn = now
        from IPython.display import HTML, display

        shown = HTML(self.html)
        if self._handle is None:
            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)

    @property
    def html(self) -> str:
        errors = "".join(
            f'<div style="color: #d9485f">{html.escape(text)}</div>' for text in self._errors
        )
        lines = "".join(
            f'<div style="font-size: .9em"><progress value="{line.share:.4f}" style="width: '
            '9em"></progress> '
            f"<strong>{html.escape(title)}</strong> {100 * line.share:.0f} % "
            f"{html.escape(line.numbers)}</div>"
            for title, line in self._lines.items()
        )
        return errors + lines


__all__ = ["Bars", "in_notebook"]
