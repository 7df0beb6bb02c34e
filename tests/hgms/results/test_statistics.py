"""Intervals against SciPy's own, and Holm's rule over all pairs against its definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from attrs import evolve
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
    nothing = {"a": math.nan, "b": math.nan, "c": math.nan}
    assert Ranks.of([block] * 3 + [(nothing, True)]) == enough


@pytest.mark.parametrize("higher", [True, False])
def test_a_failed_seed_has_the_last_rank(higher: bool) -> None:
    block = {"a": math.nan, "b": 2.0, "c": 1.0}
    ranks = Ranks.of([(block, higher)])
    assert ranks is not None
    assert ranks.means["a"] == 3.0
    assert list(ranks.means) == (["b", "c", "a"] if higher else ["c", "b", "a"])


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
    """Values of accuracies, as rounded: the difference is exact, and the seeds are few."""
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
    assert result.columns[1]["− low"] == "+2 (exact)"
    assert result.pairs["high", "low"].exact


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (Interval(-0.22, 27.3, 2), "-0.2 ± 27.3"),  # not -0
        (Interval(0.0003, 27.3, 2), "+0.00 ± 27.30"),
        (Interval(12.0, math.inf, 2), "+12 ± inf"),
        (Interval(12.0, 0.0, 2), "+12 (exact)"),
        (Interval(1e160, 2e159, 2), "+1e+160 ± 2e+159"),
    ],
)
def test_wide_intervals_keep_a_digit_of_the_mean(interval: Interval, expected: str) -> None:
    assert spell(interval, signed=True) == expected


def _points(values: list[float], role: str = "", spent: float = 1.0) -> list[Point]:
    return [
        Point(
            seed=seed,
            metrics={"value": value},
            outer_steps=1,
            oracle_calls=1,
            seconds=1.0,
            spent=spent,
            role=role,
        )
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize(("gap", "note"), [(-0.241, "better"), (0.241, "worse"), (0.0, "equal")])
def test_a_difference_without_a_spread_is_exact_and_not_called_chance(
    gap: float, note: str
) -> None:
    """A deterministic method at 0.005 beside 0.246 of uniform, lower is better, in every seed."""
    values = [0.246 + gap] * 10
    result = table(
        {"mine": _points(values), "uniform": _points([0.246] * 10, "floor")},
        "value",
        "uniform",
        higher_is_better=False,
    )
    [row] = [row for row in result.rows if row.method == "mine"]
    assert [text.split()[0] for text in row.notes] == [note]
    assert row.ahead_of_floor is (note == "better")
    assert result.winner == ("mine" if note == "better" else None)
    assert result.columns[0]["− uniform"].endswith("(exact)")
    assert not any("not ahead of uniform" in line for line in row.notes)


def test_a_failed_or_undefined_seed_counts_against_its_method() -> None:
    """`a` is better in its sound seeds; each lost seed counts as the worst value, 0.2."""
    runs = {
        "a": _points([0.9, 0.91, math.nan]),
        "b": _points([0.5, 0.51, 0.52, 0.53]),
        "c": _points([0.2, 0.3, 0.25, 0.28]),
    }
    result = table(runs, "value", failed={"a": [3]})
    assert result.pairs["a", "b"].count == 4
    assert result.pairs["a", "b"].mean == pytest.approx((0.4 + 0.4 - 0.32 - 0.33) / 4)
    assert not result.pairs["a", "b"].excludes_zero
    [row] = [row for row in result.rows if row.method == "a"]
    assert (row.undefined, row.failed, row.metrics["value"].count) == (1, 1, 2)
    assert any("counts against its method" in line for line in result.remarks)
    # b is better than c where both have values, and the failed seeds of c cannot hide it
    runs["c"] = _points([0.2, 0.21, 0.22, math.nan])
    result = table(runs, "value")
    assert result.pairs["b", "c"].count == 3
    assert result.pairs["b", "c"].mean == pytest.approx(0.3)


def test_spending_more_than_the_budget_is_noted_and_gets_no_star() -> None:
    values = [0.5, 0.6, 0.55, 0.52, 0.58] * 2
    low = [value - 0.2 + 0.01 * (seed % 3) for seed, value in enumerate(values)]
    for spent, winner in ((1.05, "mine"), (5.5, None)):
        result = table({"mine": _points(values, spent=spent), "low": _points(low)}, "value")
        assert result.winner == winner
        assert ("spent 5.5 times the budget" in result.rows[0].notes) is (winner is None)


def test_a_ceiling_behind_the_floor_has_no_recovered_share() -> None:
    mine = {0: 0.80, 1: 0.81, 2: 0.80}
    high = {0: 0.90, 1: 0.93, 2: 0.91}
    low = {0: 0.70, 1: 0.72, 2: 0.71}
    assert math.isnan(recovered(mine, floor=high, ceiling=low).value)
    assert math.isnan(recovered(mine, floor=low, ceiling=high, higher=False).value)
    share = recovered(mine, floor=low, ceiling=high)
    assert share.value == pytest.approx(0.28 / 0.61)
    loss = recovered(mine, floor=high, ceiling=low, higher=False)
    assert loss.value == pytest.approx(0.33 / 0.61)
    # a failed seed counts as the worst value, 0.70
    failed = recovered({**mine, 2: math.nan}, floor=low, ceiling=high)
    assert failed.count == 3
    assert failed.value == pytest.approx((0.10 + 0.09 - 0.01) / 0.61)


@pytest.mark.parametrize(
    ("name", "scale", "shown"),
    [
        ("test_accuracy", 1, "75.00"),
        ("test_accuracy", 100, "75"),
        ("accuracy_percent", 100, "75"),
        ("test_acc", 100, "75"),
    ],
)
def test_a_metric_is_shown_in_percent_only_if_it_is_a_share(
    name: str, scale: float, shown: str
) -> None:
    point = Point(seed=0, metrics={name: 0.75 * scale}, outer_steps=1, oracle_calls=1, seconds=1.0)
    [row] = table({"m": [point]}, name).columns
    [heading] = [text for text in row if text.startswith(name.replace("_", " "))]
    assert row[heading] == shown
    assert heading.endswith("(%) ↑") is (scale == 1)


def test_seconds_of_compilation_are_a_column_if_anything_was_compiled() -> None:
    runs = {name: _points([0.1, 0.2]) for name in "ab"}
    assert "compile seconds" not in table(runs, "value").columns[0]
    runs["a"] = [evolve(point, compile_seconds=27.5) for point in runs["a"]]
    rows = table(runs, "value").columns
    assert [row["compile seconds"] for row in rows] == ["27.5", "0"]
