"""Published figures beside ours: every method has an entry, the tables are those of the file and
the records, marks by hand.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from test_benchmark_tables import tables

from hgms.plugins import Registry

pytestmark = pytest.mark.extended

published = tables.published_figures


def test_every_method_has_figures_or_a_reason_why_there_is_none() -> None:
    table = published.entries()
    methods = Registry.load().components("method")
    learn = {each.name for each in methods if not getattr(each.target, "role", "")}
    assert learn <= published.methods()
    assert all(none["why"] for none in table["none"])


def test_the_front_page_holds_the_table_of_the_records() -> None:
    assert tables.FRONT.read_text(encoding="utf-8") == tables.front_page()


RUNS = [
    {"task": "t", "method": "a", "seed": seed, "metric.accuracy": 0.89 + 0.01 * seed}
    for seed in range(3)
]
PROTOCOL = {
    "metric": "accuracy (%)",
    "records": ["gone", "there"],
    "label": "t",
    "ours": "accuracy",
}


def records(name: str) -> list[dict[str, Any]]:
    return {"there": RUNS}.get(name, [])


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
    _, mine = published.ours({"method": "a", **figure}, PROTOCOL, records)
    assert (mine.mean, mine.half_width) == pytest.approx((90.0, 4.302653 / math.sqrt(3)))
    assert published.mark(published.published(figure), mine, PROTOCOL | more) == mark


def test_a_cell_of_the_paper_has_a_line_per_variant_with_runs() -> None:
    runs = [
        {
            "task": "cleaning-0.4, budget 312 outer steps",
            "method": "hg-ms",
            "metric.test_accuracy": 0.86 + 0.01 * seed,
            "metric.train_accuracy": 0.83 + 0.01 * seed,
        }
        for seed in range(3)
    ]
    records = {"cleaning-moments": runs, "cleaning-restarts": runs[:1]}
    lines = published.cells(lambda name: records.get(name, []))
    assert len({(task, method) for task, method, *_ in lines}) == 20
    single, several = (line for line in lines if line[2] != "not run")
    assert single[2:] == [
        "new lower state in every step",
        "86.98 ± 1.02",
        "86.00",
        "one seed",
        "89.00 ± 1.60",
        "83.00",
        "one seed",
    ]
    assert several == [
        "cleaning-0.4",
        "`hg-ms`",
        "new moments in every step",
        "86.98 ± 1.02",
        "87.00 ± 2.48",
        "reproduced",
        "89.00 ± 1.60",
        "84.00 ± 2.48",
        "below",
    ]
