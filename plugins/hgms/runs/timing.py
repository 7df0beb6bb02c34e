"""What work took that may have been broken off and gone on with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable


def counting(
    broken_off: bool, clock: Callable[[], float] = time.process_time
) -> Callable[[], float | None]:
    """Begins to count: what it returns gives the seconds since then, of processor time where no
    other clock is named. None for work that goes on after it was broken off: what a killed process
    took nobody knows, and the rest alone would be too little.

    >>> counting(broken_off=True)() is None, counting(broken_off=False)() >= 0
    (True, True)
    """
    began = clock()
    return lambda: None if broken_off else clock() - began


def counted(parts: Iterable[float | None]) -> float | None:
    """The sum of what parts of a work took; None where that of one is not known.

    >>> counted([1.0, 2.0]), counted([1.0, None])
    (3.0, None)
    """
    known = list(parts)
    return None if None in known else math.fsum(part for part in known if part is not None)
