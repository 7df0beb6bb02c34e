"""Configurations: strict, every error at once with its place, and the same again after a trip
through TOML.
"""

from __future__ import annotations

import tomllib
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, final

import attrs
import hypothesis.strategies as st
import pytest
from attrs import evolve, field, frozen, validators
from hypothesis import given, settings
from support.helpers import rejects

from hgms.config.as_table import plain
from hgms.config.invalid import spell
from hgms.runs import RunConfig, RunSettings, data_of, load
from hgms_core import Budget, Composition, LinearSolver, Method, Pipeline, hookimpl
from hgms_core.errors import ConfigError, DataError
from hgms_core.host import Host
from hgms_core.registry import KINDS, Registry, faults_of


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
    def propose(self, problem: Any, theta: Any, start: Any, key: Any) -> Any: ...
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
    def estimate(self, problem: Any, theta: Any, branch: Any, key: Any, state: Any) -> Any: ...


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
    "hgms_register_methods": [RECIPE, Around],
}


def make_registry(hooks: Mapping[str, list[Any]] = HOOKS, tolerant: bool = False) -> Registry:
    module = types.ModuleType("parts")
    for hook, components in hooks.items():
        setattr(module, hook, hookimpl(lambda components=components: components, specname=hook))
    host = Host(tolerant=tolerant)
    host.add(module)
    return Registry(host)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return make_registry()


TEXT = """
budget = "60s"
task = "work"

[method]
name = "recipe"
"""


def config_of(registry: Registry, text: str = TEXT, **tables: Any) -> RunConfig:
    return RunConfig.from_dict(
        {**tomllib.loads(text), **tables}, source="run.toml", registry=registry
    )


def error_of(registry: Registry, **tables: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config_of(registry, **tables)
    return caught.value


def test_a_composition_is_a_pipeline_with_its_own_defaults(registry: Registry) -> None:
    config = config_of(registry)
    assert config.method == Pipeline(
        generator=Generator(count=8, batch_size=64),
        selector=Choose(),
        hypergradient=Estimate(solver=Direct(rtol=1e-3)),
        outer=Move(schedule=Schedule(kind="cosine", final=0.1)),
        keep="best",
    )
    assert (config.method_name, config.task, config.budget, config.seed) == (
        "recipe",
        Work(),
        Budget(seconds=60.0),
        0,
    )


def test_overrides_change_fields_or_replace_parts(registry: Registry) -> None:
    method = {
        "name": "recipe",
        "generator": {"count": 2, "batch_size": "none"},
        "hypergradient": {"solver": {"name": "other", "shift": 2}},
        "outer": {"schedule": {"final": 0.5}},
    }
    pipeline = config_of(registry, method=method).method
    assert isinstance(pipeline, Pipeline)
    assert pipeline.generator == Generator(count=2, batch_size=None)
    assert pipeline.hypergradient == Estimate(solver=Other(shift=2.0))
    assert pipeline.outer == Move(schedule=Schedule(kind="cosine", final=0.5))


def test_a_pipeline_from_scratch(registry: Registry) -> None:
    method = {
        "name": "pipeline",
        "generator": "draws",
        "selector": {"name": "choose"},
        "hypergradient": {"name": "estimate", "solver": "direct", "fallback": {"name": "other"}},
        "outer": "move",
    }
    config = config_of(registry, method=method)
    assert config.method_name == "pipeline"
    assert config.method == Pipeline(
        generator=Generator(),
        selector=Choose(),
        hypergradient=Estimate(solver=Direct(), fallback=Other()),
        outer=Move(),
    )


def at(*path: str, value: Any) -> dict[str, Any]:
    """The recipe with one value set far down."""
    table: Any = value
    for part in reversed(path):
        table = {part: table}
    return {"name": "recipe", **table}


SOLVER = ("hypergradient", "solver")


RTOL = (*SOLVER, "rtol")
MAX_STEPS = (*SOLVER, "max_steps")

# the table, then the code and the place of its error, and parts of the text: values and remedies
WRONG: list[tuple[Any, ...]] = [
    (at(*RTOL, value=-1.0), "wrong-value", RTOL, "-1.0"),  # a validator of attrs
    (at(*RTOL, value="1e-3"), "wrong-type", RTOL, 'a number, got "1e-3"'),
    (at(*MAX_STEPS, value=3.9), "wrong-type", MAX_STEPS, "an integer, got 3.9"),
    (at(*MAX_STEPS, value=True), "wrong-type", MAX_STEPS, "an integer, got true"),
    (at(*MAX_STEPS, value="7"), "wrong-type", MAX_STEPS, 'an integer, got "7"'),
    (
        at(*SOLVER, "max_step", value=3),
        "unknown-option",
        (*SOLVER, "max_step"),
        "'max_steps'?",
        "available: guess, max_steps, rtol",
    ),
    (
        at(*SOLVER, "name", value="directt"),
        "unknown-linear-solver",
        (*SOLVER, "name"),
        "'direct'?",
        "available: direct, other",
        "`hgms list solver`",
    ),
    (at(*SOLVER, value={"rtol": 0.5, "max_steps": 500}), "conflicting-options", SOLVER),
    (at(*SOLVER, "guess", value=3), "not-supported", (*SOLVER, "guess"), "Python"),
    (at(*SOLVER, value=3), "wrong-type", SOLVER, "a linear solver, got 3"),
    (at("generator", "noisy", value=1), "wrong-type", ("generator", "noisy"), "true or false"),
    (at("generator", "label", value=1), "wrong-type", ("generator", "label"), "a string"),
    (at("generator", "clip", value="x"), "wrong-type", ("generator", "clip"), 'a number, got "x"'),
    (at("generator", "batch_size", value=0), "wrong-value", ("generator", "batch_size"), "0"),
    (
        at("generator", "betas", value=[0.9]),
        "wrong-length",
        ("generator", "betas"),
        "a list of 2 values (a number, a number), got 1",
    ),
    (
        at("generator", "spread", value=[1, "a"]),
        "wrong-type",
        ("generator", "spread", 1),
        'a number, got "a"',
    ),
    (
        at("generator", "spread", value="12"),
        "wrong-type",
        ("generator", "spread"),
        'a list (a number each), got "12"',
    ),
    (at("generator", "limits", value={"a": "b"}), "wrong-type", ("generator", "limits", "a")),
    (
        at("generator", "until", value=1.5),
        "wrong-type",
        ("generator", "until"),
        'an integer or "converged" or a list (an integer each), got 1.5',
    ),
    (
        at("outer", "schedule", "kind", value="cosin"),
        "unknown-choice",
        ("outer", "schedule", "kind"),
        "'cosine'?",
        "available: constant, cosine",
    ),
    (at("outer", "schedule", value=3), "wrong-type", ("outer", "schedule"), "a table (Schedule)"),
    (
        at("outter", value=3),
        "unknown-option",
        ("outter",),
        "'outer'?",
        "available: answer, generator, hypergradient, keep, margin, outer, selector",
    ),
    (at("margn", value=3.0), "unknown-option", ("margn",), "'margin'?"),
    (at("margin", value="wide"), "wrong-type", ("margin",), 'a number, got "wide"'),
    (
        {"generator": "draws"},
        "missing-option",
        ("name",),
        "available: around, pipeline, recipe",
        "`hgms list method`",
    ),
    (
        {"name": "pipeline", "generator": "draws", "selector": "choose", "outer": "move"},
        "missing-option",
        ("hypergradient",),
        "a hypergradient estimator",
    ),
]


@pytest.mark.parametrize("row", WRONG, ids=[f"{code} {place}" for _, code, place, *_ in WRONG])
def test_the_code_and_the_place_of_one_error(registry: Registry, row: tuple[Any, ...]) -> None:
    method, code, place, *shown = row
    error = error_of(registry, method=method)
    assert (error.code, error.place) == (code, ("run.toml", "method", *place))
    assert [part for part in shown if part not in str(error)] == []


@pytest.mark.parametrize(
    "row",
    [
        ({"task": "wrok"}, "unknown-task", ("task",), "'work'?", "`hgms list task`"),
        ({"sed": 1}, "unknown-option", ("sed",), "'seed'?"),
        ({"method_name": "x"}, "unknown-option", ("method_name",), "'method'?"),
        ({"seed": -1}, "out-of-range", ("seed",), "-1"),
        ({"schema": 2}, "not-supported", ("schema",), "2"),
        ({"budget": "60"}, "wrong-budget", ("budget",), "'60'"),
        (
            {"budget": {"seconds": 1, "outer_steps": 2}},
            "wrong-budget",
            ("budget",),
            "seconds and outer_steps",
            '--set budget="25 steps"',
        ),
        ({"budget": {"seconds": 0}}, "out-of-range", ("budget", "seconds"), "0.0"),
        ({"budget": {"outer_steps": 2.5}}, "wrong-type", ("budget", "outer_steps"), "2.5"),
        ({"run": {"device": "gpu"}}, "wrong-value", ("run", "device"), "'gpu'"),
        ({"run": {"dtype": "float16"}}, "unknown-choice", ("run", "dtype"), "'float64'?"),
    ],
)
def test_errors_outside_the_method(registry: Registry, row: tuple[Any, ...]) -> None:
    tables, code, place, *shown = row
    error = error_of(registry, **tables)
    assert (error.code, error.place) == (code, ("run.toml", *place))
    assert [part for part in shown if part not in str(error)] == []


def test_what_is_missing(registry: Registry) -> None:
    with rejects("several-errors", of=ConfigError) as caught:
        RunConfig.from_dict({}, source="run.toml", registry=registry)
    assert [(error.code, error.place) for error in caught.value.errors] == [
        ("missing-option", ("run.toml", "task")),
        ("missing-option", ("run.toml", "method")),
        ("missing-option", ("run.toml", "budget")),
    ]


def test_all_errors_come_at_once(registry: Registry) -> None:
    method = {
        "name": "recipe",
        "generator": {"count": 3.9, "cont": 1, "lr": 0, "batch_size": 0},
        "hypergradient": {"solver": {"name": "cg"}},
    }
    assert str(error_of(registry, method=method, seed="0")).splitlines() == [
        "6 errors:",
        '  expected an integer, got "0" (run.toml: seed)',
        "  unknown option 'cont' (run.toml: method.generator.cont)",
        "    did you mean 'count'?",
        "    available: batch_size, betas, clip, count, label, limits, lr, noisy, spread, until",
        "  expected an integer, got 3.9 (run.toml: method.generator.count)",
        "  'lr' must be > 0: 0.0 (run.toml: method.generator.lr)",
        "  'batch_size' must be >= 1: 0 (run.toml: method.generator.batch_size)",
        "  unknown linear solver 'cg' (run.toml: method.hypergradient.solver.name)",
        "    available: direct, other",
        "    run `hgms list solver` for their descriptions",
    ]


def write(folder: Path, text: str = TEXT) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_set_lays_values_over_the_file(registry: Registry, tmp_path: Path) -> None:
    sets = [
        "method.generator.count=4",
        "method.hypergradient.solver=other",
        "method.generator.betas=[0.5, 0.9]",
        "method.generator.label=two words",
        'budget="25 steps"',
        "task.size=7",
        "run.dtype=float64",
    ]
    config = load(write(tmp_path), sets, seed=5, out="elsewhere", registry=registry)
    assert isinstance(config.method, Pipeline)
    assert config.method.generator == Generator(
        count=4, batch_size=64, betas=(0.5, 0.9), label="two words"
    )
    assert config.method.hypergradient == Estimate(solver=Other())
    assert (config.task, config.seed, config.budget) == (Work(size=7), 5, Budget(outer_steps=25))
    assert config.run == RunSettings(out="elsewhere", dtype="float64")


@pytest.mark.parametrize(
    "row",
    [
        (
            "method.generator.coutn=4",
            "unknown-option",
            ("method", "generator", "coutn"),
            "'count'?",
        ),
        ("method.generator.count=four", "wrong-type", ("method", "generator", "count"), '"four"'),
        ("method.generator.count=-4", "wrong-value", ("method", "generator", "count"), "-4"),
        ("count", "wrong-format", ("--set count",), "--set key=value"),
        ("a..b=1", "wrong-format", ("--set a..b=1",), "--set key=value"),
        ("budget.seconds=3", "wrong-type", ("--set budget.seconds=3",), '"60s"'),
    ],
)
def test_a_wrong_set_says_so(registry: Registry, tmp_path: Path, row: tuple[Any, ...]) -> None:
    assignment, code, place, shown = row
    with rejects(code, *place, of=ConfigError) as caught:
        load(write(tmp_path), [assignment], registry=registry)
    assert shown in str(caught.value)


def test_files_that_cannot_be_read(registry: Registry, tmp_path: Path) -> None:
    absent = tmp_path / "absent.toml"
    with rejects("unreadable-file", str(absent), of=ConfigError) as caught:
        load(absent, registry=registry)
    assert "No such file or directory" in caught.value.message
    with rejects("wrong-format", "run.toml", of=ConfigError) as caught:
        load(write(tmp_path, "seed = \n"), registry=registry)
    assert "(at line 1, column 8)" in caught.value.message


@pytest.mark.parametrize(
    "line",
    [
        "a = " + "[" * 5000 + "]" * 5000,
        "a" + ".a" * 5000 + " = 1",
        '[run."' + "b" * 100_000 + '"]',
        "seed = " + "9" * 5000,
        "seed = " + "9" * 400,
        "seed = 1979-05-27",
        "run.label = [1979-05-27T07:32:00Z, 07:32:00]",
        "run.threads = 100000000000000000000000000",
        "run.threads = 1000000000",
        "run.checkpoint_seconds = " + "9" * 400,
        "run = 3",
        "task = [[[[1]]]]",
        'task = "' + "w" * 500_000 + '"',
        "x" * 2_000_000 + " = 1",
        "\n".join(f"key{number} = 1" for number in range(3000)),
        "budget = {outer_steps = 3, seconds = 1979-05-27}",
        'method.name = "\\u001b[31m"',
    ],
    ids=lambda line: line[:30],
)
def test_a_hostile_file_is_one_message(registry: Registry, tmp_path: Path, line: str) -> None:
    key = line.partition(" ")[0].partition(".")[0]
    text = "\n".join(
        one for one in TEXT.splitlines() if not one.startswith(f"{key} ") and f"[{key}" not in one
    )
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, f"{line}\n{text}"), registry=registry)
    assert len(str(caught.value)) < 600_000 / 20
    if "\n" not in line and len(line) < 6000:
        with pytest.raises(ConfigError):
            load(write(tmp_path), [line.replace(" = ", "=")], registry=registry)


def test_an_integer_that_no_float_holds_is_told(registry: Registry) -> None:
    error = error_of(registry, run={"checkpoint_seconds": 10**400})
    assert (error.code, error.place) == ("wrong-type", ("run.toml", "run", "checkpoint_seconds"))
    assert "1000" in error.message


def test_an_endless_file_is_not_read_to_its_end(registry: Registry) -> None:
    with rejects("unreadable-file", "/dev/zero", of=ConfigError):
        load("/dev/zero", registry=registry)


def test_python_needs_no_registry_and_equals_toml(registry: Registry) -> None:
    method = Pipeline(
        generator=Generator(lr=1),
        selector=Choose(),
        hypergradient=Estimate(solver=Direct(rtol=1)),
        outer=Move(lr=1),
    )
    config = RunConfig(task=Work(), method=method, budget=Budget(seconds=60))
    again = RunConfig.from_toml(config.to_toml(), registry=registry)
    assert again == config
    assert again.config_hash == config.config_hash, "an integer for a float is the same number"


def test_what_python_alone_can_hold_cannot_be_written() -> None:
    method = Pipeline(
        generator=Generator(),
        selector=Choose(),
        hypergradient=Estimate(solver=Direct(guess=lambda n: n)),
        outer=Move(),
    )
    with rejects("not-supported", "method", *SOLVER, "guess", of=ConfigError):
        RunConfig(task=Work(), method=method, budget=Budget(seconds=60)).to_toml()


def test_the_hash_knows_what_matters(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(registry)
    assert len(config.config_hash) == 8
    assert int(config.config_hash, 16) >= 0
    assert attrs.evolve(config, seed=9, run=RunSettings(out="x")).config_hash == config.config_hash
    others = {
        config.config_hash,
        attrs.evolve(config, budget=Budget(outer_steps=3)).config_hash,
        attrs.evolve(config, task=Work(size=4)).config_hash,
        config_of(registry, method=at("generator", "count", value=9)).config_hash,
        attrs.evolve(config, run=RunSettings(dtype="float64")).config_hash,
    }
    monkeypatch.setattr(Work, "version", "2")
    assert len(others | {config.config_hash}) == 6


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file"), DataError("missing-file", "no such file")]
)
def test_data_that_cannot_be_read_have_the_reason_for_their_contents(error: Exception) -> None:
    def fail() -> None:
        raise error

    assert data_of(SimpleNamespace(made_of=fail)) == {"made_of": str(error)}


def test_contents_that_json_cannot_hold_are_refused() -> None:
    with rejects("wrong-result", of=ConfigError):
        data_of(SimpleNamespace(made_of=lambda: {"rows": b"digest"}))


numbers = st.floats(allow_nan=False, allow_infinity=True)
positive = st.floats(min_value=1e-300, allow_nan=False, allow_infinity=False)
words = st.text().filter(lambda text: text != "none")
naturals = st.integers(min_value=1, max_value=2**62)
generators = st.builds(
    Generator,
    count=naturals,
    lr=positive,
    betas=st.tuples(numbers, numbers),
    spread=st.lists(numbers, max_size=4).map(tuple),
    limits=st.dictionaries(st.text(), numbers, max_size=3),
    clip=st.none() | numbers,
    batch_size=st.none() | naturals,
    until=naturals | st.just("converged") | st.lists(naturals, max_size=3).map(tuple),
    noisy=st.booleans(),
    label=words,
)
solvers = st.builds(Other, shift=numbers) | st.builds(
    Direct, rtol=positive.filter(lambda x: x <= 0.1), max_steps=naturals
)
pipelines = st.builds(
    Pipeline,
    generator=generators,
    selector=st.just(Choose()),
    hypergradient=st.builds(Estimate, solver=solvers, fallback=st.none() | solvers),
    outer=st.builds(
        Move,
        lr=numbers,
        schedule=st.builds(Schedule, kind=st.sampled_from(["constant", "cosine"]), final=positive),
    ),
    keep=st.sampled_from(["last", "best"]),
)
budgets = st.one_of(
    st.builds(Budget, seconds=positive),
    st.builds(Budget, outer_steps=naturals),
    st.builds(Budget, oracle_calls=naturals),
)
configs = st.builds(
    RunConfig,
    seed=st.integers(min_value=0, max_value=2**62),
    task=st.builds(Work, size=st.integers(min_value=-(2**62), max_value=2**62)),
    method=pipelines | st.builds(Around, method=pipelines, margin=numbers),
    budget=budgets,
    run=st.builds(
        RunSettings,
        threads=st.none() | st.integers(1, 1024),
        device=st.sampled_from(["cpu", "cuda:1"]),
        out=st.text(min_size=1),
    ),
    method_name=st.sampled_from(["pipeline", "recipe"]),
)
REGISTRY = make_registry()


@settings(max_examples=60, deadline=None)
@given(config=configs)
def test_a_configuration_survives_the_trip_through_toml(config: RunConfig) -> None:
    text = config.to_toml()
    again = RunConfig.from_toml(text, registry=REGISTRY)
    assert again == config
    assert again.to_toml() == text
    assert again.config_hash == config.config_hash


def test_a_wrappers_key_stands_among_those_of_the_pipeline(registry: Registry) -> None:
    plain = config_of(registry, method={"name": "recipe"})
    wrapped = config_of(registry, method={"name": "recipe", "margin": 2, "generator": {"count": 3}})
    assert isinstance(wrapped.method, Around)
    assert wrapped.method.margin == 2.0
    assert isinstance(wrapped.method.method, Pipeline)
    assert wrapped.method.method.generator.count == 3  # type: ignore[attr-defined]
    table = wrapped.resolved()["method"]
    assert (table["name"], table["margin"], table["generator"]["count"]) == ("recipe", 2.0, 3)
    assert "margin" not in plain.resolved()["method"]
    assert wrapped.config_hash != plain.config_hash
    assert config_of(registry, wrapped.to_toml()) == wrapped


def test_a_wrapper_may_be_named_with_the_method_inside_as_a_table_or_with_its_keys(
    registry: Registry,
) -> None:
    nested = config_of(registry, method={"name": "around", "margin": 2.0, "method": "recipe"})
    flat = config_of(registry, method={**nested.resolved()["method"], "name": "around"})
    assert nested == flat
    twice = config_of(
        registry,
        method={"name": "around", "margin": 1.0, "method": {"name": "recipe", "margin": 2.0}},
    )
    assert config_of(registry, twice.to_toml()) == twice
    error = error_of(registry, method={"name": "around", "method": "recipe"})
    assert (error.code, error.place) == ("missing-option", ("run.toml", "method", "margin"))


def is_unknown(error: ConfigError, option: str) -> bool:
    """Return whether an error reports an unknown option of the method."""
    return (error.code, error.place) == ("unknown-option", ("run.toml", "method", option))


def test_a_key_belongs_to_the_first_wrapper_that_has_it() -> None:
    @frozen(kw_only=True)
    class Second:
        name = "second"
        method: Method = field(metadata={"flat": True})
        margin: float = 0.0
        patience: int = 3

        init = Around.init
        step = Around.step
        result = Around.result

    @frozen(kw_only=True)
    class Broken:
        name = "broken"
        method: Method = field(metadata={"flat": True})
        other: int = 3

    registry = make_registry(
        {**HOOKS, "hgms_register_methods": [RECIPE, Around, Second, Broken]}, tolerant=True
    )
    assert registry.wrappers == [Around, Second]
    assert isinstance(config_of(registry, method={"name": "recipe", "margin": 2.0}).method, Around)
    both: Any = config_of(registry, method={"name": "recipe", "margin": 2.0, "patience": 5}).method
    assert isinstance(both, Second)
    assert (both.margin, both.patience, both.method.margin) == (0.0, 5, 2.0)
    assert is_unknown(error_of(registry, method={"name": "recipe", "other": 4}), "other")


def test_a_composition_may_hold_a_wrappers_key() -> None:
    kind = KINDS["method"]
    wide = evolve(RECIPE, name="wide", parts={**RECIPE.parts, "margin": 3.0})
    assert faults_of(kind, wide, [Around]) == faults_of(kind, evolve(wide, of=Around)) == []
    assert faults_of(kind, wide) != []
    assert faults_of(kind, evolve(RECIPE, of=Around)) == ["it has no part 'margin'"]


def test_a_key_for_what_has_no_type_says_how_to_make_it_a_field() -> None:
    @frozen(kw_only=True)
    class Plain:
        name = "plain"
        rate = 0.5

        init = Around.init
        step = Around.step
        result = Around.result

    registry = make_registry({**HOOKS, "hgms_register_methods": [Plain]})
    error = error_of(registry, method={"name": "plain", "rate": 1.0})
    assert is_unknown(error, "rate")
    assert error.hint is not None
    assert "rate: float = 0.5" in error.hint


def test_a_key_for_what_no_configuration_may_set_gets_no_advice_for_authors() -> None:
    @frozen(kw_only=True)
    class Typed:
        name = "typed"
        role = "floor"
        version: ClassVar[str] = "1"  # of every task, as a method's own
        limit: ClassVar[int] = 3
        limits: int = 3

        init = Around.init
        step = Around.step
        result = Around.result

    registry = make_registry({**HOOKS, "hgms_register_methods": [Typed]})
    for key, suggestions in (("limit", ("limits",)), ("version", ())):
        error = error_of(registry, method={"name": "typed", key: 1})
        assert is_unknown(error, key)
        assert error.did_you_mean == suggestions
        assert error.hint == "available: limits"


def test_the_key_of_a_wrapper_that_is_not_installed_may_only_say_that_it_is_not_there(
    registry: Registry,
) -> None:
    assert config_of(
        registry, method={"name": "recipe", "tilt": 0, "learn_start": False}
    ) == config_of(registry)
    for key, value in (("tilt", 1.0), ("learn_start", 0)):
        assert is_unknown(error_of(registry, method={"name": "recipe", key: value}), key)


def test_types_in_words() -> None:
    assert spell(int | None) == 'an integer or "none"'
    assert spell(Literal["a", 1]) == '"a" or 1'
    assert spell(tuple[int, str]) == "a list of 2 values (an integer, a string)"
    assert spell(Mapping[str, float]) == "a table (a number each)"
    assert spell(Callable[[int], int]) == "a function (from Python only)"
    assert spell(LinearSolver) == "a linear solver"
    assert spell(Path) == "Path"


def test_plain_values() -> None:
    assert plain(Move()) == {
        "name": "move",
        "lr": 0.5,
        "schedule": {"kind": "constant", "final": 0.0},
    }
    assert plain(Path("a/b")) == "a/b"
    assert plain(None) == "none"


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("60s", Budget(seconds=60.0)),
        (" 2 min ", Budget(seconds=120.0)),
        ("1.5 hours", Budget(seconds=5400.0)),
        ("25 steps", Budget(outer_steps=25)),
        ("25 Outer Steps", Budget(outer_steps=25)),
        ("1e5 calls", Budget(oracle_calls=100_000)),
    ],
)
def test_budgets_are_read(text: str, budget: Budget) -> None:
    assert Budget.parse(text) == budget


@pytest.mark.parametrize(
    ("text", "code", "place"),
    [
        ("1.2.3 s", "wrong-budget", ()),
        ("-3 s", "wrong-budget", ()),
        ("5 parsecs", "wrong-budget", ()),
        # not with time in the square of its length
        ("1" + 20_000 * " " + "!", "wrong-budget", ()),
        ("9" * 20_000 + " steps", "wrong-budget", ()),
        ("2.5 steps", "wrong-budget", ()),
        ("0 steps", "out-of-range", ("outer_steps",)),
        ("0 s", "out-of-range", ("seconds",)),
        ("1e999 s", "out-of-range", ("seconds",)),
    ],
)
def test_budgets_that_cannot_be_read(text: str, code: str, place: tuple[str, ...]) -> None:
    with rejects(code, *place, of=ConfigError) as caught:
        Budget.parse(text)
    if code == "wrong-budget":
        assert repr(text)[:10] in caught.value.message


def test_a_budget_says_how_many_of_what() -> None:
    texts = [
        str(Budget.parse(text))
        for text in ("1 step", "2 steps", "1 call", "1e3 calls", " 2  outer  steps ", "90s")
    ]
    assert texts == [
        "1 outer step",
        "2 outer steps",
        "1 oracle call",
        "1000 oracle calls",
        "2 outer steps",
        "90 s",
    ]


def test_spending_a_budget() -> None:
    assert Budget(seconds=10.0).spent(2.5, 100, 100) == 0.25
    assert Budget(oracle_calls=200).spent(99.0, 9, 50) == 0.25
    assert Budget(outer_steps=4).spent(99.0, 9, 50) == 1.0
    assert Budget(outer_steps=4).spent(0.0, 4, 0) == 1
    assert Budget(outer_steps=4).spent(99.0, 3, 99) == 0.75
    assert [
        str(budget)
        for budget in (Budget(seconds=60.0), Budget(outer_steps=2), Budget(oracle_calls=3))
    ] == ["60 s", "2 outer steps", "3 oracle calls"]
