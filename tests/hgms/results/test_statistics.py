"""Intervals against SciPy's own, and Holm's rule over all pairs against its definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from hgms.results import Ranks, recovered
from hgms.results.statistics import Interval, compared, few_seeds, paired, spell
from hgms.results.tables import Point, table

VALUES = [0.91, 0.88, 0.93, 0.90, 0.89]


@pytest.mark.parametrize("level", [0.9, 0.95])
def test_interval_is_the_t_interval(level: float) -> None:
    low, high = stats.t.interval(
        level, len(VALUES) - 1, loc=sum(VALUES) / 5, scale=stats.sem(VALUES)
    )
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
    result = Interval.of([size, 0.5 * size, 0.9 * size])
    small = Interval.of([1.0, 0.5, 0.9])
    assert result.mean == pytest.approx(0.8 * size)
    assert result.half_width == pytest.approx(small.half_width * size)
    assert spell(Interval.of([size, -size])) in ("0 ± 1.3e+156", "0 ± 1.3e+201", "0 ± inf")


def test_all_pairs_are_judged_by_holm_s_rule() -> None:
    """The intervals exclude zero exactly where adjusted p-values, computed from SciPy's, are at
    most 5 %.
    """
    random = np.random.default_rng(4)
    rejected = 0
    kept = 0
    stopped = 0
    for _ in range(40):
        means = random.choice([0.0, 0.0, 1.0, 2.0, 5.0], size=5)
        values = {
            str(i): {
                seed: mean + random.normal()
                for seed in range(6)
                if random.random() < 0.9 or seed < 3
            }
            for i, mean in enumerate(means)
        }
        result = compared(values)
        chances = {}
        for a, b in itertools.combinations(values, 2):
            common = sorted(values[a].keys() & values[b].keys())
            chances[a, b] = stats.ttest_rel(
                *[[values[label][seed] for seed in common] for label in (a, b)]
            ).pvalue
        adjusted = 0.0
        for rank, (pair, chance) in enumerate(sorted(chances.items(), key=lambda item: item[1])):
            adjusted = max(adjusted, (len(chances) - rank) * chance)
            assert (
                result[pair].excludes_zero == result[pair[::-1]].excludes_zero == (adjusted <= 0.05)
            )
            assert (
                result[pair].mean
                == -result[pair[::-1]].mean
                == pytest.approx(paired(*map(values.get, pair)).mean)
            )  # type: ignore[arg-type]
            rejected = rejected + (adjusted <= 0.05)
            kept = kept + (adjusted > 0.05)
            # it passes its own level, an earlier one did not
            stopped += (len(chances) - rank) * chance <= 0.05 < adjusted
    assert min(rejected, kept) > 50
    assert stopped > 0


def test_pairs_of_which_nothing_is_claimed_are_no_part_of_the_rule() -> None:
    """Two methods and a floor are three pairs, however many ceilings and floors stand beside
    them: the others are plain.
    """
    random = np.random.default_rng(2)
    roles = {"a": "", "b": "", "low": "floor", "lower": "floor", "truth": "ceiling"}
    values = {
        label: dict(enumerate((random.normal(size=6) + 3 * number).tolist()))
        for number, label in enumerate(roles)
    }
    result = compared(values, roles=roles)
    claimed = {
        pair
        for pair in itertools.combinations(roles, 2)
        if "" in (roles[pair[0]], roles[pair[1]]) and "truth" not in pair
    }
    assert len(claimed) == 5
    for pair in itertools.combinations(roles, 2):
        plain = paired(values[pair[0]], values[pair[1]])
        assert (
            (result[pair] == plain)
            if pair not in claimed
            else (result[pair].half_width >= plain.half_width)
        )
    levels = sorted(
        result[pair].half_width / paired(values[pair[0]], values[pair[1]]).half_width
        for pair in claimed
    )
    widest = stats.t.ppf(1 - 0.025 / 5, 5) / stats.t.ppf(0.975, 5)  # the smallest p-value of five
    assert levels[-1] == pytest.approx(widest)


def test_the_recovered_share_has_the_interval_of_the_tests_that_do_not_reject() -> None:
    """Fieller's interval by its definition: ρ is inside exactly where a t-test of mean(a − ρb) =
    0 does not reject.
    """
    random = np.random.default_rng(3)
    for size in (3, 5, 10):
        floor, ceiling, mine = (
            dict(enumerate(random.normal(mean, 0.01, size).tolist())) for mean in (0.85, 0.93, 0.89)
        )
        share = recovered(mine, floor, ceiling)
        a, b = (
            np.array([other[seed] - floor[seed] for seed in range(size)])
            for other in (mine, ceiling)
        )
        assert share.value == pytest.approx(a.mean() / b.mean())
        assert share.count == size
        for end in (share.low, share.high):
            assert stats.ttest_1samp(a - end * b, 0).pvalue == pytest.approx(0.05, rel=1e-6)
        assert share.low < share.value < share.high
        assert stats.ttest_1samp(a - share.value * b, 0).pvalue == pytest.approx(1)


def test_the_recovered_share_by_hand() -> None:
    """Differences 1, 2, 3 to a ceiling that is 4 ahead in every seed: the t-interval of their
    mean 2, divided by 4.
    """
    share = recovered(
        {0: 1.0, 1: 2.0, 2: 3.0}, dict.fromkeys(range(3), 0.0), dict.fromkeys(range(4), 4.0)
    )
    half = stats.t.ppf(0.975, 2) / 3**0.5 / 4
    assert (share.value, share.low, share.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half))
    unsure = recovered({0: 1.0, 1: 2.0}, {0: 0.0, 1: 0.0}, {0: 5.0, 1: -1.0})
    assert (unsure.value, math.isnan(unsure.low)) == (0.75, True), (
        "the ceiling may not be ahead at all: no interval"
    )
    assert math.isnan(recovered({0: 1.0}, {0: 0.5}, {1: 2.0}).value)
    assert str(recovered({0: 1.0}, {0: 0.5}, {0: 1.5})) == "0.50"


def test_few_seeds_claim_nothing() -> None:
    assert [few_seeds(seeds).count("no claim") for seeds in (1, 4, 5, 9, 10)] == [1, 1, 0, 0, 0]
    assert [few_seeds(seeds).count("a claim needs 10") for seeds in (1, 4, 5, 9, 10)] == [
        1,
        1,
        1,
        1,
        0,
    ]


def test_mean_ranks_and_their_critical_difference_by_hand() -> None:
    """Demšar (2006), table 5: q = 2.569 for four methods; his 14 data sets have a critical
    difference of 1.25.
    """
    blocks = [({"a": 4.0, "b": 3.0, "c": 2.0, "d": 2.0}, True)] * 7 + [
        ({"a": 1.0, "b": 2.0, "c": 4.0, "d": 3.0}, False)
    ] * 7
    ranks = Ranks.of(blocks)
    assert ranks is not None
    assert ranks.means == {"a": 1.0, "b": 2.0, "d": 3.25, "c": 3.75}
    assert (
        ranks.critical
        == pytest.approx(2.569 * (4 * 5 / (6 * 14)) ** 0.5, abs=1e-3)
        == pytest.approx(1.25, abs=5e-3)
    )
    assert ranks.chance == pytest.approx(
        stats.friedmanchisquare(*zip(*_ranked(blocks), strict=True)).pvalue
    )
    assert ranks.groups == [["a", "b"], ["b", "d"], ["d", "c"]], (
        "b and c are 1.75 apart, b and d 1.25"
    )
    assert "Not told apart: a, b; b, d; d, c." in ranks.words


def _ranked(blocks: list[tuple[dict[str, float], bool]]) -> list[list[float]]:
    return [[-value if higher else value for value in values.values()] for values, higher in blocks]


def test_few_blocks_are_said_to_say_nothing() -> None:
    """Three methods: 2.343 · √(12 / 6N) is below the largest difference 2 from N = 3 on."""
    block = ({"a": 3.0, "b": 2.0, "c": 1.0}, True)
    few = Ranks.of([block] * 2)
    enough = Ranks.of([block] * 3)
    assert few is not None
    assert enough is not None
    assert (few.says_something, enough.says_something) == (False, True)
    assert "Too few to say anything" in few.words
    assert "It takes 3 blocks at least" in few.words
    assert Ranks.of([]) is None
    assert Ranks.of([({"a": 1.0}, True)]) is None
    lost = Ranks.of([block] * 3 + [({"a": math.nan, "b": 1.0, "c": 2.0}, True)])
    assert lost == enough


def test_equal_methods_are_told_apart_in_one_comparison_of_twenty_at_most() -> None:
    """Eight equal methods, five seeds: without a correction the differences to one reference
    alone exclude zero in 20.5 %.
    """
    random = np.random.default_rng(1)
    trials = 2000
    apart = 0
    uncorrected = 0
    stars = 0
    for draws in random.normal(size=(trials, 8, 5)):
        runs = {
            str(number): [
                Point(
                    seed=seed, metrics={"value": value}, outer_steps=1, oracle_calls=1, seconds=1.0
                )
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
        assert all(
            row.difference is None or row.difference == result.pairs[row.method, "0"]
            for row in result.rows
        )
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
            Point(
                seed=seed,
                metrics={"accuracy": float(value)},
                outer_steps=1,
                oracle_calls=1,
                seconds=1.0,
            )
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
