"""Compositions with other defaults on tasks with a trait: in runs and in grids, and read
back the same.
"""

from __future__ import annotations

import copy
import tomllib
from typing import Any

import attrs
import pytest
from support.fakes import Site

from hgms.comparison.grid import Grid
from hgms.comparison.grid_file import load
from hgms.config.tables import overridden
from hgms.runs import RunConfig
from hgms_core import Composition

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

    def __attrs_post_init__(self):
        if self.lr > self.limit:
            raise ConfigError("above-limit", f"lr={self.lr} exceeds {self.limit}", place=("lr",))

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
    return [Stroll, made]
'''


@pytest.fixture(autouse=True)
def plugin(site: Site) -> None:
    site.module("strolling", PLUGIN)
    site.install("hgms-strolling", {"strolling": "strolling"})


def config_of(task: Any, method: Any = "saunter", **more: Any) -> RunConfig:
    return RunConfig.from_dict(
        {"budget": "3 steps", "task": task, "method": method, **more}, source="run.toml"
    )


def fields(method: Any) -> tuple[float, float, int | None]:
    return method.lr, method.limit, method.rows


# --- the composition itself

DRAWS = {"name": "draws", "count": 8, "lr": 0.1}
RECIPE = Composition(
    name="recipe",
    summary="s",
    source="s",
    parts={"generator": DRAWS, "keep": "best"},
    on={
        "b": {"generator": {"lr": 0.3}, "keep": "last"},
        "a": {"generator": {"lr": 0.2, "clip": 1.0}},
        "c": {"generator": "other"},
    },
)


@pytest.mark.parametrize(
    ("traits", "generator", "keep"),
    [
        ((), DRAWS, "best"),
        (("z",), DRAWS, "best"),
        (("a",), {**DRAWS, "lr": 0.2, "clip": 1.0}, "best"),
        # several are laid in the order of their names, whatever the order they come in
        (("b", "a"), {**DRAWS, "lr": 0.3, "clip": 1.0}, "last"),
        (("b", "c"), {"name": "other"}, "last"),
    ],
)
def test_the_defaults_of_a_trait_are_laid_over_the_parts_and_change_nothing(
    traits: tuple[str, ...], generator: dict[str, Any], keep: str
) -> None:
    before = copy.deepcopy(RECIPE.parts)
    assert overridden(RECIPE, {}, traits) == {"generator": generator, "keep": keep}
    changed = overridden(RECIPE, {"generator": {"lr": 9.0}}, traits)
    assert changed["generator"] == {**generator, "lr": 9.0}
    assert RECIPE.parts == before


# --- runs


@pytest.mark.parametrize(
    ("task", "method", "values"),
    [
        ("street", "saunter", (0.4, 3.0, 5)),
        ("field", "saunter", (0.2, 0.5, None)),
        ({"name": "street"}, {"name": "saunter", "rows": 7}, (0.4, 3.0, 7)),
        ("street", "stroll", (0.1, 0.5, None)),  # a class has no other defaults
    ],
)
def test_a_run_has_the_defaults_of_its_task(task: Any, method: Any, values: Any) -> None:
    assert fields(config_of(task, method).method) == values


def test_a_resolved_configuration_reads_back_equal() -> None:
    street, field = (
        config_of(task, {"name": "saunter", "lr": 0.3}) for task in ("street", "field")
    )
    for config, limit in ((street, 3.0), (field, 0.5)):
        read = (RunConfig.from_dict(config.as_dict()), RunConfig.from_toml(config.to_toml()))
        for again in read:
            assert attrs.evolve(again, method_name=config.method_name) == config
            assert again.config_hash == config.config_hash
        table = tomllib.loads(config.to_toml())["method"]
        assert table["limit"] == limit, "nothing is left to defaults"
    assert street.config_hash != field.config_hash


# --- grids

BOTH: dict[str, Any] = {
    "budget": "3 steps",
    "seeds": 2,
    "task": ["street", "field"],
    "method": ["saunter"],
}


def grid(**changes: Any) -> Grid:
    return load({**BOTH, **changes}, source="grid.toml")


def test_a_grid_gives_a_method_the_defaults_of_each_task() -> None:
    special = [{"name": "saunter", "on": {"street": {"lr": 2.0}}}]
    values = [
        [fields(made.pairs[task, "saunter"].method) for task in BOTH["task"]]
        for made in (grid(), grid(method=special))
    ]
    assert values == [[(0.4, 3.0, 5), (0.2, 0.5, None)], [(2.0, 3.0, 5), (0.2, 0.5, None)]]
