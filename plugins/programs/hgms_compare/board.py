"""A comparison under way, on a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from hgms_run import Progress

_ALL = "all cells"


class Board:
    """A comparison under way: one line for all of it and one for every running cell; elsewhere a line for each that ended."""

    def __init__(self, total: int, enabled: bool = True) -> None:
        self.total, self.enabled = total, enabled
        self._view = Progress(enabled and total > 0)
        self._began: dict[str, float] = {}
        self._ended = 0

    def __enter__(self) -> Board:
        self._view.__enter__()
        self._show_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._view.__exit__(*error)

    def began(self, cell: object) -> None:
        """``cell`` is called by its text here and in what follows."""
        self._began[str(cell)] = time.monotonic()
        self._view.bars.show(str(cell), 0.0)

    def step(self, cell: object, share: float, record: Mapping[str, Any]) -> None:
        self._view.step(str(cell), record, share)

    def say(self, line: str) -> None:
        """What a person should know, above the lines or among them."""
        if self._view.bars.visible:
            self._view.bars.print_error(line)
        elif self.enabled:
            click.echo(line, err=True)

    def ended(self, cell: object, status: str, error: str | None) -> None:
        title, why = str(cell), f": {error.splitlines()[0]}" if error else ""
        self._ended += 1
        if self._view.bars.visible:
            self._view.bars.remove(title)
            self._show_all()
            if status != "done":
                self._view.bars.print_error(f"{title}: {status}{why}")
        elif self.enabled:
            seconds = time.monotonic() - self._began.get(title, time.monotonic())
            click.echo(f"[{self._ended}/{self.total}] {title}: {status} after {seconds:.1f} s{why}", err=True)

    def _show_all(self) -> None:
        self._view.bars.show(_ALL, self._ended, f"{self._ended} of {self.total}", total=self.total)
