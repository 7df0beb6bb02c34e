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
            raise ConfigError("so many steps for so loose a tolerance make no sense")

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


def error_of(registry: Registry, **tables: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(registry, **tables)
    return str(caught.value)


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


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            at(*SOLVER, "rtol", value=-1.0),
            "'rtol' must be > 0: -1.0 @ run.toml.method.hypergradient.solver.rtol",
        ),
        (
            at(*SOLVER, "rtol", value="1e-3"),
            'expected a number, got "1e-3" @ run.toml.method.hypergradient.solver.rtol',
        ),
        (
            at(*SOLVER, "max_steps", value=3.9),
            "expected an integer, got 3.9 @ run.toml.method.hypergradient.solver.max_steps",
        ),
        (
            at(*SOLVER, "max_steps", value=True),
            "expected an integer, got true @ run.toml.method.hypergradient.solver.max_steps",
        ),
        (
            at(*SOLVER, "max_steps", value="7"),
            'expected an integer, got "7" @ run.toml.method.hypergradient.solver.max_steps',
        ),
        (
            at(*SOLVER, "max_step", value=3),
            "unknown key 'max_step'; did you mean 'max_steps'? (known: rtol, max_steps, guess) "
            "@ run.toml.method.hypergradient.solver.max_step",
        ),
        (
            at(*SOLVER, "name", value="directt"),
            "unknown linear solver 'directt'; did you mean 'direct'? @ "
            "run.toml.method.hypergradient.solver.name\n"
            "  available: direct, other\n"
            "  `hgms list solver` says what each does",
        ),
        (
            at(*SOLVER, value={"rtol": 0.5, "max_steps": 500}),
            (
                "so many steps for so loose a tolerance make no sense @ "
                "run.toml.method.hypergradient.solver"
            ),
        ),
        (
            at(*SOLVER, "guess", value=3),
            "a function can only be given from Python @ run.toml.method.hypergradient.solver.guess",
        ),
        (
            at("hypergradient", "solver", value=3),
            (
                "expected a table with the name of a linear solver, got 3 @ "
                "run.toml.method.hypergradient.solver"
            ),
        ),
        (
            at("generator", "noisy", value=1),
            "expected true or false, got 1 @ run.toml.method.generator.noisy",
        ),
        (
            at("generator", "label", value=1),
            "expected a string, got 1 @ run.toml.method.generator.label",
        ),
        (
            at("generator", "clip", value="x"),
            'expected a number, got "x" @ run.toml.method.generator.clip',
        ),
        (
            at("generator", "batch_size", value=0),
            "'batch_size' must be >= 1: 0 @ run.toml.method.generator.batch_size",
        ),
        (
            at("generator", "betas", value=[0.9]),
            (
                "expected a list of 2 values (a number, a number), got 1 of them @ "
                "run.toml.method.generator.betas"
            ),
        ),
        (
            at("generator", "spread", value=[1, "a"]),
            'expected a number, got "a" @ run.toml.method.generator.spread[1]',
        ),
        (
            at("generator", "spread", value="12"),
            'expected a list (a number each), got "12" @ run.toml.method.generator.spread',
        ),
        (
            at("generator", "limits", value={"a": "b"}),
            'expected a number, got "b" @ run.toml.method.generator.limits.a',
        ),
        (
            at("generator", "until", value=1.5),
            (
                'expected an integer or "converged" or a list (an integer each), got 1.5 @ '
                "run.toml.method.generator.until"
            ),
        ),
        (
            at("outer", "schedule", "kind", value="cosin"),
            "unknown choice 'cosin'; did you mean 'cosine'? @ run.toml.method.outer.schedule.kind\n"
            "  available: constant, cosine",
        ),
        (
            at("outer", "schedule", value=3),
            "expected a table (Schedule), got 3 @ run.toml.method.outer.schedule",
        ),
        (
            at("outter", value=3),
            "unknown key 'outter'; did you mean 'outer'? "
            "(known: generator, selector, hypergradient, outer, keep, answer, margin) @ "
            "run.toml.method.outter",
        ),
        (
            at("margn", value=3.0),
            "unknown key 'margn'; did you mean 'margin'? "
            "(known: generator, selector, hypergradient, outer, keep, answer, margin) @ "
            "run.toml.method.margn",
        ),
        (at("margin", value="wide"), 'expected a number, got "wide" @ run.toml.method.margin'),
        (
            {"generator": "draws"},
            "the name of the method is missing @ run.toml.method.name\n"
            "  available: around, pipeline, recipe\n"
            "  `hgms list method` says what each does",
        ),
        (
            {"name": "pipeline", "generator": "draws", "selector": "choose", "outer": "move"},
            "missing: a hypergradient estimator @ run.toml.method.hypergradient",
        ),
    ],
)
def test_the_message_and_the_place_of_one_error(
    registry: Registry, method: dict[str, Any], message: str
) -> None:
    assert error_of(registry, method=method) == message


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"task": "wrok"},
            "unknown task 'wrok'; did you mean 'work'? @ run.toml.task\n"
            "  available: work\n  `hgms list task` says what each does",
        ),
        (
            {"sed": 1},
            (
                "unknown key 'sed'; did you mean 'seed'? (known: schema, seed, task, method, "
                "budget, run) @ run.toml.sed"
            ),
        ),
        (
            {"method_name": "x"},
            "unknown key 'method_name'; did you mean 'method'? "
            "(known: schema, seed, task, method, budget, run) @ run.toml.method_name",
        ),
        ({"seed": -1}, "'seed' must be >= 0: -1 @ run.toml.seed"),
        (
            {"schema": 2},
            "schema 2 is not known to this version of hgms, which reads schema 1 @ run.toml.schema",
        ),
        (
            {"budget": "60"},
            (
                "cannot read the budget '60'; write for example '60s', '25 steps' or '1e5 calls' @ "
                "run.toml.budget"
            ),
        ),
        (
            {"budget": {"seconds": 1, "outer_steps": 2}},
            "a budget is exactly one of seconds, outer_steps, oracle_calls (given: seconds, "
            "outer_steps); "
            'to replace one from the command line: --set budget="25 steps" @ run.toml.budget',
        ),
        (
            {"budget": {"seconds": 0}},
            "'seconds' must be > 0 and finite: 0.0 @ run.toml.budget.seconds",
        ),
        (
            {"budget": {"outer_steps": 2.5}},
            "expected an integer, got 2.5 @ run.toml.budget.outer_steps",
        ),
        (
            {"run": {"device": "gpu"}},
            '\'device\' must be "cpu", "cuda", "cuda:N" or "mps": \'gpu\' @ run.toml.run.device',
        ),
        (
            {"run": {"dtype": "float16"}},
            (
                "unknown choice 'float16'; did you mean 'float64'? @ run.toml.run.dtype\n"
                "  available: float32, float64"
            ),
        ),
    ],
)
def test_errors_outside_the_method(
    registry: Registry, tables: dict[str, Any], message: str
) -> None:
    assert error_of(registry, **tables) == message


def test_what_is_missing(registry: Registry) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict({}, source="run.toml", registry=registry)
    assert str(caught.value) == (
        "3 errors in run.toml:\n"
        "  missing: a task @ run.toml.task\n"
        "  missing: a method @ run.toml.method\n"
        '  missing: a budget like "60s", "25 steps" or "1e5 calls" @ run.toml.budget'
    )


def test_all_errors_come_at_once(registry: Registry) -> None:
    method = {
        "name": "recipe",
        "generator": {"count": 3.9, "cont": 1, "lr": 0, "batch_size": 0},
        "hypergradient": {"solver": {"name": "cg"}},
    }
    assert error_of(registry, method=method, seed="0").splitlines() == [
        "6 errors in run.toml:",
        '  expected an integer, got "0" @ run.toml.seed',
        "  unknown key 'cont'; did you mean 'count'? "
        "(known: count, lr, betas, spread, limits, clip, batch_size, until, noisy, label) "
        "@ run.toml.method.generator.cont",
        "  expected an integer, got 3.9 @ run.toml.method.generator.count",
        "  'lr' must be > 0: 0.0 @ run.toml.method.generator.lr",
        "  'batch_size' must be >= 1: 0 @ run.toml.method.generator.batch_size",
        "  unknown linear solver 'cg'; no close match. @ run.toml.method.hypergradient.solver.name",
        "    available: direct, other",
        "    `hgms list solver` says what each does",
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
    ("assignment", "message"),
    [
        (
            "method.generator.coutn=4",
            "unknown key 'coutn'; did you mean 'count'? "
            "(known: count, lr, betas, spread, limits, clip, batch_size, until, noisy, "
            "label) @ --set method.generator.coutn",
        ),
        (
            "method.generator.count=four",
            'expected an integer, got "four" @ --set method.generator.count',
        ),
        ("method.generator.count=-4", "'count' must be >= 1: -4 @ --set method.generator.count"),
        ("count", "--set count: write --set key=value, for example --set method.generator.count=4"),
        (
            "a..b=1",
            "--set a..b=1: write --set key=value, for example --set method.generator.count=4",
        ),
        ("budget.seconds=3", '--set budget.seconds=3: budget is "60s", not a table'),
    ],
)
def test_a_wrong_set_says_so(
    registry: Registry, tmp_path: Path, assignment: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path), [assignment], registry=registry)
    assert str(caught.value) == message


def test_files_that_cannot_be_read(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot read the configuration .*absent.toml: No such file or directory"
    ):
        load(tmp_path / "absent.toml", registry=registry)
    with pytest.raises(
        ConfigError, match=r"run.toml is not valid TOML: .* \(at line 1, column 8\)"
    ):
        load(write(tmp_path, "seed = \n"), registry=registry)


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
    assert "expected a number, got 1000" in error_of(registry, run={"checkpoint_seconds": 10**400})


def test_an_endless_file_is_not_read_to_its_end(registry: Registry) -> None:
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
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
    with pytest.raises(ConfigError, match="can only be used from Python"):
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


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file"), DataError("no such file")])
def test_data_that_cannot_be_read_have_the_reason_for_their_contents(error: Exception) -> None:
    def fail() -> None:
        raise error

    assert data_of(SimpleNamespace(made_of=fail)) == {"made_of": str(error)}


def test_contents_that_json_cannot_hold_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"SimpleNamespace.made_of must return what JSON can hold: .*bytes"
    ):
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
    assert (
        error_of(registry, method={"name": "around", "method": "recipe"})
        == "missing: a number @ run.toml.method.margin"
    )


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
    assert "unknown key 'other'" in error_of(registry, method={"name": "recipe", "other": 4})


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
    message = error_of(registry, method={"name": "plain", "rate": 1.0})
    assert (
        "unknown key 'rate'; Plain.rate is a plain class attribute; write `rate: float = 0.5` to "
        "make it a field"
    ) in message


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
    for key, hint in (("limit", "; did you mean 'limits'?"), ("version", "")):
        assert f"unknown key '{key}'{hint} (known: limits)" in error_of(
            registry, method={"name": "typed", key: 1}
        )


def test_the_key_of_a_wrapper_that_is_not_installed_may_only_say_that_it_is_not_there(
    registry: Registry,
) -> None:
    assert config_of(
        registry, method={"name": "recipe", "tilt": 0, "learn_start": False}
    ) == config_of(registry)
    assert "unknown key 'tilt'" in error_of(registry, method={"name": "recipe", "tilt": 1.0})
    assert "unknown key 'learn_start'" in error_of(
        registry, method={"name": "recipe", "learn_start": 0}
    )


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
    ("text", "message"),
    [
        ("1.2.3 s", "cannot read the budget '1.2.3 s'"),
        ("-3 s", "cannot read the budget '-3 s'"),
        ("5 parsecs", "cannot read the budget '5 parsecs'"),
        # not with time in the square of its length
        ("1" + 20_000 * " " + "!", "cannot read the budget '1 "),
        ("9" * 20_000 + " steps", "the budget '99"),
        ("2.5 steps", "the budget '2.5 steps' is not a whole number of steps"),
        (
            "0 steps",
            "the budget '0 steps' is not usable: 'outer_steps' must be a whole number > 0: 0",
        ),
        ("0 s", "the budget '0 s' is not usable: 'seconds' must be > 0 and finite: 0.0"),
        ("1e999 s", "the budget '1e999 s' is not usable: 'seconds' must be > 0 and finite: inf"),
    ],
)
def test_budgets_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Budget.parse(text)
    assert str(caught.value).startswith(message)


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
