"""Forest plots: what they show, and where it stands."""

from __future__ import annotations

from support.helpers import rejects

import hgms.report as report
from hgms.results import Point, table
from hgms_core import ConfigError


def test_a_table_draws_its_differences_best_first_and_marks_the_winner() -> None:
    def points(mean: float) -> list[Point]:
        given = {"outer_steps": 1, "oracle_calls": 1, "seconds": 1.0}
        values = [mean + 0.001 * (seed % 3 - 1) * mean for seed in range(10)]
        return [Point(seed=i, metrics={"accuracy": v}, **given) for i, v in enumerate(values)]

    runs = {"<b>bad</b>": points(0.5), "good": points(0.9), "uniform": points(0.7)}
    results = table(runs, "accuracy", "uniform", task="task & more")
    assert results.forest is not None
    assert list(results.forest.differences) == ["good", "uniform", "<b>bad</b>"]
    assert results.forest.spell("good").startswith("+20.00 ± ")
    assert "percentage points" in results.forest.caption
    figure = report.plot_forests([results.forest, None])
    [axis] = figure.axes
    assert axis.get_title(loc="left") == results.forest.title
    assert [label.get_text() for label in axis.get_yticklabels()][-1] == "good ★"
    with rejects("nothing-to-do", of=ConfigError):
        report.plot_forests([None])
