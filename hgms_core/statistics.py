"""Means with intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attrs import frozen


@frozen
class Interval:
    """A mean and the half-width of its two-sided t-interval; the half-width is NaN for fewer than two values.

    >>> str(Interval.of([1.0, 2.0, 3.0]))
    '2.000 ± 2.484 (n = 3)'
    """

    mean: float
    half_width: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float], level: float = 0.95) -> Interval:
        """mean ± t_{n−1}·s/√n, with s the sample standard deviation."""
        n = len(values)
        mean = math.fsum(values) / n if n else math.nan
        if n < 2:
            return cls(mean, math.nan, n)
        from scipy import special  # a tenth of the time that importing scipy.stats takes

        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
        return cls(mean, float(special.stdtrit(n - 1, 0.5 + level / 2)) * deviation / math.sqrt(n), n)

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside. Never so for fewer than two values, which have no interval."""
        return abs(self.mean) > self.half_width

    def scaled(self, factor: float) -> Interval:
        return Interval(self.mean * factor, self.half_width * factor, self.count)

    def __str__(self) -> str:
        spread = "" if math.isnan(self.half_width) else f" ± {self.half_width:.3f}"
        return f"{self.mean:.3f}{spread} (n = {self.count})"


def paired(mine: Mapping[int, float], theirs: Mapping[int, float]) -> Interval:
    """The interval of mine − theirs over the seeds that both have a defined value for.

    >>> str(paired({0: 2.0, 1: 3.0, 2: 9.0}, {0: 1.0, 1: 2.0, 3: 5.0}))
    '1.000 ± 0.000 (n = 2)'
    """
    differences = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
    return Interval.of([value for value in differences if math.isfinite(value)])


def spell(interval: Interval, *, share: bool = False, signed: bool = False) -> str:
    """mean ± half-width, with as many digits as the half-width is worth; a share in percent, with two decimals.

    >>> spell(Interval(0.912345, 0.00412, 5)), spell(Interval(12.0, float("nan"), 1), signed=True)
    ('0.9123 ± 0.0041', '+12')
    >>> spell(Interval(0.912345, 0.00412, 5), share=True)
    '91.23 ± 0.41'
    """
    mean, half = interval.mean * (100 if share else 1), interval.half_width * (100 if share else 1)
    sign = "+" if signed else ""
    if math.isnan(mean):
        return "nan"
    if half < 1e-12 * abs(mean):
        half = 0.0  # rounding, of equal values
    if share:
        return f"{mean:{sign}.2f}" + ("" if math.isnan(half) else f" ± {half:.2f}")
    if not 0 < half < math.inf:
        return f"{mean:{sign}.5g}" + (" ± 0" if half == 0 else "")
    digits = 1 - math.floor(math.log10(half))
    if digits > 7 or abs(mean) >= 1e7:
        return f"{mean:{sign}.4g} ± {half:.2g}"
    return f"{mean:{sign}.{max(digits, 0)}f} ± {half:.{max(digits, 0)}f}"
