"""References that a grid adds by itself: which, in which forms, where they fit."""

from __future__ import annotations

from typing import Any

import pytest

from hgms.comparison import load
from hgms.facts import innermost

pytestmark = pytest.mark.usefixtures("one_registry")

REFERENCES = [
    "oracle-clean",
    "oracle-joint",
    "random-theta",
    "uniform",
    "uniform-online",
    "uniform-tilted",
    "validation-only",
]


def kept(method: Any) -> str:
    """``keep`` of a method with or without this field."""
    while not hasattr(method, "keep") and hasattr(method, "method"):
        method = method.method
    return str(getattr(method, "keep", "last"))


def both(names: list[str]) -> list[str]:
    return [f"{name}{form}" for name in names for form in ("", "-last")]


CLEANING = {"name": "hyper-cleaning", "dataset": "digits"}
TABLE = {"budget": "1 step", "seeds": 1, "references": True, "task": [CLEANING]}


def test_all_references_in_both_forms_where_they_fit() -> None:
    """Those that a person configured keep that in their other form."""
    methods = [
        "hg-ms",
        {"name": "uniform", "generator": {"steps": 7}},
        {"name": "oracle-clean", "keep": "last", "label": "told"},
    ]
    grid = load({**TABLE, "method": methods})
    added = both([name for name in REFERENCES if name not in ("uniform", "oracle-clean")])
    # rows of data sources at random: no keep, so one form, and no task of this grid has sources
    added.insert(added.index("random-theta"), "random-rows")
    labels = [method.label for method in grid.methods]
    assert labels == ["hg-ms", "uniform", "told", *added, "uniform-last"]
    configs = {label: config for (_, label), config in grid.pairs.items()}
    assert ("random-rows" in configs, grid.left_out) == (False, [])
    assert {configs.pop("hg-ms").role, *(it.role for it in configs.values())} == {
        "",
        "floor",
        "ceiling",
    }
    steps = [
        innermost(configs[form].method).generator.generator.steps
        for form in ("uniform", "uniform-last")
    ]
    assert steps == [7, 7]
    assert {label: kept(config.method) for label, config in configs.items()} == {
        label: "last" if label.endswith("-last") or label == "told" else "best" for label in configs
    }


def test_a_reference_that_does_not_fit_a_task_is_left_out_there_and_said() -> None:
    table = {**TABLE, "task": [CLEANING, "sphere"], "method": ["hg-ms"]}
    two = load(table, sets=["uniform-last.generator.steps=9"])
    on_sphere = {label for task, label in two.pairs if task == "sphere"}
    assert on_sphere == {"hg-ms", *both(["random-theta", "uniform", "uniform-tilted"])}
    last: Any = innermost(two.pairs["sphere", "uniform-last"].method)
    assert (last.generator.generator.steps, len(two.left_out)) == (9, 2)
    assert "references left out on sphere: validation-only, validation-only-last" in two.left_out[1]


def test_baselines_take_the_settings_for_all_methods_that_they_have() -> None:
    """`validation-only` has no generator of its own, and uniform has."""
    table = {"budget": "1 step", "task": "quadratic", "method": "hg-implicit", "baselines": True}
    loaded = load(table, sets=["method.generator.steps=7"])
    methods = {label: config.method for (_, label), config in loaded.pairs.items()}
    assert list(methods) == ["hg-implicit", "uniform", "validation-only", "uniform-tilted"]
    assert innermost(methods["uniform"]).generator.generator.steps == 7
    assert innermost(methods["validation-only"]).generator.generator.steps != 7
