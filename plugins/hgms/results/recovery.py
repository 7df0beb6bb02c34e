"""The recovered share: the share of a gap that a method closes.

The gap is between a floor and a ceiling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import frozen

from hgms.results.statistics import mean_and_error, t_quantile, with_failures


@frozen
class Ratio:
    """A ratio of two means with its 95 % interval; the ends are NaN without an interval.

    Examples
    --------
    >>> str(Ratio(0.48, 0.31, 0.66, 10))
    '0.48 [0.31, 0.66]'
    """

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "–"
        return f"{self.value:.2f}" + (
            "" if math.isnan(self.low) else f" [{self.low:.2f}, {self.high:.2f}]"
        )


def recovered_share(
    mine: Mapping[int, float],
    floor: Mapping[int, float],
    ceiling: Mapping[int, float],
    level: float = 0.95,
    *,
    higher: bool = True,
) -> Ratio:
    """Compute the share of the gap between floor and ceiling that a method recovers.

    The share is mean(mine − floor) / mean(ceiling − floor) over the seeds that all three have. A
    value that is not finite counts as the worst of all values
    (:func:`hgms.results.statistics.with_failures`).

    The interval follows Fieller: it contains the ratios ρ for which a t-test does not reject that
    mean(a − ρb) = 0. Here a = mine − floor and b = ceiling − floor of each seed. If the mean of the
    ceiling is not better than the mean of the floor, there is no share (``higher``: whether larger
    values are better). If it is better, but not by more than chance, the interval is unbounded, and
    none is returned.

    Notes
    -----
    Source: Fieller (1954), *Some problems in interval estimation*, Journal of the Royal Statistical
    Society B 16.

    Examples
    --------
    >>> floor, ceiling = {0: 0.80, 1: 0.82, 2: 0.84}, {0: 0.90, 1: 0.93, 2: 0.93}
    >>> str(recovered_share({0: 0.85, 1: 0.88, 2: 0.88}, floor, ceiling))
    '0.50 [0.33, 0.60]'
    >>> str(recovered_share({0: 0.85, 1: 0.88, 2: 0.88}, floor=ceiling, ceiling=floor))
    '–'
    """
    mine, floor, ceiling = with_failures(
        {"mine": mine, "floor": floor, "ceiling": ceiling}, higher
    ).values()
    seeds = sorted(mine.keys() & floor.keys() & ceiling.keys())
    a = [mine[seed] - floor[seed] for seed in seeds]
    b = [ceiling[seed] - floor[seed] for seed in seeds]
    n, (top, error), (bottom, spread) = len(seeds), mean_and_error(a), mean_and_error(b)
    if not n or not (bottom > 0 if higher else bottom < 0):
        return Ratio(math.nan, math.nan, math.nan, n)
    value = top / bottom
    if n < 2:
        return Ratio(value, math.nan, math.nan, n)
    t = t_quantile(n - 1, 1 - level)
    both = math.fsum((x - top) * (y - bottom) for x, y in zip(a, b, strict=True)) / (n * (n - 1))
    # the ρ with (top − ρ·bottom)² ≤ t² (error² − 2ρ·both + ρ²·spread²) lie between the roots of
    # square·ρ² − 2·line·ρ + rest
    square = bottom**2 - (t * spread) ** 2
    line = top * bottom - t**2 * both
    rest = top**2 - (t * error) ** 2
    if square <= 0:
        return Ratio(value, math.nan, math.nan, n)
    root = math.sqrt(max(line**2 - square * rest, 0.0))
    return Ratio(value, (line - root) / square, (line + root) / square, n)
