"""How a job under way tells whoever asked for it what it does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hgms.executors.jobs import Tell

EVERY = 0.2
"""Seconds between two reports of a job's progress."""


class RemoteProgress:
    """Takes the place of :class:`hgms.runs.Progress` in a job: its steps are sent, not drawn.

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
        """As a run calls it after every step; plain values travel, and not more often than a
        person reads.
        """
        now = time.monotonic()
        if now - self._last >= EVERY:
            self._last = now
            shown = {
                key: value for key, value in record.items() if isinstance(value, (int, float, str))
            }
            self.tell(event="step", share=share, record=shown)

    def say(self, line: str) -> None:
        """What the job begins to do."""
        self.tell(event="stage", text=line.strip())
