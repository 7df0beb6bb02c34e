"""Intervals against SciPy's own, and Holm's rule over all pairs against its definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from hgms_results.statistics import Interval, compared, paired, spell
from hgms_results.tables import Point, table

VALUES = [0.91, 0.88, 0.93, 0.90, 0.89]


@pytest.mark.parametrize("level", [0.9, 0.95])
def test_interval_is_the_t_interval(level: float) -> None:
    low, high = stats.t.interval(level, len(VALUES) - 1, loc=sum(VALUES) / 5, scale=stats.sem(VALUES))
    found = Interval.of(VALUES, level)
    assert found.mean - found.half_width == pytest.approx(low, rel=1e-12)
    assert found.mean + found.half_width == pytest.approx(high, rel=1e-12)


def test_one_value_has_no_interval() -> None:
    assert math.isnan(Interval.of([0.5]).half_width)
    assert str(Interval.of([0.5])) == "0.500 (n = 1)"
    assert math.isnan(Interval.of([]).mean)
    assert Interval.of([1.0, 3.0]).scaled(100).mean == 200


@pytest.mark.parametrize("size", [1e155, 1e200, 1.5e308])
def test_large_finite_values_have_an_interval(size: float) -> None:
    """Their squares overflow, and so does the sum of the largest."""
    result, small = Interval.of([size, 0.5 * size, 0.9 * size]), Interval.of([1.0, 0.5, 0.9])
    assert result.mean == pytest.approx(0.8 * size)
    assert result.half_width == pytest.approx(small.half_width * size)
    assert spell(Interval.of([size, -size])) in ("0 ± 1.3e+156", "0 ± 1.3e+201", "0 ± inf")


def test_all_pairs_are_judged_by_holm_s_rule() -> None:
    """The intervals exclude zero exactly where adjusted p-values, computed from SciPy's, are at most 5 %."""
    random, rejected, kept, stopped = np.random.default_rng(4), 0, 0, 0
    for _ in range(40):
        means = random.choice([0.0, 0.0, 1.0, 2.0, 5.0], size=5)
        values = {
            str(i): {seed: mean + random.normal() for seed in range(6) if random.random() < 0.9 or seed < 3}
            for i, mean in enumerate(means)
        }
        result = compared(values)
        chances = {}
        for a, b in itertools.combinations(values, 2):
            common = sorted(values[a].keys() & values[b].keys())
            chances[a, b] = stats.ttest_rel(*[[values[label][seed] for seed in common] for label in (a, b)]).pvalue
        adjusted = 0.0
        for rank, (pair, chance) in enumerate(sorted(chances.items(), key=lambda item: item[1])):
            adjusted = max(adjusted, (len(chances) - rank) * chance)
            assert result[pair].excludes_zero == result[pair[::-1]].excludes_zero == (adjusted <= 0.05)
            assert result[pair].mean == -result[pair[::-1]].mean == pytest.approx(paired(*map(values.get, pair)).mean)  # type: ignore[arg-type]
            rejected, kept = rejected + (adjusted <= 0.05), kept + (adjusted > 0.05)
            stopped += (len(chances) - rank) * chance <= 0.05 < adjusted  # it passes its own level, an earlier one did not
    assert min(rejected, kept) > 50
    assert stopped > 0


def test_equal_methods_are_told_apart_in_one_comparison_of_twenty_at_most() -> None:
    """Eight equal methods, five seeds: without a correction the differences to one reference alone exclude zero in 20.5 %."""
    random = np.random.default_rng(1)
    trials, apart, uncorrected, stars = 2000, 0, 0, 0
    for draws in random.normal(size=(trials, 8, 5)):
        runs = {
            str(number): [
                Point(seed=seed, metrics={"value": value}, outer_steps=1, oracle_calls=1, seconds=1.0)
                for seed, value in enumerate(row.tolist())
            ]
            for number, row in enumerate(draws)
        }
        result = table(runs, "value", "0")
        apart += any(pair.excludes_zero for pair in result.pairs.values())
        stars += result.winner is not None
        gaps = draws[1:] - draws[0]
        t = np.abs(gaps.mean(1)) / (gaps.std(1, ddof=1) / 5**0.5)
        uncorrected += bool((t > stats.t.ppf(0.975, 4)).any())
        assert all(row.difference is None or row.difference == result.pairs[row.method, "0"] for row in result.rows)
    assert uncorrected / trials > 0.15
    assert 0.02 < apart / trials < 0.05 + 2 * (0.05 * 0.95 / trials) ** 0.5
    assert stars / trials < 0.01


@pytest.mark.parametrize("kind", [np.float64, np.float32])
@pytest.mark.parametrize("seeds", [2, 4])
def test_differences_without_a_spread_give_no_star(kind: type[np.floating], seeds: int) -> None:
    """Values of accuracies, as rounded: no spread was seen, so nothing is known about chance."""
    low = [kind(hits / 300) for hits in (211, 187, 243, 199)][:seeds]
    high = [kind((hits + 6) / 300) for hits in (211, 187, 243, 199)][:seeds]
    runs = {
        name: [
            Point(seed=seed, metrics={"accuracy": float(value)}, outer_steps=1, oracle_calls=1, seconds=1.0)
            for seed, value in enumerate(values)
        ]
        for name, values in (("low", low), ("high", high))
    }
    result = table(runs, "accuracy", "low")
    assert result.pairs["high", "low"].half_width == 0
    assert not result.pairs["high", "low"].excludes_zero
    assert result.winner is None
    assert result.columns[1]["− low"] == "+2.00 ± 0.00"


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (Interval(-0.22, 27.3, 2), "-0.2 ± 27.3"),  # not -0
        (Interval(0.0003, 27.3, 2), "+0.00 ± 27.30"),
        (Interval(12.0, math.inf, 2), "+12 ± inf"),
        (Interval(12.0, 0.0, 2), "+12 ± 0"),
        (Interval(1e160, 2e159, 2), "+1e+160 ± 2e+159"),
    ],
)
def test_wide_intervals_keep_a_digit_of_the_mean(interval: Interval, expected: str) -> None:
    assert spell(interval, signed=True) == expected
