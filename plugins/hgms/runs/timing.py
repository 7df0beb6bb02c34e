"""Duration of work that may have been interrupted and resumed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable


def counting(
    broken_off: bool, clock: Callable[[], float] = time.process_time
) -> Callable[[], float | None]:
    """Start to measure time; the returned function returns the seconds since then.

    The default clock measures processor time. For resumed work that function returns ``None``,
    because the time of the killed process is unknown, and the remaining time would be too small.

    >>> counting(broken_off=True)() is None, counting(broken_off=False)() >= 0
    (True, True)
    """
    began = clock()
    return lambda: None if broken_off else clock() - began


def counted(parts: Iterable[float | None]) -> float | None:
    """Return the sum of the durations of parts.

    The result is ``None`` if a duration is unknown.

    >>> counted([1.0, 2.0]), counted([1.0, None])
    (3.0, None)
    """
    known = list(parts)
    return None if None in known else math.fsum(part for part in known if part is not None)
