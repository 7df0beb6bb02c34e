"""Compositions with other defaults on tasks with a trait: in runs, in grids and in `hgms
compat`, and read back the same.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.fakes import Site
from support.helpers import rejects

from hgms.cli import main
from hgms.comparison.grid import Grid
from hgms.comparison.grid_file import load
from hgms.runs import RunConfig
from hgms_core import Composition, ConfigError

PLUGIN = '''
from typing import ClassVar, final

import torch
from attrs import frozen
from hgms_core import ConfigError, Problem, hookimpl
from hgms_core import Composition


@final
@frozen(kw_only=True)
class Street:
    """A task with a trait."""

    name: ClassVar[str] = "street"
    version: ClassVar[str] = "1"
    metrics: ClassVar[dict[str, bool]] = {"length": False}
    traits: ClassVar[frozenset[str]] = frozenset({"sources"})

    def problem(self, seed, device, dtype):
        loss = lambda theta, x, batch: x["x"].square().sum()
        return Problem(theta0={}, x0={"x": torch.ones(2)}, g=loss, f=loss)


@final
@frozen(kw_only=True)
class Field:
    """A task without traits."""

    name: ClassVar[str] = "field"
    version: ClassVar[str] = "1"
    metrics: ClassVar[dict[str, bool]] = {"length": False}
    traits: ClassVar[frozenset[str]] = frozenset()
    problem = Street.problem


@final
@frozen(kw_only=True)
class Stroll:
    """A method."""

    name: ClassVar[str] = "stroll"
    lr: float = 0.1
    limit: float = 0.5
    rows: int | None = None
    keep: bool = False

    def __attrs_post_init__(self):
        if self.lr > self.limit:
            raise ConfigError("above-limit", f"lr={self.lr} exceeds {self.limit}", place=("lr",))

    @property
    def needs(self):
        return frozenset({"stop-rows"} if self.keep else ())

    def init(self, problem, seed):
        return {"x": dict(problem.x0)}

    def step(self, problem, state, progress):
        return {"x": {"x": (1 - self.lr) * state["x"]["x"]}}, {}

    def result(self, state):
        return {}, state["x"]


@hookimpl
def hgms_register_tasks():
    return [Street, Field]


@hookimpl
def hgms_register_methods():
    made = Composition(name="saunter", summary="s", source="s", parts={"lr": 0.2}, of=Stroll,
                       on={"sources": {"lr": 0.4, "limit": 3.0, "rows": 5}})
    best = Composition(name="keeper", summary="s", source="s", parts={"keep": True}, of=Stroll,
                       on={"sources": {"keep": False}})
    return [Stroll, made, best]
'''


@pytest.fixture(autouse=True)
def plugin(site: Site) -> Path:
    path = site.module("strolling", PLUGIN)
    site.install("hgms-strolling", {"strolling": "strolling"})
    return path


def config_of(task: Any, method: Any = "saunter", **more: Any) -> RunConfig:
    return RunConfig.from_dict(
        {"budget": "3 steps", "task": task, "method": method, **more}, source="run.toml"
    )


def fields(method: Any) -> tuple[float, float, int | None]:
    return method.lr, method.limit, method.rows


# --- the composition itself
# --------------------------------------------------------------------------------------------------

RECIPE = Composition(
    name="recipe",
    summary="s",
    source="s",
    parts={"generator": {"name": "draws", "count": 8, "lr": 0.1}, "keep": "best"},
    on={
        "b": {"generator": {"lr": 0.3}, "keep": "last"},
        "a": {"generator": {"lr": 0.2, "clip": 1.0}},
        "c": {"generator": "other"},
    },
)


@pytest.mark.parametrize(
    ("traits", "expected"),
    [
        ((), {"generator": {"name": "draws", "count": 8, "lr": 0.1}, "keep": "best"}),
        (("z",), {"generator": {"name": "draws", "count": 8, "lr": 0.1}, "keep": "best"}),
        (
            ("a",),
            {"generator": {"name": "draws", "count": 8, "lr": 0.2, "clip": 1.0}, "keep": "best"},
        ),
        # several are laid in the order of their names, whatever the order they come in
        (
            ("b", "a"),
            {"generator": {"name": "draws", "count": 8, "lr": 0.3, "clip": 1.0}, "keep": "last"},
        ),
        (("b", "c"), {"generator": {"name": "other"}, "keep": "last"}),
    ],
)
def test_the_defaults_of_a_trait_are_laid_over_the_parts(
    traits: tuple[str, ...], expected: dict[str, Any]
) -> None:
    assert RECIPE.with_overrides({}, traits) == expected
    assert RECIPE.with_overrides({"generator": {"lr": 9.0}}, traits)["generator"] == {
        **expected["generator"],
        "lr": 9.0,
    }
    assert RECIPE.parts["generator"] == {"name": "draws", "count": 8, "lr": 0.1}, (
        "and change nothing"
    )


# --- runs
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["street", {"name": "street"}])
def test_a_run_has_the_defaults_of_its_task(task: Any) -> None:
    assert fields(config_of(task).method) == (0.4, 3.0, 5)
    assert fields(config_of("field").method) == (0.2, 0.5, None)
    assert fields(config_of(task, {"name": "saunter", "rows": 7}).method) == (0.4, 3.0, 7)
    assert fields(config_of(task, "stroll").method) == (0.1, 0.5, None), (
        "a class has no other defaults"
    )


@pytest.mark.parametrize("task", ["street", "field"])
def test_a_resolved_configuration_reads_back_equal(task: str) -> None:
    config = config_of(task, {"name": "saunter", "lr": 0.3})
    for again in (RunConfig.from_dict(config.resolved()), RunConfig.from_toml(config.to_toml())):
        assert again.method == config.method
        assert (again.task, again.budget, again.run) == (config.task, config.budget, config.run)
        assert again.config_hash == config.config_hash
        assert again.resolved() == config.resolved()
    assert (
        tomllib.loads(config.to_toml())["method"]["limit"] == {"street": 3.0, "field": 0.5}[task]
    ), "nothing is left to defaults"
    assert config_of("street").config_hash != config_of("field").config_hash


@pytest.mark.parametrize("task", ["stret", {"name": "stret"}, {"rows": 3}, 5])
def test_a_task_that_is_wrong_is_what_is_complained_of(task: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(task)
    assert caught.value.errors[0].place[:2] == ("run.toml", "task")


def test_tables_of_later_stages_are_passed_over_and_others_are_not() -> None:
    assert config_of(
        "street", sample={"size": 3}, finetune={}, evaluate={"benchmarks": []}
    ) == config_of("street")
    with rejects("unknown-option", "run.toml", "sampel", of=ConfigError):
        config_of("street", sampel={"size": 3})


# --- grids
# --------------------------------------------------------------------------------------------------

BOTH = {"budget": "3 steps", "seeds": 2, "task": ["street", "field"], "method": ["saunter"]}


def grid(**changes: Any) -> Grid:
    return load({**BOTH, **changes}, source="grid.toml")


def test_a_grid_gives_a_method_the_defaults_of_each_task() -> None:
    pairs = grid().pairs
    assert fields(pairs["street", "saunter"].method) == (0.4, 3.0, 5)
    assert fields(pairs["field", "saunter"].method) == (0.2, 0.5, None)
    assert pairs["street", "saunter"] == config_of("street")
    special = grid(method=[{"name": "saunter", "on": {"street": {"lr": 2.0}}}]).pairs
    assert fields(special["street", "saunter"].method) == (2.0, 3.0, 5)
    assert fields(special["field", "saunter"].method) == (0.2, 0.5, None)


def test_what_fits_the_defaults_of_one_task_only_is_wrong_on_the_other() -> None:
    assert (
        fields(
            grid(task=["street"], method=[{"name": "saunter", "lr": 2.0}])
            .pairs["street", "saunter"]
            .method
        )[0]
        == 2.0
    )
    with rejects("above-limit", of=ConfigError):
        grid(method=[{"name": "saunter", "lr": 2.0}])


def test_varied_settings_and_the_ends_of_a_sweep_keep_the_tasks_defaults() -> None:
    assert fields(grid().varied("street", "saunter", {"rows": 7}).method) == (0.4, 3.0, 7)
    assert fields(grid().varied("field", "saunter", {"rows": 7}).method) == (0.2, 0.5, 7)
    sweep = {"trials": 3, "space": {"saunter": {"lr": {"low": 0.1, "high": 2.0}}}}
    assert grid(task=["street"], sweep=sweep).sweep is not None
    with rejects("above-limit", of=ConfigError):
        grid(sweep=sweep)


# --- hgms compat
# --------------------------------------------------------------------------------------------------


def test_compat_asks_what_a_method_needs_as_it_is_on_each_task(plugin: Path) -> None:
    """Neither task has stop rows, which the keeper needs where it keeps the best: on a task
    without the trait.
    """
    result = CliRunner().invoke(main, ["compat", "--json"])
    assert result.exit_code == 0, result.output
    fits = {(row["method"], row["task"]): row["fits"] for row in json.loads(result.output)}
    assert (fits["keeper", "street"], fits["keeper", "field"]) == (True, False)
    assert (fits["stroll", "street"], fits["stroll", "field"]) == (True, True)
