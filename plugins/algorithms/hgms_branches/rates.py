"""Learning rates and decays of N branches: factors spread over the branches, and a schedule over the steps."""

from __future__ import annotations

import math


def check_spread(instance: object, attribute: object, value: tuple[float, float] | None) -> None:
    """The attrs validator of a spread."""
    if value is not None and not 0 < value[0] <= value[1]:
        raise ValueError(f"a spread is two positive factors (low, high) with low <= high: {value}")


def factors(spread: tuple[float, float] | None, count: int) -> list[float]:
    """One for each branch, evenly spaced in the logarithm.

    >>> factors((0.25, 4.0), 3)
    [0.25, 1.0, 4.0]
    """
    if spread is None or count == 1:
        return [1.0] * count
    low, high = spread
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]


def scheduled(schedule: str, floor: float, period: int, steps: int, done: int) -> list[float]:
    """The factor of each of ``steps`` steps on the rate, after ``done`` lower steps of the run.

    ``cosine`` falls from 1 to ``floor`` over these steps, ``cosine-restarts`` over ``period`` lower steps, again and again.
    """
    if schedule == "constant":
        return [1.0] * steps
    turns = [step / steps if schedule == "cosine" else ((done + step) % period) / period for step in range(steps)]
    return [floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * turn)) for turn in turns]
