"""Progress bars, drawn by rich on a terminal and in a notebook."""

from __future__ import annotations

import io
import sys
import time
from typing import TYPE_CHECKING, Any

from attrs import Factory, define

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

_PAUSE = 0.25
"""Seconds between two updates of a notebook: each is a message to the browser."""


class Bars:
    """Progress bars: ``with Bars() as bars: bars.show("seed 0", 0.5, "step 3")``.

    Each title has one line with a bar, on standard error or below a notebook's cell. Nothing is
    shown if neither is available, or if ``enabled`` is False.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._progress: Progress | None = None
        self._lines: dict[str, TaskID] = {}
        self._cell: _Cell | None = None

    @property
    def visible(self) -> bool:
        return self._progress is not None

    def __enter__(self) -> Bars:
        if self.enabled:
            self._cell = _Cell() if in_notebook() else None
            self._progress = _open_bars(self._cell is not None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None and self._cell is not None:
            self._cell.draw(self._progress, at_once=True)
        elif self._progress is not None:
            self._progress.stop()
        self._progress = None
        self._lines.clear()

    def show(self, title: str, completed: float, numbers: str = "", total: float = 1.0) -> None:
        """Update the line of this title, or add it."""
        if self._progress is None:
            return
        if title not in self._lines:
            self._lines[title] = self._progress.add_task(title, total=total, numbers="")
        line = self._lines[title]
        self._progress.update(line, completed=completed, total=total, numbers=numbers)
        if self._cell is not None:
            self._cell.draw(self._progress)

    def remove(self, title: str) -> None:
        if self._progress is not None and title in self._lines:
            self._progress.remove_task(self._lines.pop(title))

    def print_error(self, text: str) -> None:
        """Print a permanent line above the bars."""
        if self._cell is not None:
            self._cell.errors.append(text)
        elif self._progress is not None:
            _print_red(self._progress.console, text)


@define
class _Cell:
    """One output of a notebook's cell, which is replaced at every change."""

    errors: list[str] = Factory(list)
    handle: Any = None
    drawn: float = float("-inf")

    def draw(self, progress: Progress, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if now - self.drawn < _PAUSE and not at_once:
            return
        self.drawn = now
        from IPython.display import HTML, display

        for text in self.errors:
            _print_red(progress.console, text)
        progress.console.print(progress.get_renderable())
        page = progress.console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
        if self.handle is None:
            self.handle = display(HTML(page), display_id=True)
        else:
            self.handle.update(HTML(page))


def _open_bars(notebook: bool) -> Progress | None:
    """Return the bars of a notebook or of a terminal; ``None`` if there is neither."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=18),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    if notebook:
        recorded = Console(file=io.StringIO(), record=True, width=120, force_jupyter=False)
        return Progress(*columns, console=recorded, auto_refresh=False)
    console = Console(stderr=True)
    if not console.is_terminal:
        return None
    progress = Progress(SpinnerColumn(), *columns, console=console, refresh_per_second=4)
    progress.start()
    return progress


def _print_red(console: Console, text: str) -> None:
    console.print(text, style="red", markup=False, highlight=False)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")


__all__ = ["Bars", "in_notebook"]
