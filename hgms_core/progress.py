"""Live views on a terminal: of a run (silent anywhere else), and of a comparison."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from rich.progress import Progress as RichProgress

    from hgms_core.hookspecs import RunInfo


def _terminal_bar() -> RichProgress | None:
    """A started progress display on stderr, None where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as RichProgress

    console = Console(stderr=True)
    if not console.is_terminal:
        return None
    bar = RichProgress(
        SpinnerColumn(),
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=18),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[numbers]}"),
        console=console,
        refresh_per_second=4,
    )
    _echo_control_keys(False)
    bar.start()
    return bar


def _stop(bar: RichProgress) -> None:
    bar.stop()
    _echo_control_keys(True)


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


class Progress:
    """``with Progress(enabled=True) as view: run(..., watch=view.watch)``: one line per run with its current numbers."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._bar: RichProgress | None = None
        self._tasks: dict[tuple[str, int], Any] = {}
        self._began: dict[tuple[str, int], tuple[float, int]] = {}

    def __enter__(self) -> Progress:
        if self.enabled:
            self._bar = _terminal_bar()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            _stop(self._bar)
            self._bar = None

    def watch(self, info: RunInfo, record: dict[str, Any], share: float) -> None:
        """Shows the newest record; called after every step."""
        if self._bar is None:
            return
        key = (info.method, info.seed)
        now = time.monotonic()
        if key not in self._tasks:
            self._tasks[key] = self._bar.add_task(f"{info.method} seed {info.seed}", total=1.0, numbers="")
            self._began[key] = (now, record["step"])
        began, first = self._began[key]
        rate = (record["step"] - first) / max(now - began, 1e-9)
        left = (now - began) * (1 - share) / share if share > 0 else None
        self._bar.update(self._tasks[key], completed=share, numbers=_numbers(record, rate, left))


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
            self._bar = _terminal_bar()
            if self._bar is not None:
                self._whole = self._bar.add_task("all cells", total=self.total, numbers=f"0 of {self.total}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            _stop(self._bar)
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
        self._bar.update(self._tasks[title], completed=share, numbers=_numbers(dict(record), rate, left))

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


def _numbers(record: dict[str, Any], rate: float, left: float | None) -> str:
    parts = [f"step {record['step']}"]
    for label, key in (("f", "upper_loss"), ("g", "lower_loss"), ("gap", "gap"), ("|h|", "hypergradient_norm")):
        value = record.get(key)
        if isinstance(value, float) and value not in (float("inf"), float("-inf")):
            parts.append(f"{label} {value:.3g}")
    if record.get("outcome") not in (None, "not-solved"):
        parts.append(f"solver {record['outcome']} in {record.get('iterations')}")
    accuracy = record.get("metric.test_accuracy")
    if accuracy is not None:
        parts.append(f"test {100 * accuracy:.1f} %")
    parts.append(f"{rate:.1f} steps/s")
    if left is not None:
        parts.append(f"{left:.0f} s left")
    return " · ".join(parts)
