"""Components of every kind with fields of every type, and a registry of them, for the tests of
configurations.
"""

from __future__ import annotations

import tomllib
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, final

import pytest
from attrs import field, frozen, validators

from hgms.methods import KeepBest
from hgms.plugins import Host, Registry
from hgms.runs import RunConfig
from hgms_core import Composition, LinearSolver, Method, hookimpl
from hgms_core.errors import ConfigError


@frozen(kw_only=True)
class Schedule:
    kind: Literal["constant", "cosine"] = "constant"
    final: float = field(default=0.0, validator=validators.ge(0))


@final
@frozen(kw_only=True)
class Generator:
    name: ClassVar[str] = "draws"
    count: int = field(default=4, validator=validators.ge(1))
    lr: float = field(default=0.1, validator=validators.gt(0))
    betas: tuple[float, float] = (0.9, 0.999)
    spread: tuple[float, ...] = ()
    limits: Mapping[str, float] = field(factory=dict)
    clip: float | None = 1.0
    batch_size: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    until: int | Literal["converged"] | tuple[int, ...] = 3
    noisy: bool = False
    label: str = ""

    def init(self, problem: Any, key: Any) -> Any: ...
    def propose(
        self, problem: Any, theta: Any, start: Any, key: Any, progress: float = 0.0
    ) -> Any: ...
    def carry(self, start: Any, candidates: Any, index: Any, key: Any, problem: Any) -> Any: ...


@final
@frozen(kw_only=True)
class Choose:
    name: ClassVar[str] = "choose"

    def select(self, problem: Any, theta: Any, candidates: Any, key: Any) -> Any: ...


@final
@frozen(kw_only=True)
class Direct:
    name: ClassVar[str] = "direct"
    rtol: float = field(default=1e-6, validator=validators.gt(0))
    max_steps: int = field(default=50, validator=[validators.instance_of(int), validators.ge(1)])
    guess: Callable[[int], int] | None = None

    def __attrs_post_init__(self) -> None:
        if self.max_steps > 100 and self.rtol > 0.1:
            raise ConfigError("conflicting-options", "max_steps and rtol exclude each other")

    def solve(self, matvec: Any, b: Any, x0: Any = None) -> Any: ...


@final
@frozen(kw_only=True)
class Other:
    name: ClassVar[str] = "other"
    shift: float = 0.0

    def solve(self, matvec: Any, b: Any, x0: Any = None) -> Any: ...


@final
@frozen(kw_only=True)
class Estimate:
    name: ClassVar[str] = "estimate"
    solver: LinearSolver
    fallback: LinearSolver | None = None

    def init(self, problem: Any) -> Any: ...
    def estimate(
        self, problem: Any, theta: Any, candidates: Any, selection: Any, key: Any, state: Any
    ) -> Any: ...


@final
@frozen(kw_only=True)
class Move:
    name: ClassVar[str] = "move"
    lr: float = 0.5
    schedule: Schedule = Schedule()

    def init(self, theta: Any) -> Any: ...
    def step(self, theta: Any, gradient: Any, state: Any, progress: float) -> Any: ...


@final
@frozen(kw_only=True)
class Work:
    name: ClassVar[str] = "work"
    version: ClassVar[str] = "1"
    metrics: ClassVar[Mapping[str, bool]] = {}
    size: int = 3

    def problem(self, seed: int, device: Any, dtype: Any) -> Any: ...


@final
@frozen(kw_only=True)
class Around:
    """A wrapper, whose field stands among those of the pipeline inside."""

    name: ClassVar[str] = "around"
    method: Method = field(metadata={"flat": True})
    margin: float

    def init(self, problem: Any, seed: int) -> Any: ...
    def step(self, problem: Any, state: Any, progress: float) -> Any: ...
    def result(self, state: Any) -> Any: ...


RECIPE = Composition(
    name="recipe",
    summary="A method of parts by name.",
    source="this test",
    parts={
        "generator": {"name": "draws", "count": 8, "batch_size": 64},
        "selector": "choose",
        "hypergradient": {"name": "estimate", "solver": {"name": "direct", "rtol": 1e-3}},
        "outer": {"name": "move", "schedule": {"kind": "cosine", "final": 0.1}},
        "keep": "best",
    },
)


HOOKS: dict[str, list[Any]] = {
    "hgms_register_generators": [Generator],
    "hgms_register_selectors": [Choose],
    "hgms_register_linear_solvers": [Direct, Other],
    "hgms_register_hypergradients": [Estimate],
    "hgms_register_outer_optimizers": [Move],
    "hgms_register_tasks": [Work],
    "hgms_register_methods": [KeepBest, RECIPE, Around],
}


def make_registry(hooks: Mapping[str, list[Any]] = HOOKS, tolerant: bool = False) -> Registry:
    module = types.ModuleType("parts")
    for hook, components in hooks.items():
        setattr(module, hook, hookimpl(lambda components=components: components, specname=hook))
    host = Host(tolerant=tolerant)
    host.add(module)
    return Registry(host)


REGISTRY = make_registry()

TEXT = """
budget = "60s"
task = "work"

[method]
name = "recipe"
"""


def config_of(registry: Registry = REGISTRY, text: str = TEXT, **tables: Any) -> RunConfig:
    return RunConfig.from_dict(
        {**tomllib.loads(text), **tables}, source="run.toml", registry=registry
    )


def error_of(registry: Registry = REGISTRY, **tables: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config_of(registry, **tables)
    return caught.value
