"""Intervals against SciPy's own, and Holm's rule over all pairs against its definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from hgms.results import recovered_share
from hgms.results.statistics import Interval, paired_differences, paired_interval


@pytest.mark.parametrize("level", [0.9, 0.95])
def test_an_interval_is_the_t_interval_and_one_value_has_none(level: float) -> None:
    values = [0.91, 0.88, 0.93, 0.90, 0.89]
    ends = stats.t.interval(level, 4, loc=sum(values) / 5, scale=stats.sem(values))
    found = Interval.of(values, level)
    mine = (found.mean - found.half_width, found.mean + found.half_width)
    assert mine == pytest.approx(ends, rel=1e-12)
    assert str(Interval.of([0.5])) == "0.500 (n = 1)"


@pytest.mark.parametrize("size", [1e155, 1.5e308])
def test_large_finite_values_have_an_interval(size: float) -> None:
    """Their squares overflow, and so does the sum of the largest."""
    result = Interval.of([size, 0.5 * size, 0.9 * size])
    assert result.mean == pytest.approx(0.8 * size)
    assert result.half_width == pytest.approx(Interval.of([1.0, 0.5, 0.9]).half_width * size)


def test_all_pairs_are_judged_by_holm_s_rule() -> None:
    """The intervals exclude zero exactly where adjusted p-values, computed from SciPy's, are at
    most 5 %.
    """
    random = np.random.default_rng(1)
    judged = [0, 0]
    stopped = 0
    for _ in range(40):
        means = random.choice([0.0, 0.0, 1.0, 2.0, 5.0], size=5)
        draws = means[:, None] + random.normal(size=(5, 6))
        there = random.random((5, 6)) < 0.9
        there[:, :3] = True
        values = {
            str(i): {seed: float(draws[i, seed]) for seed in np.flatnonzero(there[i]).tolist()}
            for i in range(5)
        }
        result = paired_differences(values)
        chances = {}
        for a, b in itertools.combinations(range(5), 2):
            common = there[a] & there[b]
            chances[str(a), str(b)] = stats.ttest_rel(draws[a, common], draws[b, common]).pvalue
        adjusted = 0.0
        for rank, (pair, chance) in enumerate(sorted(chances.items(), key=lambda item: item[1])):
            adjusted = max(adjusted, (len(chances) - rank) * chance)
            one, other = result[pair], result[pair[::-1]]
            assert one.excludes_zero == other.excludes_zero == (adjusted <= 0.05)
            plain = paired_interval(values[pair[0]], values[pair[1]])
            assert one.mean == -other.mean == pytest.approx(plain.mean)
            judged[int(adjusted <= 0.05)] += 1
            # it passes its own level, an earlier one did not
            stopped += (len(chances) - rank) * chance <= 0.05 < adjusted
    assert min(judged) > 50
    assert stopped > 0


def test_pairs_of_which_nothing_is_claimed_are_no_part_of_the_rule() -> None:
    """Two methods and a floor are three pairs, however many ceilings and floors stand beside
    them: the others are plain.
    """
    roles = {"a": "", "b": "", "low": "floor", "lower": "floor", "truth": "ceiling"}
    draws = np.random.default_rng(2).normal(size=(5, 6)) + 3 * np.arange(5)[:, None]
    values = {label: dict(enumerate(row.tolist())) for label, row in zip(roles, draws, strict=True)}
    result = paired_differences(values, roles=roles)
    wider = {
        pair: result[pair].half_width / paired_interval(values[pair[0]], values[pair[1]]).half_width
        for pair in itertools.combinations(roles, 2)
    }
    claimed = [pair for pair in wider if {"a", "b"} & {*pair} and "truth" not in pair]
    assert {wider[pair] for pair in wider if pair not in claimed} == {1.0}
    levels = [wider[pair] for pair in claimed]
    widest = stats.t.ppf(1 - 0.025 / 5, 5) / stats.t.ppf(0.975, 5)  # the smallest p-value of five
    assert (len(levels), max(levels), min(levels) >= 1) == (5, pytest.approx(widest), True)


@pytest.mark.extended
def test_equal_methods_are_told_apart_in_one_comparison_of_twenty_at_most() -> None:
    """Eight equal methods, five seeds: without a correction the differences to one reference
    alone exclude zero in 20.5 %.
    """
    draws = np.random.default_rng(1).normal(size=(600, 8, 5))
    apart = [
        any(pair.excludes_zero for pair in paired_differences(values).values())
        for values in (
            {str(i): dict(enumerate(row)) for i, row in enumerate(trial)}
            for trial in draws.tolist()
        )
    ]
    gaps = draws[:, 1:] - draws[:, :1]
    t = np.abs(gaps.mean(-1)) / (gaps.std(-1, ddof=1) / 5**0.5)
    assert (t > stats.t.ppf(0.975, 4)).any(1).mean() > 0.15
    assert 0.02 < np.mean(apart) < 0.05 + 2 * (0.05 * 0.95 / len(apart)) ** 0.5


@pytest.mark.parametrize("size", [3, 5, 10])
def test_the_recovered_share_has_the_interval_of_the_tests_that_do_not_reject(size: int) -> None:
    """Fieller's interval by its definition: ρ is inside exactly where a t-test of mean(a − ρb) =
    0 does not reject.
    """
    floor, ceiling, mine = np.random.default_rng(3).normal(
        [[0.85], [0.93], [0.89]], 0.01, (3, size)
    )
    share = recovered_share(*(dict(enumerate(row.tolist())) for row in (mine, floor, ceiling)))
    a, b = mine - floor, ceiling - floor
    assert (share.value, share.count) == (pytest.approx(a.mean() / b.mean()), size)
    for end, chance in ((share.low, 0.05), (share.high, 0.05), (share.value, 1.0)):
        assert stats.ttest_1samp(a - end * b, 0).pvalue == pytest.approx(chance, rel=1e-6)
    assert share.low < share.value < share.high


def test_the_recovered_share_by_hand() -> None:
    """Differences 1, 2, 3 to a ceiling that is 4 ahead in every seed: the t-interval of their
    mean 2, divided by 4.
    """
    floor, ceiling = dict.fromkeys(range(3), 0.0), dict.fromkeys(range(4), 4.0)
    share = recovered_share({0: 1.0, 1: 2.0, 2: 3.0}, floor, ceiling)
    half = stats.t.ppf(0.975, 2) / 3**0.5 / 4
    assert (share.value, share.low, share.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half))
    # the ceiling may not be ahead at all: no interval
    unsure = recovered_share({0: 1.0, 1: 2.0}, {0: 0.0, 1: 0.0}, {0: 5.0, 1: -1.0})
    assert (unsure.value, math.isnan(unsure.low)) == (0.75, True)
    assert math.isnan(recovered_share({0: 1.0}, {0: 0.5}, {1: 2.0}).value)


def test_a_ceiling_behind_the_floor_has_no_recovered_share() -> None:
    mine = {0: 0.80, 1: 0.81, 2: 0.80}
    high = {0: 0.90, 1: 0.93, 2: 0.91}
    low = {0: 0.70, 1: 0.72, 2: 0.71}
    failed = {**mine, 2: math.nan}  # a failed seed counts as the worst value, 0.70
    shares = [
        recovered_share(mine, floor=high, ceiling=low),
        recovered_share(mine, floor=low, ceiling=high, higher=False),
        recovered_share(mine, floor=low, ceiling=high),
        recovered_share(mine, floor=high, ceiling=low, higher=False),
        recovered_share(failed, floor=low, ceiling=high),
    ]
    known = [math.nan, math.nan, 0.28 / 0.61, 0.33 / 0.61, (0.10 + 0.09 - 0.01) / 0.61]
    assert [share.value for share in shares] == pytest.approx(known, nan_ok=True)
    assert shares[-1].count == 3
