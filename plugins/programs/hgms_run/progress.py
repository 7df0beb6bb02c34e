"""Live views on a terminal: of a run (silent anywhere else), and of a comparison."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress as RichProgress

    from hgms_core import RunInfo


def start_bar() -> RichProgress | None:
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


def stop_bar(bar: RichProgress) -> None:
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
            self._bar = start_bar()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            stop_bar(self._bar)
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
        self._bar.update(self._tasks[key], completed=share, numbers=numbers_line(record, rate, left))


def numbers_line(record: dict[str, Any], rate: float, left: float | None) -> str:
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
