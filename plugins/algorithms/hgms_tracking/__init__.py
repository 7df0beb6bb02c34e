"""Observers: what a run records also goes to TensorBoard, Weights & Biases or Trackio, where ``HGMS_TRACK`` asks for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hgms_core import ConfigError, hookimpl, unknown
from hgms_tracking.trackers import TRACKERS, Tracker, ensure_installed, numbers

if TYPE_CHECKING:
    from hgms_core import RunInfo

VARIABLE = "HGMS_TRACK"

_open: dict[int, list[Tracker]] = {}
"""The trackers of the runs under way, by the identity of their RunInfo: one process may run several, one after another."""


def asked(text: str) -> list[str]:
    """The trackers named in ``text``, a comma-separated list.

    >>> asked("tensorboard, trackio")
    ['tensorboard', 'trackio']
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"{VARIABLE}: {unknown('tracker', name, TRACKERS)}")
    return names


@hookimpl
def hgms_ready() -> None:
    for name in asked(os.environ.get(VARIABLE, "")):
        ensure_installed(name)


@hookimpl
def hgms_run_started(run: RunInfo) -> None:
    names = asked(os.environ.get(VARIABLE, ""))
    if names:
        _open[id(run)] = [TRACKERS[name](run) for name in names]


@hookimpl
def hgms_step_finished(run: RunInfo, record: dict[str, Any]) -> None:
    for tracker in _open.get(id(run), ()):
        tracker.log(numbers(record), record["step"])


@hookimpl
def hgms_run_finished(run: RunInfo, summary: dict[str, Any] | None, error: BaseException | None) -> None:
    for tracker in _open.pop(id(run), ()):
        tracker.close(summary, failed=error is not None)
