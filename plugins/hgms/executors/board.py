"""Display of running jobs on a terminal: progress and lost workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import click

from hgms.config.control_characters import printable
from hgms.executors.jobs import Tell
from hgms.runs import Progress
from hgms_core import HgmsError

_ALL = "all"


def to_stderr(line: str) -> None:
    """Print a line for the user on standard error, separate from the command's output."""
    click.echo(printable(line), err=True)


class Board(Progress):
    """Progress of jobs, as bars or as lines of text.

    With bars, there is one for all jobs, and one per running job. Otherwise ``echo`` receives one
    line per finished job. The text of a job is its name.
    """

    def __init__(
        self, total: int, *, bars: bool = True, echo: Callable[[str], None] = to_stderr
    ) -> None:
        super().__init__(bars and total > 0)
        self.total = total
        self.echo = echo
        self._began: dict[str, float] = {}
        self._ended = 0

    def __enter__(self) -> Self:
        super().__enter__()
        self.add_found(0)
        return self

    def began(self, job: object) -> None:
        self._began[str(job)] = time.monotonic()
        self.show(job, 0.0)

    def say(self, line: str) -> None:
        """Print a message for the user, for example about lost workers."""
        if self.visible:
            self.print_error(line)
        else:
            self.echo(line)

    def end(self, job: object, status: str, error: HgmsError | None = None) -> None:
        title = str(job)
        why = f": {error.lines()[0]}" if error else ""
        self.remove(title)
        self.add_found(1)
        if not self.visible and not self.silent:
            seconds = time.monotonic() - self._began.get(title, time.monotonic())
            self.echo(f"[{self._ended}/{self.total}] {title}: {status} after {seconds:.1f} s{why}")
        elif why:
            self.print_error(f"{title}: {status}{why}")

    def add_found(self, count: int) -> None:
        """Count jobs that have ended, also earlier."""
        self._ended += count
        self.show(_ALL, self._ended, f"{self._ended} of {self.total}", total=self.total)


EVERY = 0.2
"""Minimum seconds between two reports of a job's progress."""


class RemoteProgress:
    """Replacement for :class:`hgms.runs.Progress` in a job: it sends the steps instead of drawing
    them.

    Examples
    --------
    >>> heard = []
    >>> RemoteProgress(lambda **event: heard.append(event)).watch(
    ...     None, {"step": 3, "loss": 0.5, "rows": [1, 2]}, 0.25
    ... )
    >>> heard
    [{'event': 'step', 'share': 0.25, 'record': {'step': 3, 'loss': 0.5}}]
    """

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self._last = float("-inf")

    def watch(self, _info: object, record: Mapping[str, Any], share: float) -> None:
        """Send the record of a step; the run calls this method after every step.

        Only plain values are sent, and not more often than every ``EVERY`` seconds.
        """
        now = time.monotonic()
        if now - self._last >= EVERY:
            self._last = now
            plain = {
                name: value
                for name, value in record.items()
                if isinstance(value, int | float | str)
            }
            self.tell(event="step", share=share, record=plain)

    def say(self, line: str) -> None:
        """Send the stage that the job starts."""
        self.tell(event="stage", text=line.strip())
