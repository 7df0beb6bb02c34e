"""The clock of a run, which a budget in seconds reads, and durations of resumed work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import torch

from hgms.plugins import LOG


class Clock:
    """Seconds spent inside ``with clock``. Evaluation, writing and observers are outside.

    The growth of ``apart()`` inside is subtracted. The clock waits for a GPU at both edges. If
    ``suspensions()`` grows inside, the process was stopped for an unknown time, so at most its
    processor time counts.
    """

    def __init__(self, seconds: float, device: torch.device, kind: str = "wall") -> None:
        self.seconds = seconds
        self.apart: Callable[[], float] = lambda: 0.0
        self.suspensions: Callable[[], int] = lambda: 0
        self._time = time.perf_counter if kind == "wall" else time.process_time
        self._wait: Callable[[], None] = lambda: (
            torch.cuda.synchronize(device) if device.type == "cuda" else None
        )
        self._started = 0.0
        self._worked = 0.0
        self._suspended = 0

    def now(self) -> float:
        self._wait()
        return self._time()

    def __enter__(self) -> Clock:
        self._suspended = self.suspensions()
        self._worked = time.process_time()
        self._started = self.now() - self.apart()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = self.now() - self.apart() - self._started
        if self.suspensions() > self._suspended:
            seconds = min(seconds, time.process_time() - self._worked)
            LOG.warning("the process was suspended during a step, which counts %.3g s", seconds)
        self.seconds += seconds


def counting(
    broken_off: bool, clock: Callable[[], float] = time.process_time
) -> Callable[[], float | None]:
    """Start to measure time; the returned function returns the seconds since then.

    The default clock measures processor time. For resumed work that function returns ``None``,
    because the time of the killed process is unknown, and the remaining time would be too small.

    Examples
    --------
    >>> counting(broken_off=True)() is None, counting(broken_off=False)() >= 0
    (True, True)
    """
    began = clock()
    return lambda: None if broken_off else clock() - began


def total_seconds(parts: Iterable[float | None]) -> float | None:
    """Return the sum of the durations of parts.

    The result is ``None`` if a duration is unknown.

    Examples
    --------
    >>> total_seconds([1.0, 2.0]), total_seconds([1.0, None])
    (3.0, None)
    """
    known = list(parts)
    return None if None in known else math.fsum(part for part in known if part is not None)
