"""Means with intervals over seeds, and paired differences between methods."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen


@frozen
class Interval:
    """A mean and the half-width of its two-sided t-interval.

    The half-width is NaN for fewer than two values.

    Examples
    --------
    >>> str(Interval.of([1.0, 2.0, 3.0]))
    '2.000 ± 2.484 (n = 3)'
    """

    mean: float
    half_width: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float], level: float = 0.95) -> Interval:
        """Compute mean ± t_{n−1}·s/√n, with s the sample standard deviation."""
        mean, error = mean_and_error(values)
        return cls(
            mean,
            error * t_quantile(len(values) - 1, 1 - level) if len(values) > 1 else math.nan,
            len(values),
        )

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval excludes zero.

        It is False for fewer than two values, which have no interval. It is also False if all
        values are equal (:attr:`exact`), because there is no spread to compare the mean with.
        """
        return abs(self.mean) > self.half_width > 0

    @property
    def exact(self) -> bool:
        """Whether there are at least two values and all of them are equal."""
        return self.count > 1 and self.half_width == 0

    @property
    def reach(self) -> float:
        """The half-width, or 0 if a single value gives no half-width."""
        return 0.0 if math.isnan(self.half_width) else self.half_width

    def scale(self, factor: float) -> Interval:
        return Interval(self.mean * factor, self.half_width * factor, self.count)

    def __str__(self) -> str:
        spread = "" if math.isnan(self.half_width) else f" ± {self.half_width:.3f}"
        return f"{self.mean:.3f}{spread} (n = {self.count})"


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Compute the mean and its standard error s/√n.

    The standard error is NaN for fewer than two values.
    """
    n = len(values)
    if n == 0:
        return math.nan, math.nan
    # scaling by a power of two is exact, and prevents overflow of the squares of large numbers
    exponent = math.frexp(max(map(abs, values)))[1]
    scaled = [math.ldexp(value, -exponent) for value in values]
    mean = math.fsum(scaled) / n
    variance = math.fsum((value - mean) ** 2 for value in scaled) / (n - 1) if n > 1 else math.nan
    unit = 2.0 ** (exponent - 1)
    return 2 * mean * unit, 2 * math.sqrt(variance / n) * unit


@functools.lru_cache(maxsize=4096)
def t_quantile(freedom: int, alpha: float) -> float:
    """Return the value that a t-distributed |t| exceeds with probability ``alpha``."""
    from scipy import special  # importing it takes a tenth of the time of scipy.stats

    return -float(special.stdtrit(freedom, alpha / 2))


def two_sided(ratio: float, freedom: int) -> float:
    """Compute the two-sided p-value of a t-test."""
    from scipy import special

    return 2 * float(special.stdtr(freedom, -abs(ratio)))


def paired_interval(
    mine: Mapping[int, float], theirs: Mapping[int, float], level: float = 0.95
) -> Interval:
    """Compute the interval of mine − theirs over the seeds with a defined value in both.

    If the differences are equal except for float32 rounding of the values, the half-width is 0.

    Examples
    --------
    >>> str(paired_interval({0: 2.0, 1: 3.0, 2: 9.0}, {0: 1.0, 1: 2.0, 3: 5.0}))
    '1.000 ± 0.000 (n = 2)'
    """
    differences = {seed: mine[seed] - theirs[seed] for seed in mine if seed in theirs}
    seeds = [seed for seed, value in differences.items() if math.isfinite(value)]
    interval = Interval.of([differences[seed] for seed in seeds], level)
    if len(seeds) < 2:
        return interval
    low = min(differences[seed] for seed in seeds)
    high = max(differences[seed] for seed in seeds)
    rounding = 2.0**-22 * max(max(abs(mine[seed]), abs(theirs[seed])) for seed in seeds)
    return Interval(interval.mean, 0.0, interval.count) if high - low <= rounding else interval


def with_failures(
    values: Mapping[str, Mapping[int, float]], higher: bool
) -> dict[str, dict[int, float]]:
    """Return values by method and seed, with each value that is not finite replaced.

    The replacement is the worst finite value of all methods. A method without any finite value has
    no values.

    Examples
    --------
    >>> with_failures({"a": {0: 1.0, 1: math.nan}, "b": {0: 0.5, 1: 0.25}}, higher=True)
    {'a': {0: 1.0, 1: 0.25}, 'b': {0: 0.5, 1: 0.25}}
    """
    worst = worst_of(values.values(), higher)
    return {
        label: {seed: value if math.isfinite(value) else worst for seed, value in own.items()}
        if any(map(math.isfinite, own.values()))
        else {}
        for label, own in values.items()
    }


def worst_of(values: Iterable[Mapping[int, float]], higher: bool) -> float:
    """Return the worst finite value; NaN if there is none."""
    finite = [value for own in values for value in own.values() if math.isfinite(value)]
    return (min if higher else max)(finite, default=math.nan)


def against_failures(
    mine: Mapping[int, float], theirs: Mapping[int, float], higher: bool, worst: float
) -> tuple[dict[int, float], dict[int, float]]:
    """Return the values of two methods in the seeds of both.

    Failed seeds count against their method.

    A value that is not finite becomes ``worst``. There is one exception: only one method has failed
    seeds, and the other is better on average in the seeds without failures. Then only the seeds
    without failures count. The failed seeds could only increase the lead of the better method, but
    as outliers they would widen the interval.
    """
    seeds = [seed for seed in mine if seed in theirs]
    sound = [seed for seed in seeds if math.isfinite(mine[seed]) and math.isfinite(theirs[seed])]
    gap = mean_and_error([mine[seed] - theirs[seed] for seed in sound])[0] * (1 if higher else -1)
    lost, won = (any(not math.isfinite(own[seed]) for seed in seeds) for own in (mine, theirs))
    if sound and (gap > 0 if won and not lost else gap < 0 if lost and not won else False):
        seeds = sound
    a, b = (
        {seed: own[seed] if math.isfinite(own[seed]) else worst for seed in seeds}
        for own in (mine, theirs)
    )
    return a, b


def paired_differences(
    values: Mapping[str, Mapping[int, float]],
    level: float = 0.95,
    roles: Mapping[str, str] | None = None,
    higher: bool | None = None,
) -> dict[tuple[str, str], Interval]:
    """Compute all paired differences between methods: ``pairs["a", "b"]`` is a − b.

    ``values`` contains the values of each method by seed. An interval excludes zero exactly if
    Holm's step-down rule over all pairs rejects that a and b are equal. So if all methods are
    equal, the chance that any interval excludes zero is at most 1 − ``level``. Holm's rule compares
    the r-th smallest of m p-values with (1 − ``level``) / (m − r + 1), up to the first p-value that
    is larger. All later p-values use the level of that p-value.

    ``roles`` marks the methods that are references ("floor", "ceiling"). There are no claims about
    two references, or about a method and a ceiling. Such pairs are excluded from the rule, and each
    has a separate interval at ``level``.

    Values that are not finite are failed seeds. If ``higher`` states which values are better, they
    count against their method (:func:`against_failures`); otherwise they are excluded.

    Notes
    -----
    Source: Holm (1979), *A simple sequentially rejective multiple test procedure*, Scandinavian
    Journal of Statistics 6.

    Examples
    --------
    >>> near, far = {0: 1.0, 1: 1.1, 2: 0.9}, {0: 3.0, 1: 3.0, 2: 3.1}
    >>> pairs = paired_differences({"near": near, "far": far, "none": {0: 2.0}})
    >>> str(pairs["far", "near"]), str(pairs["none", "near"])
    ('2.033 ± 0.379 (n = 3)', '1.000 (n = 1)')
    """
    samples = {
        (a, b): (values[a], values[b])
        if higher is None
        else against_failures(values[a], values[b], higher, worst_of(values.values(), higher))
        for a, b in itertools.combinations(values, 2)
    }
    pairs = {pair: paired_interval(*sample, level) for pair, sample in samples.items()}
    tested = [
        pair
        for pair, interval in pairs.items()
        if interval.count > 1 and claims(*pair, roles or {})
    ]
    left = len(tested)
    for pair in sorted(tested, key=lambda pair: _chance(pairs[pair], level)):
        pairs[pair] = paired_interval(*samples[pair], 1 - (1 - level) / left)
        left -= pairs[pair].excludes_zero
    return pairs | {
        (b, a): Interval(0.0 - gap.mean, gap.half_width, gap.count) for (a, b), gap in pairs.items()
    }


def claims(a: str, b: str, roles: Mapping[str, str]) -> bool:
    """Return whether a comparison of the two can show which method is better."""
    both = {roles.get(a, ""), roles.get(b, "")}
    return "ceiling" not in both and "" in both


def _chance(interval: Interval, level: float) -> float:
    """Return the two-sided p-value of a mean of zero; 1 if there is no spread."""
    if not interval.half_width > 0:
        return 1.0
    freedom = interval.count - 1
    return two_sided(interval.mean / interval.half_width * t_quantile(freedom, 1 - level), freedom)


TENDENCY = 5
CLAIM = 10
"""Numbers of seeds. Below the first number there is no claim; a claim needs the second number."""


def few_seeds(seeds: int) -> str:
    """Return the remark about a comparison over few seeds; empty if there are enough.

    Examples
    --------
    >>> few_seeds(3)
    '3 seeds: no claim can be made from so few; a claim needs 10'
    >>> few_seeds(5), few_seeds(10)
    ('5 seeds: a claim needs 10', '')
    """
    if seeds >= CLAIM:
        return ""
    count = f"{seeds} seed{'s' * (seeds != 1)}"
    return (
        f"{count}: "
        + ("no claim can be made from so few; " if seeds < TENDENCY else "")
        + f"a claim needs {CLAIM}"
    )


def spell(interval: Interval, *, share: bool = False, signed: bool = False) -> str:
    """Format mean ± half-width, with as many digits as the half-width justifies.

    A share is shown in percent, with two decimals.

    Examples
    --------
    >>> spell(Interval(0.912345, 0.00412, 5)), spell(Interval(12.0, float("nan"), 1), signed=True)
    ('0.9123 ± 0.0041', '+12')
    >>> spell(Interval(0.912345, 0.00412, 5), share=True)
    '91.23 ± 0.41'
    >>> spell(Interval(-0.25, 0.0, 3), signed=True)  # a difference that is the same in every seed
    '-0.25 (exact)'
    """
    mean = interval.mean * (100 if share else 1)
    half = interval.half_width * (100 if share else 1)
    sign = "+" if signed else ""
    if math.isnan(mean):
        return "nan"
    if half < 1e-12 * abs(mean):
        half = 0.0  # rounding errors of equal values
    if signed and half == 0 and interval.count > 1:
        return f"{mean:{sign}.5g} (exact)"
    large = max(abs(mean), 0.0 if math.isnan(half) else half) >= 1e7
    if share and not large:
        return f"{mean:{sign}.2f}" + ("" if math.isnan(half) else f" ± {half:.2f}")
    if not 0 < half < math.inf:
        return f"{mean:{sign}.5g}" + ("" if math.isnan(half) else f" ± {half:g}")
    # show at least one significant digit of the mean, if two decimals suffice for it
    digits = max(
        1 - math.floor(math.log10(half)), min(2, -math.floor(math.log10(abs(mean)))) if mean else 0
    )
    if digits > 7 or large:
        return f"{mean:{sign}.4g} ± {half:.2g}"
    return f"{mean:{sign}.{max(digits, 0)}f} ± {half:.{max(digits, 0)}f}"
