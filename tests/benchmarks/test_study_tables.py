"""docs/explanation/where-n-pays.md: its tables are those of the records, and its rule is the one
that it states.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from support.helpers import load_script

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]


study = load_script("hgms_study_tables", ROOT / "benchmarks" / "study" / "tables.py")
PAGE = study.PAGE.read_text(encoding="utf-8")


def test_every_table_on_the_page_is_what_the_records_make() -> None:
    assert study.page(PAGE) == PAGE
    assert sorted(match[1] for match in study.MARKED.finditer(PAGE)) == sorted(study.TABLES)


@pytest.mark.parametrize("name", ["closed", "minima", "cleaning", "imbalanced"])
def test_labels_of_a_grid_differ_in_their_candidates_alone(name: str) -> None:
    text = (ROOT / "benchmarks" / "study" / f"{name}.toml").read_text(encoding="utf-8")
    grid = tomllib.loads(text)
    assert {task.get("label", task["name"]) for task in grid["task"]} <= study.METRICS.keys()
    labels = [(method["label"], method["generator"]["count"]) for method in grid["method"]]
    assert labels == [(label, int(label.split("-")[1])) for label in study.LABELS]
    rest = [(method["hypergradient"], method["outer"]) for method in grid["method"]]
    assert rest == len(rest) * rest[:1]


def kept(monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]) -> dict[str, Any]:
    """The verdicts on one task (less is better) with these values; all others are without
    records.
    """
    monkeypatch.setattr(study, "values", lambda task, equal: values if task == "sphere-1" else {})
    return {test.label: test for test in study.tests("time", images=False)}


def test_the_rule_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = [0.01 * ((7 * seed) % 10) for seed in range(10)]
    other = noise[:1] + noise[:0:-1]

    def shifted(by: float, errors: list[float]) -> dict[int, float]:
        return {seed: by + error for seed, error in enumerate(errors)}

    values = {label: shifted(1, other) for label in study.LABELS} | {
        "n-1": shifted(1, noise),
        "n-1-restart": shifted(0.5, noise),
        "diverse-8": shifted(0.2, other),  # better than both
        "diverse-4": shifted(0.7, other),  # better than one branch, not than restarts
        "diverse-2": shifted(1.5, other),  # worse
        "shared-2": shifted(0.9, noise),  # the same difference in every seed
        "shared-4": shifted(1 + 1e-9, noise),  # rounding
    }
    found = kept(monkeypatch, values)
    words = {label: test.verdict for label, test in found.items()}
    assert words == {
        "shared-2": "helps",
        "shared-4": "–",
        "shared-8": "–",
        "shared-16": "–",
        "diverse-2": "costs",
        "diverse-4": "helps",
        "diverse-8": "**pays**",
        "diverse-16": "–",
    }
    assert [label for label, test in found.items() if test.same] == ["shared-2"]
    both = [[values[label][seed] for seed in range(10)] for label in ("diverse-8", "n-1")]
    assert found["diverse-8"].chances[0] == pytest.approx(stats.ttest_rel(*both).pvalue, rel=1e-6)
    assert found["diverse-8"].first.mean == pytest.approx(0.8, abs=1e-9)


def test_holm_s_rule_is_over_all_tests_of_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """A p-value of 0.01 is enough for one test, and not for eight."""
    values = {label: {seed: float((7 * seed) % 10) for seed in range(10)} for label in study.LABELS}
    values["diverse-8"] = {
        seed: value - 1 + (seed - 4.5) * 0.33 for seed, value in values["n-1"].items()
    }
    test = kept(monkeypatch, values)["diverse-8"]
    assert 0.05 / 8 < test.chances[0] < 0.05
    assert test.verdict == "–"


def test_equal_updates_and_equal_calls_are_read_from_the_curves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def points(label: str, calls: int, values: list[float]) -> list[dict[str, Any]]:
        own = {"task": "sphere-1", "method": label, "seed": 0}
        spent = [float("nan"), *(float(calls * step) for step in range(1, len(values)))]
        return [
            {**own, "step": step, "oracle_calls": spent[step], "metric.upper_gap": value}
            for step, value in enumerate(values)
        ]

    curves = points("n-1", 10, [9.0, 8.0, 7.0, 6.0, 5.0]) + points("diverse-2", 25, [9.0, 4.0, 3.0])
    rows = [{**row, "status": "done"} for row in curves if row["step"] == 0]
    monkeypatch.setattr(study, "records", lambda name: curves if name.endswith("curves") else rows)
    # two updates
    assert study.values("sphere-1", "updates") == {"n-1": {0: 7.0}, "diverse-2": {0: 3.0}}
    # forty calls
    assert study.values("sphere-1", "calls") == {"n-1": {0: 5.0}, "diverse-2": {0: 4.0}}
