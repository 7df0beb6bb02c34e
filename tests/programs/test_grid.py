"""Grids: what a file or flags come to, and everything that can be wrong with them, all in one
message.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from hgms.comparison.grid import Grid
from hgms.comparison.grid_file import load
from hgms.comparison.space import Choices, Range, parse, points
from hgms_core import ConfigError
from hgms_core.budget import Budget

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


def grid(text: str = TEXT, **changes: Any) -> Grid:
    names = {key: changes.pop(key) for key in ("sets", "tasks", "methods") if key in changes}
    return load({**tomllib.loads(text), **changes}, source="grid.toml", **names)


def test_what_comes_after_the_runs_is_passed_over() -> None:
    assert grid(sample={"size": 3}, finetune={}, evaluate={"benchmarks": ["gsm8k"]}) == grid()
    with pytest.raises(ConfigError, match="did you mean"):
        grid(sed=3)


def test_cells_go_seed_by_seed_with_labels_in_their_folders() -> None:
    loaded = grid()
    cells = loaded.cells()
    assert [(cell.config.seed, cell.task, cell.method) for cell in cells[:5]] == [
        (0, "bowl", "walk"),
        (0, "bowl", "quick"),
        (0, "wide", "walk"),
        (0, "wide", "quick"),
        (1, "bowl", "walk"),
    ]
    assert len(cells) == 12
    assert len({cell.path for cell in cells}) == 12
    quick = cells[1].config
    assert cells[1].path == Path("results", "bowl", f"quick-{quick.config_hash}", "seed-0")
    assert (quick.run.label, quick.run.task_label) == ("quick", None)
    assert loaded.reference == "walk"
    assert loaded.metrics == {"bowl": "distance", "wide": "distance"}
    assert {cell.config.budget for cell in cells} == {Budget(outer_steps=4)}


def test_a_method_may_have_settings_for_one_task_only() -> None:
    pairs = grid().pairs
    assert [pairs[task, "quick"].method.move.lr for task in ("bowl", "wide")] == [0.3, 0.2]
    assert pairs["wide", "walk"].method.move.lr == 0.1


def test_labels_change_neither_hash_nor_result() -> None:
    plain = grid(method=["walk"])
    labelled = grid(method=[{"name": "walk", "label": "w"}])
    assert plain.pairs["bowl", "walk"].config_hash == labelled.pairs["bowl", "w"].config_hash


def test_sets_reach_all_of_a_kind_one_label_or_the_rest() -> None:
    loaded = grid(
        sets=[
            "task.rows=7",
            "quick.noise=0.0",
            "run.dtype=float64",
            "budget=9 calls",
            "method.pause=0.5",
        ]
    )
    assert [config.task.rows for config in loaded.pairs.values()] == [7] * 4
    assert [config.method.noise for config in loaded.pairs.values()] == [0.05, 0.0] * 2
    assert {config.method.pause for config in loaded.pairs.values()} == {0.5}
    assert (loaded.run.dtype, loaded.budget) == ("float64", Budget(oracle_calls=9))


def test_a_label_with_a_dot_can_be_named_by_set() -> None:
    loaded = grid(
        TEXT.replace('"wide"', '"wide-0.5"').replace("on.wide.", 'on."wide-0.5".'),
        sets=["wide-0.5.rows=7"],
    )
    assert {task: pair.task.rows for (task, _), pair in loaded.pairs.items()}["wide-0.5"] == 7
    assert next(pair.task.rows for (task, _), pair in loaded.pairs.items() if task == "bowl") != 7


def test_a_grid_can_be_narrowed_to_labels() -> None:
    assert list(grid(tasks=["wide"], methods=["quick"]).pairs) == [("wide", "quick")]
    assert grid(methods=["quick"]).reference == "quick"


def test_all_methods_of_a_seed_see_the_same_problem() -> None:
    by_seed: dict[int, list[Any]] = {}
    for cell in grid(tasks=["bowl"]).cells():
        by_seed.setdefault(cell.config.seed, []).append(
            cell.config.task.problem(cell.config.seed, torch.device("cpu"), torch.float64)
        )
    for first, second in by_seed.values():
        assert torch.equal(first.x0["x"], second.x0["x"])
        assert torch.equal(first.theta0["t"], second.theta0["t"])
        for role, part in first.upper_data.items():
            assert torch.equal(part.whole["t"], second.upper_data[role].whole["t"])
    assert not torch.equal(by_seed[0][0].x0["x"], by_seed[1][0].x0["x"])


SWEEP = {"trials": 3, "space": {"quick": {"move.lr": [0.1, 0.2, 0.4]}}}


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"budget": "0 s"}, ["must be > 0"]),
        ({"budget": 60}, ['expected a budget like "60s"', "got 60 @ grid.toml.budget"]),
        ({"budget": "60"}, ["cannot read the budget '60'"]),
        ({"budget": {"outer_steps": 0}}, ["'outer_steps' must be a whole number > 0: 0"]),
        ({"seeds": 0}, ["'seeds' must be a count > 0"]),
        ({"seeds": [1, 2, 1]}, ["'seeds' names a seed twice"]),
        ({"seeds": []}, ["'seeds' must not be empty"]),
        ({"seeds": [-1]}, ["'seeds' must be >= 0"]),
        ({"budgets": "4 steps"}, ["unknown key 'budgets'; did you mean 'budget'?"]),
        ({"task": ["bowll"]}, ["unknown task 'bowll'; did you mean 'bowl'?"]),
        ({"method": ["wlak"]}, ["unknown method 'wlak'; did you mean 'walk'?"]),
        ({"method": ["walk", "walk"]}, ["2 methods are called 'walk'", 'label = "walk-2"']),
        ({"task": ["bowl", "bowl"]}, ["2 tasks are called 'bowl'"]),
        ({"method": []}, ["no method is named"]),
        ({"method": [{"label": "x"}]}, ["the name of the method is missing", "available:"]),
        (
            {"method": [3]},
            ["expected a table with the name of a method, got 3 @ grid.toml.method[1]"],
        ),
        ({"method": [{"name": "walk", "label": "a/b"}]}, ["it names a folder"]),
        ({"method": [{"name": "walk", "label": "task"}]}, ["has a meaning of its own"]),
        ({"method": [{"name": "walk", "label": 3}]}, ["'label' must be a string: 3"]),
        (
            {"method": [{"name": "walk", "on": {"wied": {"noise": 0.1}}}]},
            ["unknown task 'wied'; did you mean 'wide'?"],
        ),
        (
            {"method": [{"name": "walk", "on": {"wide": {"nois": 0.1}}}]},
            ["unknown key 'nois'", "walk on wide"],
        ),
        ({"method": [{"name": "walk", "on": 3}]}, ["'on' must hold a table"]),
        (
            {"task": [{"name": "bowl", "on": {"bowl": {"rows": 3}}}], "method": ["walk"]},
            ["'on' is for methods only"],
        ),
        (
            {"task": [{"name": "bowl", "rows": 0}], "method": ["walk"]},
            ["'rows' must be >= 1: 0 @ grid.toml.task bowl"],
        ),
        (
            {"method": ["needy"]},
            ["method 'needy' cannot run on task 'bowl'", "named data sources", "`hgms compat`"],
        ),
        (
            {"metric": "distanc"},
            ["unknown metric 'distanc'; did you mean 'distance'?", "@ grid.toml, task 'bowl'"],
        ),
        ({"reference": "wlk"}, ["unknown reference method 'wlk'; did you mean 'walk'?"]),
        ({"run": {"device": "gpu"}}, ["'device' must be"]),
        ({"run": {"label": "x"}}, ["labels belong into the [[task]] and [[method]] tables"]),
        (
            {"sets": ["wlak.noise=1"]},
            ["--set wlak.noise=1: unknown task or method 'wlak'; did you mean 'walk'?"],
        ),
        ({"sets": ["noise"]}, ["--set noise: write --set key=value"]),
        ({"sets": ["walk.noise"]}, ["--set walk.noise: write --set key=value"]),
        (
            {"sets": ["noise=0.1"]},
            ["--set noise=0.1: whose 'noise'? write task.noise, method.noise or LABEL.noise"],
        ),
        ({"tasks": ["wied"]}, ["unknown task 'wied'; did you mean 'wide'?", "@ grid.toml.task"]),
        (
            {"sweep": {**SWEEP, "seeds": [2, 100]}},
            ["pilot seeds must not be seeds of the comparison", ": 2 @"],
        ),
        ({"sweep": {**SWEEP, "space": {}}}, ["no method has a space"]),
        ({"sweep": {**SWEEP, "trials": 4}}, ["3 points are too few for 4 different trials"]),
        ({"sweep": {**SWEEP, "trials": 1}}, ["'trials' must be >= 2: 1"]),
        ({"sweep": {**SWEEP, "sampler": "gird"}}, ["unknown choice 'gird'; did you mean 'grid'?"]),
        (
            {"sweep": {**SWEEP, "space": {"quikc": {}}}},
            ["unknown method 'quikc'; did you mean 'quick'?"],
        ),
        (
            {"sweep": {**SWEEP, "space": {"quick": {"move.lrr": [1, 2, 3]}}}},
            ["unknown key 'lrr'; did you mean 'lr'?"],
        ),
        (
            {"sweep": {**SWEEP, "space": {"quick": {"move.lr": [0.1, 0.2, -1.0]}}}},
            ["'lr' must be > 0", "(move.lr = -1.0)"],
        ),
        ({"sweep": {**SWEEP, "space": {"quick": {"move.lr": []}}}}, ["no values to choose from"]),
        ({"sweep": {**SWEEP, "space": {"quick": {"move.lr": 3}}}}, ["must be a list of values or"]),
        ({"sweep": {**SWEEP, "space": {"quick": 3}}}, ["expected a table of fields, got 3"]),
        (
            {"sweep": {**SWEEP, "space": {"quick": {"move.lr": {"low": 1.0, "high": 0.1}}}}},
            ["low must be < high"],
        ),
        (
            {
                "sweep": {
                    **SWEEP,
                    "space": {"quick": {"move.lr": {"low": 0.0, "high": 1.0, "log": True}}},
                }
            },
            ["needs low > 0"],
        ),
        (
            {"sweep": {**SWEEP, "space": {"quick": {"move.lr": {"low": 0.1, "hgih": 1.0}}}}},
            ["did you mean 'high'?"],
        ),
        (
            {
                "sweep": {
                    **SWEEP,
                    "sampler": "grid",
                    "space": {"quick": {"move.lr": {"low": 0.1, "high": 1.0}}},
                }
            },
            ['sampler "grid" needs lists of values'],
        ),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        grid(**changes)
    for message in messages:
        assert message in str(caught.value)


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        grid(
            budget="0 s",
            seeds=0,
            task=["bowl", "bowll"],
            method=["needy", {"name": "walk", "noise": "loud"}, "wlak"],
            reference="nobody",
            metric="m",
        )
    message = str(caught.value)
    assert message.startswith("8 problems in grid.toml; nothing was run:\n")
    for part in (
        "the budget '0 s'",
        "'seeds' must be",
        "'bowll'",
        "'wlak'",
        '"loud"',
        "'needy' cannot",
        "'nobody'",
        "'m'",
    ):
        assert part in message


def test_spaces() -> None:
    space = parse(
        {
            "a": [1, 2],
            "b": {"c": {"low": 1, "high": 4}},
            "d.e": {"low": 0.01, "high": 1.0, "log": True},
        }
    )
    assert space == {"a": Choices((1, 2)), "b.c": Range(1, 4), "d.e": Range(0.01, 1.0, log=True)}
    assert points({key: space[key] for key in ("a", "b.c")}) == 8
    assert points(space) is None
    assert {space["b.c"].at(share / 100) for share in range(100)} == {1, 2, 3, 4}
    assert [space["d.e"].at(share) for share in (0.0, 0.5)] == [0.01, 0.1]
    assert [space["a"].at(share) for share in (0.0, 0.49, 0.5, 0.99)] == [1, 1, 2, 2]
