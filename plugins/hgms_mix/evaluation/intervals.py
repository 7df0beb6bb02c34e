"""Uncertainty of a score over questions: Wilson's interval and the bootstrap over questions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen

from hgms_core import ConfigError


@frozen
class Range:
    """An interval for a score. ``half_width`` = (high − low)/2, as in the paper's table of
    uncertainties.
    """

    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def wilson(correct: int, count: int, level: float = 0.95) -> Range:
    """Return Wilson's score interval of a share.

    It contains every p with |p̂ − p| ≤ z·√(p(1 − p)/n), with p̂ = correct/n.

    >>> wilson(50, 100)
    Range(low=0.4038315303659956, high=0.5961684696340044)

    Raises:
        ConfigError: no questions, or more right answers than questions.
    """
    if count < 1:
        raise ConfigError("out-of-range", f"count={count} must be at least 1", place=("count",))
    if not 0 <= correct <= count:
        raise ConfigError(
            "out-of-range",
            f"correct={correct} must be between 0 and count={count}",
            place=("correct",),
        )
    from scipy import stats

    interval = stats.binomtest(correct, count).proportion_ci(level, method="wilson")
    return Range(float(interval.low), float(interval.high))


def bootstrap(
    scores: Sequence[float], *, resamples: int = 10_000, seed: int = 0, level: float = 0.95
) -> Range:
    """Return a percentile bootstrap interval of the mean of per-question scores.

    Questions are drawn with replacement, ``resamples`` times. The paper specifies neither the
    number of resamples nor the seed; both are recorded with every interval. With fewer than two
    questions, or equal scores, the interval is the mean itself.

    >>> bootstrap([5.0, 5.0, 5.0])
    Range(low=5.0, high=5.0)
    """
    import numpy as np
    from scipy import stats

    values = np.asarray(scores, dtype=np.float64)
    if not len(values):
        raise ConfigError(
            "no-rows", "scores is empty, but must have at least one score", place=("scores",)
        )
    if np.ptp(values) == 0:
        return Range(float(values[0]), float(values[0]))
    interval = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=resamples,
        confidence_level=level,
        method="percentile",
        batch=max(1, 4_000_000 // len(values)),  # at most 32 MB of resampled scores at once
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Range(float(interval.low), float(interval.high))


def half_widths(
    accuracies: Iterable[float], count: int, level: float = 0.95
) -> tuple[float, float]:
    """Return the smallest and the largest half-width of Wilson intervals, in accuracy points.

    The intervals are around ``accuracies`` (in percent) on ``count`` questions: a row of the
    paper's table of evaluation uncertainty. Each percentage is rounded to the nearest whole number
    of right answers, because an interval is computed from such a number.

    >>> low, high = half_widths([60.03, 82.03], 1319)
    >>> f"{low:.2f} to {high:.2f}"
    '2.07 to 2.64'
    """
    widths = [
        100 * wilson(round(accuracy * count / 100), count, level).half_width
        for accuracy in accuracies
    ]
    return min(widths), max(widths)
