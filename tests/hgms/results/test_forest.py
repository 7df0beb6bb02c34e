"""Forest plots: what they show, and where it stands."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from support.helpers import rejects

import hgms.report as report
from hgms.results import Forest, Interval, Point, table
from hgms_core import ConfigError


def forest(values: dict[str, Interval], reference: str | None = "base") -> Forest:
    """A forest of differences to "base"."""
    pairs = {(label, "base"): value for label, value in values.items()}
    pairs |= {
        ("base", label): Interval(-value.mean, value.half_width, value.count)
        for label, value in values.items()
    }
    options: dict[str, Any] = {"title": "task", "metric": "loss", "share": False}
    made = Forest.of(pairs, [*values, "base"], reference, **options, higher=False, winner=None)
    assert made is not None
    assert Forest.of({}, ["a"], None, **options, higher=None, winner=None) is None
    return made


def marks(page: str, label: str) -> dict[str, float]:
    """Where the parts of a row stand, in percent of the axis."""
    [row] = [row for row in page.split("<tr")[1:] if f"</i>{label}<" in row]
    found = re.findall(r'<i class="(zero|bar|dot|beyond)" style="left: ([-\d.]+)', row)
    return {kind: float(place) for kind, place in found}


def test_dots_and_bars_stand_at_their_numbers() -> None:
    made = forest({"a": Interval(-2.0, 1.0, 3), "b": Interval(1.0, 0.5, 3)})
    low, high = made.limits
    assert low < -3
    assert high > 1.5
    page = made.html()
    for label, mean, half in (("a", -2.0, 1.0), ("b", 1.0, 0.5)):
        expected = {"dot": mean, "bar": mean - half, "zero": 0.0}
        assert {kind: marks(page, label)[kind] for kind in expected} == pytest.approx(
            {kind: 100 * (value - low) / (high - low) for kind, value in expected.items()}, abs=0.01
        )
    assert set(made.ticks) == {-3.0, -2.0, -1.0, 0.0, 1.0}
    without = forest({"a": Interval(-2.0, 1.0, 3)}, reference=None)
    assert (without.reference, without.differences["base"]) == ("a", Interval(2.0, 1.0, 3))


@pytest.mark.parametrize(
    "values",
    [
        {"a": Interval(0.0, 0.0, 3)},
        {"a": Interval(1e-300, math.nan, 1)},
        {"a": Interval(-1.0, 0.2, 3), "b": Interval(0.5, 0.3, 3), "c": Interval(400.0, 90.0, 3)},
        {"a": Interval(math.nan, math.nan, 0), "b": Interval(1.0, math.nan, 1)},
        {
            "a": Interval(1e300, 1e300, 2),
            "b": Interval(-1.0, math.inf, 2),
            "c": Interval(1.0, 1.0, 2),
        },
    ],
    ids=[
        "nothing moved",
        "tiny, one seed",
        "one far off",
        "no seed in common",
        "huge and infinite",
    ],
)
def test_odd_numbers_are_drawn_too(values: dict[str, Interval]) -> None:
    made = forest(values)
    low, high = made.limits
    assert -math.inf < low <= 0 <= high < math.inf
    assert low < high
    assert 0 < len(made.ticks) < 20
    page = made.html()
    assert not re.search("(nan|inf)%", page)
    # a method far off has an arrow, and does not set the axis
    assert ('class="beyond"' in page) is ("c" in values)


def test_a_table_draws_its_differences_best_first_and_marks_the_winner() -> None:
    def points(mean: float) -> list[Point]:
        given = {"outer_steps": 1, "oracle_calls": 1, "seconds": 1.0}
        values = [mean + 0.001 * (seed % 3 - 1) * mean for seed in range(10)]
        return [Point(seed=i, metrics={"accuracy": v}, **given) for i, v in enumerate(values)]

    runs = {"<b>bad</b>": points(0.5), "good": points(0.9), "uniform": points(0.7)}
    results = table(runs, "accuracy", "uniform", task="task & more")
    assert results.forest is not None
    assert list(results.forest.differences) == ["good", "uniform", "<b>bad</b>"]
    page = results._repr_html_()
    for part in ("good ★", 'class="won"', "task &amp; more", "+20.00 ± ", "percentage points"):
        assert part in page
    assert not re.search(r"<b>bad|https?:|<script|<link|@import|url\(", page)
    assert len(repr(results).splitlines()) < 10
    assert report.plot_forests([results.forest, None], "plotly")
    with rejects("nothing-to-do", of=ConfigError):
        report.plot_forests([None])
    with rejects("unknown-choice", "backend", of=ConfigError):
        report.plot_forests([results.forest], "plotli")  # type: ignore[arg-type]
