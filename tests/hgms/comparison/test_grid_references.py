"""References that a grid adds by itself: which, in which forms, where they fit."""

from __future__ import annotations

from typing import Any

from support.helpers import rejects

from hgms.comparison import load
from hgms.methods.inner import innermost

REFERENCES = [
    "oracle-clean",
    "oracle-joint",
    "random-theta",
    "uniform",
    "uniform-online",
    "uniform-tilted",
    "validation-only",
]


def both(names: list[str]) -> list[str]:
    return [f"{name}{form}" for name in names for form in ("", "-last")]


def test_all_references_in_both_forms_where_they_fit() -> None:
    """Those that a person configured keep that in their other form; what does not fit a task is
    left out there, and said; nothing is said of a reference for data sources where there are none.
    """
    cleaning = {"name": "hyper-cleaning", "dataset": "digits"}
    methods = [
        "hg-ms",
        {"name": "uniform", "generator": {"steps": 7}},
        {"name": "oracle-clean", "keep": "last", "label": "told"},
    ]
    table = {
        "budget": "1 step",
        "seeds": 1,
        "references": True,
        "task": [cleaning],
        "method": methods,
    }
    grid = load(table)
    named = ["hg-ms", "uniform", "told"]
    added = both([name for name in REFERENCES if name not in ("uniform", "oracle-clean")])
    # rows of data sources at random: no keep, so one form, and no task of this grid has sources
    added.insert(added.index("random-theta"), "random-rows")
    assert [method.label for method in grid.methods] == [*named, *added, "uniform-last"]
    configs = {label: config for (_, label), config in grid.pairs.items()}
    kept = {
        label: innermost(config.method).keep
        for label, config in configs.items()
        if label != "hg-ms"
    }
    assert kept == {
        label: "last" if label.endswith("-last") or label == "told" else "best" for label in kept
    }
    assert (
        configs["uniform-last"].method.generator.steps
        == configs["uniform"].method.generator.steps
        == 7
    )  # type: ignore[attr-defined]
    assert {config.role for label, config in configs.items() if label != "hg-ms"} == {
        "floor",
        "ceiling",
    }
    assert grid.left_out == []
    assert all(label != "random-rows" for _, label in grid.pairs)

    two = load(
        {**table, "task": [cleaning, "sphere"], "method": ["hg-ms"]},
        sets=["uniform-last.generator.steps=9"],
    )
    on_sphere = {label for task, label in two.pairs if task == "sphere"}
    assert on_sphere == {"hg-ms", *both(["random-theta", "uniform", "uniform-tilted"])}
    last: Any = two.pairs["sphere", "uniform-last"].method
    assert last.generator.steps == 9
    assert len(two.left_out) == 2
    assert "references left out on sphere: validation-only, validation-only-last" in two.left_out[1]
    assert (
        load({**table, "references": False}).methods
        == load({**table, "references": False}, sets=["seeds=1"]).methods
    )


def test_a_task_without_rows_refuses_what_trains_on_them() -> None:
    table = {"budget": "1 step", "seeds": 1, "task": ["sphere"], "method": ["validation-only"]}
    with rejects("not-supported", "method", "validation-only") as caught:
        load(table)
    assert "validation rows" in caught.value.message


def test_the_other_form_is_that_of_the_task() -> None:
    """On data sources `uniform` keeps the last state by default: there its other form keeps the
    best one.
    """
    mixture = {
        "name": "source-mixture",
        "sources": {"a": "a.jsonl", "b": "b.jsonl"},
        "validation": {"all": "v.jsonl"},
        "model": {"config": {"model_type": "gpt2"}, "tokenizer": "bytes"},
    }
    cleaning = {"name": "hyper-cleaning", "dataset": "digits"}
    table = {
        "budget": "1 step",
        "seeds": 1,
        "references": True,
        "task": [mixture, cleaning],
        "method": ["uniform"],
    }
    for sets, named, other in ([], "last", "best"), (["uniform.keep=best"], "best", "last"):
        on_sources, on_rows = (
            {
                label: config
                for (task, label), config in load(table, sets=sets).pairs.items()
                if task == name
            }
            for name in ("source-mixture", "hyper-cleaning")
        )
        assert [label for label in on_sources if label.removesuffix(f"-{other}") == "uniform"] == [
            "uniform",
            f"uniform-{other}",
        ]
        assert (
            innermost(on_sources["uniform"].method).keep,
            innermost(on_sources[f"uniform-{other}"].method).keep,
        ) == (named, other)
        assert innermost(on_rows["uniform"].method).keep == "best"
        assert "uniform-last" in on_rows
        assert "uniform-best" not in on_rows


def test_baselines_take_the_settings_for_all_methods_that_they_have() -> None:
    """`validation-only` has no generator of its own, and uniform has."""
    table = {"budget": "1 step", "task": "quadratic", "method": "hg-implicit", "baselines": True}
    loaded = load(table, sets=["method.generator.steps=7"])
    methods = {label: config.method for (_, label), config in loaded.pairs.items()}
    assert list(methods) == ["hg-implicit", "uniform", "validation-only", "uniform-tilted"]
    assert methods["uniform"].generator.steps == 7
    assert methods["validation-only"].method.generator.steps != 7
    assert loaded.reference == "uniform"
    assert [label for _, label in load({**table, "task": "sphere"}).pairs] == [
        "hg-implicit",
        "uniform",
    ]
    taken = {**table, "method": ["hg-implicit", {"name": "hg-ms", "label": "uniform"}]}
    assert load(taken).pairs["quadratic", "uniform"].method_name == "hg-ms"
