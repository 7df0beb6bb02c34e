"""The view of a run: bars, drawn by rich, or a periodic line in a log."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, Self

import click

from hgms.config.control_characters import printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from hgms_core import RunInfo


LOG_SECONDS = 30.0
"""Seconds between two lines of a log."""


class View(Protocol):
    """A display for the steps of a run."""

    def watch(self, info: RunInfo, record: Mapping[str, Any], share: float) -> None:
        """Receive the newest record and the spent share of the budget.

        The run calls this method after every step.
        """


class Progress:
    """Progress of runs: ``with Progress(enabled=True) as view: run(..., watch=view.watch)``.

    On a terminal, and in a notebook with ipywidgets, rich draws one bar per run with its current
    numbers. A notebook without ipywidgets shows no progress. Elsewhere the newest numbers are
    printed as a line every ``LOG_SECONDS``, for any number of runs.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.silent = enabled and _is_plain_notebook()
        self.enabled = enabled and not self.silent
        self._bars: Bars | None = None
        self._lines: dict[str, TaskID] = {}
        self._logged = time.monotonic()

    @property
    def visible(self) -> bool:
        """Whether bars are drawn."""
        return self._bars is not None

    def __enter__(self) -> Self:
        self._bars = _open_bars() if self.enabled else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()
        self._bars = None
        self._lines.clear()

    def watch(self, info: RunInfo, record: Mapping[str, Any], share: float) -> None:
        """Show the newest record; the run calls this method after every step."""
        self.step(f"{info.method} seed {info.seed}", share, record)

    def step(self, title: object, share: float, record: Mapping[str, Any]) -> None:
        """Show the newest record of the run called ``title``.

        ``share`` is the spent share of its budget.
        """
        if self.visible:
            self.show(title, share, _numbers(record))
        elif self.enabled and time.monotonic() - self._logged >= LOG_SECONDS:
            self._logged = time.monotonic()
            line = f"{title}: {100 * share:.0f} % · {_numbers(record)}"
            click.echo(printable(line), err=True)

    def show(self, title: object, completed: float, numbers: str = "", total: float = 1.0) -> None:
        """Update the bar of a title, or add it."""
        if self._bars is None:
            return
        name = str(title)
        if name not in self._lines:
            self._lines[name] = self._bars.add_task(name, numbers="")
        self._bars.update(self._lines[name], completed=completed, total=total, numbers=numbers)

    def remove(self, title: str) -> None:
        """Remove the bar of a title."""
        if self._bars is not None and title in self._lines:
            self._bars.remove_task(self._lines.pop(title))

    def print_error(self, text: str) -> None:
        """Print a message above the bars."""
        if self._bars is not None:
            self._bars.console.print(text, style="red", markup=False, highlight=False)


def _is_plain_notebook() -> bool:
    from rich.console import Console

    return Console().is_jupyter and not find_spec("ipywidgets")


def _open_bars() -> Bars | None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        return None
    progress = Progress(
        SpinnerColumn(),
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=18),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
        console=console,
        refresh_per_second=4,
    )
    progress.start()
    return progress


def _numbers(record: Mapping[str, Any]) -> str:
    parts = [f"step {record['step']}"]
    for label, key in (("f", "upper_loss"), ("g", "lower_loss"), ("|h|", "hypergradient_norm")):
        value = record.get(key)
        if isinstance(value, float) and not math.isinf(value):
            parts.append(f"{label} {value:.3g}")
    accuracies = [key for key in record if key.startswith("metric.") and key.endswith("_accuracy")]
    # the shortest name is the main variant
    if accuracies and record[key := min(accuracies, key=len)] is not None:
        name = key.removeprefix("metric.").removesuffix("_accuracy").replace("_", " ")
        parts.append(f"{name} {100 * record[key]:.1f} %")
    return " · ".join(parts)
