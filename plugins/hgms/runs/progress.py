"""The view of a run: bars on a terminal, or a periodic line in a log."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import click

from hgms.config.control_characters import printable
from hgms.runs.bars import Bars

if TYPE_CHECKING:
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

    Each run has one line with its current numbers. If standard error is not a terminal, the newest
    numbers are printed as a line every ``LOG_SECONDS``, for any number of runs.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.bars = Bars(enabled)
        self._logged = time.monotonic()

    def __enter__(self) -> Progress:
        self.bars.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.__exit__(*error)

    def watch(self, info: RunInfo, record: Mapping[str, Any], share: float) -> None:
        """Show the newest record; the run calls this method after every step."""
        self.step(f"{info.method} seed {info.seed}", record, share)

    def step(self, title: str, record: Mapping[str, Any], share: float) -> None:
        """Show the newest record of the run called ``title``.

        ``share`` is the spent share of its budget.
        """
        if self.bars.visible:
            self.bars.show(title, share, _numbers(record))
        elif self.bars.enabled and time.monotonic() - self._logged >= LOG_SECONDS:
            self._logged = time.monotonic()
            line = f"{title}: {100 * share:.0f} % · {_numbers(record)}"
            click.echo(printable(line), err=True)


def _numbers(record: Mapping[str, Any]) -> str:
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
    return " · ".join(parts)
