"""Send the progress of a running job to the process that requested it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hgms.executors.jobs import Tell

EVERY = 0.2
"""Minimum seconds between two reports of a job's progress."""


class RemoteProgress:
    """Replacement for :class:`hgms.runs.Progress` in a job: it sends the steps instead of drawing
    them.

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
            shown = {
                key: value for key, value in record.items() if isinstance(value, (int, float, str))
            }
            self.tell(event="step", share=share, record=shown)

    def say(self, line: str) -> None:
        """Send the stage that the job starts."""
        self.tell(event="stage", text=line.strip())
