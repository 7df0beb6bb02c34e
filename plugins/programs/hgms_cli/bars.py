"""Progress bars on a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Bars:
    """``with Bars() as bars: bars.show("seed 0", 0.5, "step 3")``: a line with a bar for each title, on standard error; nothing
    where that is no terminal, or if not ``enabled``."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._display: Progress | None = None
        self._lines: dict[str, TaskID] = {}

    @property
    def visible(self) -> bool:
        return self._display is not None

    def __enter__(self) -> Bars:
        if not self.enabled:
            return self
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        console = Console(stderr=True)
        if console.is_terminal:
            self._display = Progress(
                SpinnerColumn(), TextColumn("[bold]{task.description}"), BarColumn(bar_width=18),
                TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.fields[numbers]}"),
                console=console, refresh_per_second=4,
            )  # fmt: skip
            _echo_control_keys(False)
            self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._display.stop()
            self._display = None
            _echo_control_keys(True)

    def show(self, title: str, completed: float, numbers: str = "", total: float = 1.0) -> None:
        """Brings the line of this title up to date; the first time it is added."""
        if self._display is None:
            return
        if title not in self._lines:
            self._lines[title] = self._display.add_task(title, total=total, numbers="")
        self._display.update(self._lines[title], completed=completed, numbers=numbers)

    def remove(self, title: str) -> None:
        if self._display is not None and title in self._lines:
            self._display.remove_task(self._lines.pop(title))

    def print_error(self, text: str) -> None:
        """A line that stays, above the bars."""
        if self._display is not None:
            self._display.console.print(text, style="red", markup=False, highlight=False)


def _echo_control_keys(wanted: bool) -> None:
    """Whether the terminal writes ^C where the cursor is: behind a full line that begins another, which the view does not know
    of, and its first line would then stay there and be drawn again below."""
    with contextlib.suppress(ImportError, OSError, ValueError, AttributeError):  # Windows; no terminal
        import termios

        handle = sys.stdin.fileno()
        if os.tcgetpgrp(handle) != os.getpgrp():
            return  # in the background the terminal is not ours to change
        with contextlib.suppress(termios.error):
            flags = termios.tcgetattr(handle)
            flags[3] = flags[3] | termios.ECHOCTL if wanted else flags[3] & ~termios.ECHOCTL
            termios.tcsetattr(handle, termios.TCSANOW, flags)


__all__ = ["Bars"]
