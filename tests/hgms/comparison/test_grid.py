"""Grids: what a file or flags come to, and everything that can be wrong with them, all in one
message.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.helpers import rejects

from hgms.comparison.grid import Grid
from hgms.comparison.grid_file import load
from hgms.config import Budget
from hgms_core import ConfigError
from hgms_core.errors import ErrorGroup

pytestmark = pytest.mark.usefixtures("bowl")

TEXT = """
budget = "4 steps"
seeds = 3

[run]
out = "results"

[[task]]
name = "bowl"

[[task]]
name = "bowl"
label = "wide"
rows = 9

[[method]]
name = "walk"

[[method]]
name = "walk"
label = "quick"
move.lr = 0.3
on.wide.move.lr = 0.2
"""


NAMES = ("sets", "tasks", "methods", "options")


def grid(text: str = TEXT, **changes: Any) -> Grid:
    names = {key: changes.pop(key) for key in NAMES if key in changes}
    return load({**tomllib.loads(text), **changes}, source="grid.toml", **names)


def test_cells_go_seed_by_seed_with_labels_in_their_folders() -> None:
    loaded = grid()
    cells = loaded.cells()
    pairs = [(task, method) for task in ("bowl", "wide") for method in ("walk", "quick")]
    assert [(cell.config.seed, cell.task, cell.method) for cell in cells] == [
        (seed, *pair) for seed in range(3) for pair in pairs
    ]
    assert len({cell.path for cell in cells}) == 12
    quick = cells[1].config
    assert cells[1].path == Path("results", "bowl", f"quick-{quick.config_hash}", "seed-0")
    assert (quick.run.label, quick.run.task_label, loaded.reference) == ("quick", None, "walk")
    assert loaded.metrics == {"bowl": "distance", "wide": "distance"}


def test_labels_and_tables_of_later_stages_change_no_run_and_labels_narrow_the_grid() -> None:
    assert grid(sample={"size": 3}, finetune={}) == grid()
    labelled = grid(method=[{"name": "walk", "label": "w"}]).pairs["bowl", "w"]
    assert labelled.config_hash == grid().pairs["bowl", "walk"].config_hash
    narrowed = grid(tasks=["wide"], methods=["quick"])
    assert (list(narrowed.pairs), narrowed.reference) == ([("wide", "quick")], "quick")


def test_settings_reach_all_of_a_kind_one_label_or_the_rest() -> None:
    pairs = grid().pairs
    rates = {pair: config.method.move.lr for pair, config in pairs.items() if "wide" in pair}
    assert rates == {("wide", "walk"): 0.1, ("wide", "quick"): 0.2}
    sets = ["task.rows=7", "quick.noise=0.0", "run.dtype=float64", "budget=9 calls"]
    loaded = grid(sets=[*sets, "method.pause=0.5"])
    configs = loaded.pairs.values()
    assert [config.task.rows for config in configs] == [7] * 4
    assert [(it.method.noise, it.method.pause) for it in configs] == [(0.05, 0.5), (0.0, 0.5)] * 2
    assert (loaded.run.dtype, loaded.budget) == ("float64", Budget(oracle_calls=9))


FILE = "grid.toml"


@pytest.mark.parametrize(
    ("changes", "code", "place"),
    [
        ({"budget": "0 s"}, "out-of-range", (FILE, "budget", "seconds")),
        ({"budget": 60}, "wrong-type", (FILE, "budget")),
        ({"budget": "60"}, "wrong-budget", (FILE, "budget")),
        ({"seeds": 0}, "out-of-range", (FILE, "seeds")),
        ({"seeds": [1, 2, 1]}, "wrong-value", (FILE, "seeds")),
        ({"seeds": []}, "missing-option", (FILE, "seeds")),
        ({"seeds": [1, -2]}, "out-of-range", (FILE, "seeds")),
        ({"budgets": "4 steps"}, "unknown-option", (FILE, "budgets")),
        ({"task": ["bowll"]}, "unknown-task", (FILE, "task", "bowll", "name")),
        ({"method": ["wlak"]}, "unknown-method", (FILE, "method", "wlak", "name")),
        ({"method": ["walk", "walk"]}, "duplicate-label", (FILE, "method")),
        ({"method": [{"label": "x"}]}, "missing-option", (FILE, "method", 0, "name")),
        ({"method": [3]}, "wrong-type", (FILE, "method", 0)),
        (
            {"method": ["walk", {"name": "walk", "label": "a/b"}]},
            "wrong-value",
            (FILE, "method", 1, "label"),
        ),
        (
            {"method": [{"name": "walk", "label": "task"}]},
            "reserved-label",
            (FILE, "method", 0, "label"),
        ),
        (
            {"method": [{"name": "walk", "on": {"wied": {"noise": 0.1}}}]},
            "unknown-task",
            (FILE, "method", "walk", "on", "wied"),
        ),
        (
            {"method": [{"name": "walk", "on": {"wide": {"nois": 0.1}}}]},
            "unknown-option",
            (FILE, "method", "walk", "on", "wide", "nois"),
        ),
        ({"method": [{"name": "walk", "on": 3}]}, "wrong-type", (FILE, "method", 0, "on")),
        (
            {"task": [{"name": "bowl", "on": {"bowl": {"rows": 3}}}], "method": ["walk"]},
            "not-supported",
            (FILE, "task", "bowl", "on"),
        ),
        (
            {"task": [{"name": "bowl", "rows": 0}], "method": ["walk"]},
            "wrong-value",
            (FILE, "task", "bowl", "rows"),
        ),
        ({"method": ["needy"]}, "not-supported", (FILE, "method", "needy")),
        ({"metric": "distanc"}, "unknown-metric", (FILE, "metric")),
        ({"reference": "wlk"}, "unknown-method", (FILE, "reference")),
        ({"run": {"device": "gpu"}}, "wrong-value", (FILE, "run", "device")),
        ({"run": {"label": "x"}}, "not-supported", (FILE, "run", "label")),
        ({"sets": ["wlak.noise=1"]}, "unknown-label", ("--set wlak.noise=1",)),
        ({"sets": ["noise"]}, "wrong-format", ("--set noise",)),
        ({"sets": ["noise=0.1"]}, "ambiguous-setting", ("--set noise=0.1",)),
        ({"tasks": ["wied"]}, "unknown-task", (FILE, "task")),
        ({"sweep": {"trials": 3}}, "unknown-option", (FILE, "sweep")),
        ({"sets": ["task.name=wide"]}, "not-supported", ("--set task.name=wide",)),
        ({"sets": ["walk.name=needy"]}, "not-supported", ("--set walk.name=needy",)),
        (
            {"method": [{"name": "walk", "on": {"wide": {"name": "needy"}}}]},
            "not-supported",
            (FILE, "method", "walk", "on", "wide", "name"),
        ),
        (
            {"method": [{"name": "walk", "label": "m" * 300}]},
            "too-large",
            (FILE, "method", 0, "label"),
        ),
    ],
)
def test_what_is_wrong_is_said(
    changes: dict[str, Any], code: str, place: tuple[str | int, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        grid(**changes)
    assert (code, place) in [(error.code, error.place) for error in caught.value.errors]


def test_the_place_of_a_value_of_the_command_line_is_its_option() -> None:
    with rejects("several-errors", of=ErrorGroup) as caught:
        grid(budget="5x", seeds=0, reference="nobody", metric="m", options=("seeds", "reference"))
    assert {error.place for error in caught.value.errors} == {
        ("--seeds",),
        ("--reference",),
        (FILE, "budget"),
        (FILE, "metric"),
    }


def test_everything_wrong_is_said_at_once() -> None:
    with rejects("several-errors", of=ErrorGroup) as caught:
        grid(
            budget="0 s",
            seeds=0,
            task=["bowl", "bowll"],
            method=["needy", {"name": "walk", "noise": "loud"}, "wlak"],
            reference="nobody",
            metric="m",
        )
    assert {(error.code, error.place) for error in caught.value.errors} == {
        ("out-of-range", (FILE, "budget", "seconds")),
        ("out-of-range", (FILE, "seeds")),
        ("unknown-task", (FILE, "task", "bowll", "name")),
        ("unknown-method", (FILE, "method", "wlak", "name")),
        ("wrong-type", (FILE, "method", "walk", "noise")),
        ("not-supported", (FILE, "method", "needy")),
        ("unknown-method", (FILE, "reference")),
        ("unknown-metric", (FILE, "metric")),
    }
    assert len(caught.value.errors) == 8
