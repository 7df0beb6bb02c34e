"""A comparison under way, on a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from hgms_run import numbers_line, start_bar, stop_bar

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress as RichProgress


class Board:
    """A comparison under way: one line for all of it and one for every running cell; elsewhere a line for each that ended."""

    def __init__(self, total: int, enabled: bool = True) -> None:
        self.total, self.enabled = total, enabled
        self._bar: RichProgress | None = None
        self._whole: Any = None
        self._tasks: dict[str, Any] = {}
        self._began: dict[str, tuple[float, int | None]] = {}
        self._ended = 0

    def __enter__(self) -> Board:
        if self.enabled and self.total:
            self._bar = start_bar()
            if self._bar is not None:
                self._whole = self._bar.add_task("all cells", total=self.total, numbers=f"0 of {self.total}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            stop_bar(self._bar)
            self._bar = None

    def began(self, title: str) -> None:
        self._began[title] = (time.monotonic(), None)
        if self._bar is not None:
            self._tasks[title] = self._bar.add_task(title, total=1.0, numbers="")

    def step(self, title: str, share: float, record: Mapping[str, Any]) -> None:
        if self._bar is None or title not in self._tasks:
            return
        now = time.monotonic()
        began, first = self._began[title]
        if first is None:
            began, first = now, int(record["step"])
            self._began[title] = (began, first)
        rate = (record["step"] - first) / max(now - began, 1e-9)
        left = (now - began) * (1 - share) / share if share > 0 and now > began else None
        self._bar.update(self._tasks[title], completed=share, numbers=numbers_line(dict(record), rate, left))

    def ended(self, title: str, status: str, error: str | None) -> None:
        self._ended += 1
        seconds = time.monotonic() - self._began.get(title, (time.monotonic(), None))[0]
        why = f": {error.splitlines()[0]}" if error else ""
        if self._bar is not None:
            self._bar.remove_task(self._tasks.pop(title))
            self._bar.update(self._whole, completed=self._ended, numbers=f"{self._ended} of {self.total}")
            if status != "done":
                self._bar.console.print(f"{title}: {status}{why}", style="red", markup=False, highlight=False)
        elif self.enabled:
            click.echo(f"[{self._ended}/{self.total}] {title}: {status} after {seconds:.1f} s{why}", err=True)
