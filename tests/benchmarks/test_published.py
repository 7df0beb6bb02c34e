"""Published figures beside ours: every method has an entry, the tables are those of the file and
the records, marks by hand.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from test_benchmark_tables import tables

from hgms.results.statistics import Interval
from hgms_core.registry import Registry

pytestmark = pytest.mark.extended

published = tables.published


@pytest.fixture(scope="module")
def roles() -> dict[str, str]:
    return {
        component.name: getattr(component.target, "role", "")
        for component in Registry.load().components("method")
    }


def test_every_method_has_figures_that_say_what_was_run_or_a_reason_why_there_is_none(
    roles: dict[str, str],
) -> None:
    table = published.entries()
    figures = {figure["method"] for figure in table["figure"]}
    without = [name for none in table["none"] for name in none["methods"]]
    assert {name for name, role in roles.items() if not role} <= published.methods()
    assert len(without) == len(set(without) - figures)
    assert all(none["why"] for none in table["none"])
    for figure in table["figure"]:
        protocol = table["protocol"][figure["protocol"]]
        assert ("value" in figure) != ("seeds" in figure)
        assert all(protocol[key] for key in ("task", "metric", "interval", "source"))
        assert ("records" in protocol) + ("not_run" in protocol) + ("measured" in figure) == 1
        assert "records" not in protocol or {"label", "ours"} <= set(protocol)
    assert {figure["protocol"] for figure in table["figure"]} == set(table["protocol"])


def test_readmes_hold_the_tables_of_the_file_and_the_records(roles: dict[str, str]) -> None:
    assert tables.stale_readmes() == []
    for path, methods in tables.readmes().items():
        assert tables.FIGURES.search(path.read_text(encoding="utf-8")) or all(
            roles[name] for name in methods
        ), path
    assert any(path.parent.name == "penalty" for path in tables.readmes())


RUNS = [
    {"task": "t", "method": "a", "seed": seed, "metric.accuracy": 0.89 + 0.01 * seed}
    for seed in range(3)
]
CURVE = [
    {**row, "metric.accuracy": value}
    for row, value in zip(RUNS[:1] * 3, (0.5, 0.95, 0.9), strict=True)
]
PROTOCOL = {
    "metric": "accuracy (%)",
    "records": ["gone", "there"],
    "label": "t",
    "ours": "accuracy",
}


def records(name: str) -> list[dict[str, Any]]:
    return {"there": RUNS, "there.curves": CURVE}.get(name, [])


@pytest.mark.parametrize(
    ("figure", "more", "mark"),
    [
        ({"value": 88.0}, {}, "reproduced"),  # ours is 90 ± 2.48
        ({"value": 87.0}, {}, "above"),
        ({"value": 93.0}, {}, "below"),
        ({"value": 93.0, "half_width": 2.0}, {}, "reproduced"),  # √(2.48² + 2²) = 3.19
        ({"seeds": [92.9, 93.0, 93.1]}, {}, "below"),
        ({"value": 90.0}, {"differs": "the rates"}, "not the same protocol"),
    ],
)
def test_the_mark_is_by_the_interval_of_the_difference(
    figure: dict[str, Any], more: dict[str, Any], mark: str
) -> None:
    name, mine = published.ours({"method": "a", **figure}, PROTOCOL, records)
    assert (name, mine.mean, mine.count) == ("`there`", pytest.approx(90.0), 3)
    assert mine.half_width == pytest.approx(4.302653 / math.sqrt(3))
    assert published.mark(published.published(figure), mine, PROTOCOL | more) == mark


def test_the_best_over_a_run_is_that_of_its_curve_and_what_has_no_record_is_not_run() -> None:
    _, mine = published.ours({"method": "a", "value": 95.0}, PROTOCOL | {"best": True}, records)
    assert (mine.mean, mine.count) == (95.0, 1)
    assert published.ours({"method": "b", "value": 1.0}, PROTOCOL, records) is None
    why = {"not_run": "needs a GPU"}
    marks = [published.mark(Interval(1.0, math.nan, 1), None, how) for how in (PROTOCOL, why)]
    assert marks == ["not run", "not run: needs a GPU"]
