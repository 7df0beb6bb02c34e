"""Observers that also send a run's records to TensorBoard, Weights & Biases or Trackio.

The setting ``[run] track`` names the trackers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hgms.arguments import require_known
from hgms.integrations.tracking.trackers import TRACKERS, numbers, tracker_module
from hgms_core import hookimpl

if TYPE_CHECKING:
    from hgms_core import RunInfo

__all__: list[str] = []


def names(settings: Mapping[str, Any]) -> list[str]:
    """Return the trackers that the table ``[run]`` of a configuration names.

    Examples
    --------
    >>> names({"out": "runs", "track": ["tensorboard", "trackio"]})
    ['tensorboard', 'trackio']
    """
    track: list[str] = settings.get("track", [])
    for name in track:
        require_known("tracker", name, TRACKERS, ("run", "track"))
    return track


@hookimpl
def hgms_ready(settings: Mapping[str, Any]) -> None:
    for name in names(settings):
        tracker_module(name)


@hookimpl
def hgms_run_started(run: RunInfo) -> None:
    run.state["tracking"] = [TRACKERS[name](run) for name in names(run.config.get("run", {}))]


@hookimpl
def hgms_step_finished(run: RunInfo, record: dict[str, Any]) -> None:
    for tracker in run.state.get("tracking", ()):
        tracker.log(numbers(record), record["step"])


@hookimpl
def hgms_run_finished(
    run: RunInfo, summary: dict[str, Any] | None, error: BaseException | None
) -> None:
    for tracker in run.state.pop("tracking", ()):
        tracker.close(summary, failed=error is not None)
