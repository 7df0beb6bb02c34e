"""Jobs under way, on a terminal: what each does, whose it is, and what was lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from hgms.config.control_characters import printable
from hgms.runs import Progress, holder
from hgms_core import HgmsError

_ALL = "all"
_LOOK = 2.0
"""Seconds between two looks at who carries out a job."""


def to_stderr(line: str) -> None:
    """A line for a person, beside what the command prints."""
    click.echo(printable(line), err=True)


class Board:
    """Jobs under way: on a terminal one line for all of them and one for each that runs, with the
    process that carries it out; elsewhere a line for each that ended, to ``echo``. A job is called
    by its text; where it has a ``path``, its ``leases`` in that folder say whose it is (that of a
    run, where it names none).
    """

    def __init__(
        self, total: int, *, bars: bool = True, echo: Callable[[str], None] = to_stderr
    ) -> None:
        self.total = total
        self.echo = echo
        self._view = Progress(bars and total > 0)
        self._began: dict[str, float] = {}
        self._whose: dict[str, tuple[float, str]] = {}
        self._ended = self._found = 0
        self._start = time.monotonic()

    def __enter__(self) -> Board:
        self._view.__enter__()
        self._show_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._view.__exit__(*error)

    def began(self, job: object) -> None:
        self._began[str(job)] = time.monotonic()
        self._view.bars.show(str(job), 0.0)

    def step(self, job: object, share: float, record: Mapping[str, Any]) -> None:
        """The newest record of a job that has spent this share of its budget."""
        self._view.step(str(job), record, share, self._who(job))

    def stage(self, job: object, text: str) -> None:
        """What a job begins to do."""
        if self._view.bars.visible:
            self._view.bars.show(
                str(job), 0.0, " · ".join(part for part in (self._who(job), text) if part)
            )

    def say(self, line: str) -> None:
        """What a person should know, above the lines or among them: of lost workers, of others'
        jobs.
        """
        if self._view.bars.visible:
            self._view.bars.print_error(line)
        else:
            self.echo(line)

    def ended(self, job: object, status: str, error: HgmsError | None = None) -> None:
        title = str(job)
        why = f": {error.lines()[0]}" if error else ""
        self._ended += 1
        if self._view.bars.visible:
            self._view.bars.remove(title)
            self._show_all()
            if why:
                self._view.bars.print_error(f"{title}: {status}{why}")
        else:
            seconds = time.monotonic() - self._began.get(title, time.monotonic())
            self.echo(f"[{self._ended}/{self.total}] {title}: {status} after {seconds:.1f} s{why}")

    def found(self, count: int) -> None:
        """So many jobs were done before."""
        self._ended = self._ended + count
        self._found = self._found + count
        self._show_all()

    def _who(self, job: object) -> str:
        """Which process carries a job out, looked up now and then."""
        path = getattr(job, "path", None)
        if not (self._view.bars.visible and isinstance(path, Path)):
            return ""
        looked, who = self._whose.get(str(job), (float("-inf"), ""))
        if time.monotonic() - looked >= _LOOK:
            who = holder(path, *getattr(job, "leases", ()))
            self._whose[str(job)] = time.monotonic(), who
        return who

    def _show_all(self) -> None:
        here = self._ended - self._found
        left = self.total - self._ended
        ahead = (
            f" · {(time.monotonic() - self._start) / here * left:.0f} s left"
            if here and left
            else ""
        )
        self._view.bars.show(
            _ALL, self._ended, f"{self._ended} of {self.total}{ahead}", total=self.total
        )
