"""The table of a comparison: pairs by seed, who has won, who is behind a floor, lost seeds."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from scipy import stats

from hgms.results.tables import FAILED, UNJUDGED, Point, Row, Table, table

A = [0.91, 0.88, 0.93, 0.90]
B = [0.89, 0.87, 0.90, 0.88]
C = [0.905, 0.882, 0.928, 0.897]


def points(values: list[float], method: str = "m", role: str = "", **more: Any) -> list[Point]:
    """One point a seed; `uniform` and `theta0` are floors."""
    role = role or ("floor" if method in ("uniform", "theta0") else "")
    given = {"oracle_calls": 40, "seconds": 2.0, "method": method, "role": role, **more}
    return [
        Point(seed=seed, metrics={"acc": value}, outer_steps=4 + seed, **given)
        for seed, value in enumerate(values)
    ]


def by_label(results: Table) -> dict[str, Row]:
    return {row.method: row for row in results.rows}


def test_differences_are_paired_by_common_seeds_and_agree_with_scipy() -> None:
    best, base = table({"a": points(A), "b": points(B)}, "acc", reference="b").rows
    assert best.difference is not None
    mean, half = best.difference.mean, best.difference.half_width
    ends = stats.ttest_rel(A, B).confidence_interval(0.95)
    assert (mean - half, mean + half) == pytest.approx(tuple(ends), rel=1e-9)
    # seed by seed the two differ by far less than their own spread over seeds
    assert half < 0.5 * best.metrics["acc"].half_width
    assert (base.difference, best.cost.outer_steps_range) == (None, (4, 7))
    [_, row] = table({"a": points(A), "b": points(B)[1:]}, "acc", reference="a").rows
    mean = (0.87 - 0.88 + 0.90 - 0.93 + 0.88 - 0.90) / 3
    assert row.difference is not None
    assert (row.difference.count, row.difference.mean) == (3, pytest.approx(mean))


def test_no_winner_unless_every_interval_excludes_zero_and_seeds_are_ten() -> None:
    a, b, c = (points(3 * values) for values in (A, B, A[::-1]))
    few = table({"a": a[:9], "b": b[:9]}, "acc")
    assert (few.winner, few.pairs["a", "b"].excludes_zero) == (None, True)
    assert few.remarks == ["9 seeds: a claim needs 10"]
    assert table({"a": a, "b": b}, "acc", higher_is_better=False).winner == "b"
    tables = [
        {"a": a, "b": b},
        {"a": a, "b": b, "c": c},  # a and c are too close
        {"a": points(A[:1]), "b": points(B[:1])},  # one seed has no interval
        {"a": points(A)},  # nobody to beat
        {"a": a, "b": a},
    ]
    assert [table(runs, "acc").winner for runs in tables] == ["a", None, None, None, None]


def test_a_nan_counts_as_the_worst_value_and_is_never_averaged_away() -> None:
    runs = {"a": points([0.91, math.nan, 0.93, 0.90]), "b": points(B)}
    results = table(runs, "acc", reference="b")
    row = results.rows[0]
    assert row.difference is not None
    assert (row.undefined, row.metrics["acc"].count, row.difference.count) == (1, 3, 4)
    assert row.metrics["acc"].mean == pytest.approx((0.91 + 0.93 + 0.90) / 3)
    assert row.difference.mean == pytest.approx((0.02 - 0.0 + 0.03 + 0.02) / 4)
    assert (results.winner, "1 NaN" in results.columns[0]["note"]) == (None, True)


def test_a_failed_seed_counts_against_its_method_which_has_not_won() -> None:
    """`a` is better in its sound seeds; each lost seed counts as the worst value, 0.2."""
    runs = {
        "a": points([0.9, 0.91, math.nan]),
        "b": points([0.5, 0.51, 0.52, 0.53]),
        "c": points([0.2, 0.3, 0.25, 0.28]),
    }
    result = table(runs, "acc", failed={"a": [3]})
    pair = result.pairs["a", "b"]
    assert (pair.count, pair.excludes_zero) == (4, False)
    assert pair.mean == pytest.approx((0.4 + 0.4 - 0.32 - 0.33) / 4)
    row = by_label(result)["a"]
    assert (row.undefined, row.failed, row.metrics["acc"].count) == (1, 1, 2)
    # b is better than c where both have values, and the failed seeds of c cannot hide it
    runs["c"] = points([0.2, 0.21, 0.22, math.nan])
    pair = table(runs, "acc").pairs["b", "c"]
    assert (pair.count, pair.mean) == (3, pytest.approx(0.3))
    # a method without results is shown
    runs = {"a": points(3 * A), "b": points(3 * B), "c": []}
    results = table(runs, "acc", "a", failed={"b": [12], "c": [0, 1, 2, 3]})
    assert ([row.failed for row in results.rows], results.winner) == ([0, 1, 4], "a")
    assert table({**runs, "c": points(3 * C)}, "acc", failed={"a": [12]}).winner is None


def test_what_is_behind_a_floor_is_told_so() -> None:
    low = points([value / 2 for value in B])
    runs = {
        "u": points(A, "uniform"),
        "b": low,
        "c": points(C),
        "d": points([0.92, 0.89, 0.94, 0.91]),
        "e": points([1.91, 1.78, 1.95, 1.9]),
    }
    assert {row.method: row.notes for row in table(runs, "acc").rows} == {
        "b": ("worse than u",),
        "c": ("not better than u",),
        "d": ("better than u by the same in every seed",),
        "e": (),
        "u": (),
    }
    assert table({"t": points(A, "theta0"), "b": low}, "acc").rows[0].notes == ("worse than t",)


def test_references_are_set_apart_and_a_ceiling_is_nobody_to_beat() -> None:
    draw = np.random.default_rng(0)

    def around(mean: float, role: str = "", method: str = "m") -> list[Point]:
        return points((mean + 0.002 * draw.normal(size=10)).tolist(), method, role)

    runs = {
        "truth": around(0.95, "ceiling", "oracle-joint"),
        "floor": around(0.80, "floor", "uniform"),
        "best": around(0.90),
        "floor-last": around(0.85, "floor", "validation-only"),
        "bad": around(0.70),
    }
    runs["same"] = points([point.metrics["acc"] for point in reversed(runs["floor-last"])])
    results = table(runs, "acc", "floor")
    rows = by_label(results)
    assert list(rows) == ["best", "bad", "same", "floor", "floor-last", "truth"]
    assert (results.groups, results.winner, results.floor) == ([3], "best", "floor-last")
    assert rows["same"].notes == ("not better than floor-last",)
    assert rows["bad"].notes == ("worse than floor-last",)
    assert [row.ahead_of_floor for row in results.rows] == [True, False, False, None, None, None]
    assert rows["best"].recovered is not None
    assert rows["best"].recovered.value == pytest.approx(0.5, abs=0.02)


def test_an_x_that_never_trained_gets_no_verdict_and_none_is_made_on_it() -> None:
    """`b` would be worse than uniform, and `a` the winner over it: its losses are shown, and
    nothing is concluded.
    """
    runs = {"u": points(3 * A, "uniform"), "a": points(12 * [1.0])}
    runs["b"] = points(3 * B, reason="x is the warm-up's")
    rows = by_label(table(runs, "acc", "u"))
    assert (rows["b"].notes, rows["b"].winner) == (("no verdict: x is the warm-up's",), False)
    assert rows["b"].metrics["acc"].mean == pytest.approx(sum(B) / len(B))
    assert rows["a"].winner
    # what was not trained is not what others have to beat
    runs["b"] = points(12 * [2.0], reason="x is the warm-up's")
    assert table(runs, "acc", "u").winner == "a"


def test_losses_on_data_sources_get_no_verdict() -> None:
    """They are those of the x that each method trained its weights with. How far θ is from a known
    mixture is judged, and so is the loss of a model that was tuned on the result."""
    judged = ("recovery_error", "tuned_test_loss")

    def of(values: list[float], method: str = "m", reason: str = UNJUDGED) -> list[Point]:
        more = {"reason": reason, "reasons": dict.fromkeys(judged, "")}
        return [
            evolve(point, metrics=dict.fromkeys(("test_loss", *judged), point.metrics["acc"]))
            for point in points(3 * values, method, **more)
        ]

    runs = {"a": of(A), "b": of(B), "u": of([0.7, 0.71, 0.72, 0.7], "uniform")}
    unjudged = [
        runs["a"][0].why_unranked(name) for name in (*judged, "test_loss", "test_perplexity")
    ]
    assert [reason == "" for reason in unjudged] == [True, True, False, False]
    losses = table(runs, "test_loss", "u", higher_is_better=True)
    assert losses.winner is losses.floor is losses.forest is None
    assert {(row.notes, row.ahead_of_floor) for row in losses.rows} == {((), None)}
    told = [table(runs, metric, "u", higher_is_better=True) for metric in judged]
    assert [(it.winner, it.remarks) for it in told] == [("a", [])] * 2
    runs["a"] = of(A, reason="x is the warm-up's")  # θ is θ, however x was trained
    assert table(runs, "recovery_error", "u", higher_is_better=True).winner == "a"


@pytest.mark.parametrize(("gap", "note"), [(-0.241, "better"), (0.241, "worse"), (0.0, "equal")])
def test_a_difference_without_a_spread_is_exact_and_not_called_chance(
    gap: float, note: str
) -> None:
    """A deterministic method at 0.005 beside 0.246 of uniform, lower is better, in every seed."""
    runs = {"mine": points([0.246 + gap] * 10), "uniform": points([0.246] * 10, "uniform")}
    result = table(runs, "acc", "uniform", higher_is_better=False)
    row = by_label(result)["mine"]
    assert [text.split()[0] for text in row.notes] == [note]
    better = note == "better"
    assert (row.ahead_of_floor, result.winner) == (better, "mine" if better else None)
    assert result.columns[0]["− uniform"].endswith("(exact)")


@pytest.mark.parametrize(("spent", "noted"), [(1.05, False), (5.5, True)])
def test_spending_more_than_the_budget_is_noted_and_gets_no_star(spent: float, noted: bool) -> None:
    values = [0.5, 0.6, 0.55, 0.52, 0.58] * 2
    low = points([value - 0.2 + 0.01 * (seed % 3) for seed, value in enumerate(values)])
    result = table({"mine": points(values, spent=spent), "low": low}, "acc")
    assert result.winner == (None if noted else "mine")
    assert ("spent 5.5 times the budget" in result.rows[0].notes) is noted


def test_a_column_is_there_only_if_some_row_has_it_and_in_percent_if_it_is_a_share() -> None:
    usual = ["outer steps", "oracle calls", "seconds"]
    runs = {"u": points(A[:1], "uniform"), "b": points(B[:1])}
    columns = table(runs, "acc", "u", failed={"c": [0]}).columns
    assert list(columns[0]) == ["method", "role", "acc ↑", "− u", *usual, "note"]
    assert list(table({"u": points(A)}, "acc", "u").columns[0]) == ["method", "acc ↑", *usual]
    runs["b"] = points(B, compile_seconds=27.5)
    assert [row["compile seconds"] for row in table(runs, "acc").columns] == ["27.5", "0"]
    for value, heading, shown in (
        (0.75, "test accuracy (%) ↑", "75.00"),
        (75, "test accuracy ↑", "75"),
    ):
        point = evolve(points([0])[0], metrics={"test_accuracy": value})
        assert table({"m": [point]}, "test_accuracy").columns[0][heading] == shown


def test_a_table_is_shown_in_lines_and_given_as_plain_values() -> None:
    runs = {
        "a": points([0.9, 0.92, 0.91]),
        "u": points([0.5, 0.52, 0.54], "validation-only", "floor"),
        "top": points([0.99, 0.98, 0.97], role="ceiling", method="oracle-joint"),
        "lost": points([math.nan] * 3),
    }
    results = table(runs, "acc", "u", task="bowl", failed={"lost": [3]})
    heading, *lines = str(results).splitlines()
    assert re.match(r"method +role +acc ↑ +− u", heading)
    assert [line.split()[0] for line in lines] == ["a", "lost", "─" * len(lines[2]), "u", "top"]
    assert FAILED in results.remarks
    given = {row["method"]: row for row in results.as_dict()["methods"]}
    share = given["a"]["recovered"]["value"]
    assert share == pytest.approx((0.91 - 0.52) / (0.98 - 0.52))
    assert given["lost"]["metrics"]["acc"] is None
