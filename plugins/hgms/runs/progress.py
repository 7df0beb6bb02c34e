"""The view of a run: bars on a terminal, or a periodic line in a log."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import click
from attrs import frozen

from hgms.config.control_characters import printable
from hgms.runs.bars import Bars

if TYPE_CHECKING:
    from hgms_core import RunInfo


LOG_SECONDS = 30.0
"""Seconds between two lines of a log."""


START = 2
"""Number of records that only mark the start.

The first step includes loading and compilation. The rate and the remaining time are therefore
measured from the second record on.
"""


@frozen
class _Begin:
    """The record from which rates are measured.

    ``calls`` counts the records so far, up to START.
    """

    seconds: float
    step: int
    share: float
    calls: int


class View(Protocol):
    """A display for the steps of a run."""

    def watch(self, info: RunInfo, record: Mapping[str, Any], share: float) -> None:
        """Receive the newest record and the spent share of the budget.

        The run calls this method after every step.
        """


class Progress:
    """Progress of runs: ``with Progress(enabled=True) as view: run(..., watch=view.watch)``.

    Each run has one line with its current numbers. If standard error is not a terminal, the newest
    numbers are printed as a line every ``LOG_SECONDS``, for any number of runs.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.bars = Bars(enabled)
        self._began: dict[str, _Begin] = {}
        self._logged = time.monotonic()

    def __enter__(self) -> Progress:
        self.bars.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.__exit__(*error)

    def watch(self, info: RunInfo, record: Mapping[str, Any], share: float) -> None:
        """Show the newest record; the run calls this method after every step."""
        self.step(f"{info.method} seed {info.seed}", record, share)

    def step(self, title: str, record: Mapping[str, Any], share: float, who: str = "") -> None:
        """Show the newest record of the run called ``title``.

        ``share`` is the spent share of its budget, and ``who`` names the process that executes it.
        """
        now = time.monotonic()
        begin = self._began.get(title)
        if begin is None or begin.calls < START:
            calls = 0 if begin is None else begin.calls
            begin = _Begin(now, int(record["step"]), share, calls + 1)
            self._began[title] = begin
        if not self.bars.enabled or not (self.bars.visible or now - self._logged >= LOG_SECONDS):
            return
        passed = now - begin.seconds
        rate = (record["step"] - begin.step) / passed if passed > 0 else None
        done = share - begin.share
        left = passed * (1 - share) / done if done > 0 and passed > 0 else None
        numbers = " · ".join([*([who] if who else []), _numbers(record, rate, left)])
        if self.bars.visible:
            self.bars.show(title, share, numbers)
        else:
            self._logged = now
            click.echo(printable(f"{title}: {100 * share:.0f} % · {numbers}"), err=True)


def _numbers(record: Mapping[str, Any], rate: float | None, left: float | None) -> str:
    parts = [f"step {record['step']}"]
    for label, key in (
        ("f", "upper_loss"),
        ("g", "lower_loss"),
        ("gap", "gap"),
        ("|h|", "hypergradient_norm"),
    ):
        value = record.get(key)
        if isinstance(value, float) and not math.isinf(value):
            parts.append(f"{label} {value:.3g}")
    if record.get("outcome") not in (None, "not-solved"):
        parts.append(f"solver {record['outcome']} in {record.get('iterations')}")
    accuracies = [key for key in record if key.startswith("metric.") and key.endswith("_accuracy")]
    # the shortest name is the main variant
    if accuracies and record[key := min(accuracies, key=len)] is not None:
        name = key.removeprefix("metric.").removesuffix("_accuracy").replace("_", " ")
        parts.append(f"{name} {100 * record[key]:.1f} %")
    if rate is not None:
        parts.append(
            f"{rate:.1f} steps/s" if rate >= 0.1 or rate == 0 else f"{1 / rate:.0f} s a step"
        )
    if left is not None:
        parts.append(f"{left:.0f} s left")
    return " · ".join(parts)
