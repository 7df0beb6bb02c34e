"""What a budget in seconds counts."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class Clock:
    """Seconds spent inside ``with clock``: evaluation, writing and observers are outside. A GPU is waited for at both edges."""

    def __init__(self, seconds: float, device: torch.device, kind: str = "wall") -> None:
        self.seconds = seconds
        self._now = time.perf_counter if kind == "wall" else time.process_time
        self._wait: Callable[[], None] = lambda: torch.cuda.synchronize(device) if device.type == "cuda" else None
        self._started = 0.0

    def __enter__(self) -> None:
        self._wait()
        self._started = self._now()

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds += self._now() - self._started
