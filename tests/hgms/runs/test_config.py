"""Configurations: strict, every error at once with its place, and the same again after a trip
through TOML.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from support.config_parts import (
    REGISTRY,
    TEXT,
    Around,
    Choose,
    Direct,
    Estimate,
    Generator,
    Move,
    Other,
    Schedule,
    Work,
    config_of,
    error_of,
)
from support.helpers import rejects

from hgms.runs import RunConfig, RunSettings, data_of, load
from hgms_core import Budget, Pipeline
from hgms_core.errors import ConfigError, DataError


def test_a_composition_is_a_pipeline_with_its_own_defaults() -> None:
    config = config_of()
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


def test_overrides_change_fields_or_replace_parts() -> None:
    method = {
        "name": "recipe",
        "generator": {"count": 2, "batch_size": "none"},
        "hypergradient": {"solver": {"name": "other", "shift": 2}},
        "outer": {"schedule": {"final": 0.5}},
    }
    pipeline = config_of(method=method).method
    assert isinstance(pipeline, Pipeline)
    assert pipeline.generator == Generator(count=2, batch_size=None)
    assert pipeline.hypergradient == Estimate(solver=Other(shift=2.0))
    assert pipeline.outer == Move(schedule=Schedule(kind="cosine", final=0.5))


def test_a_pipeline_from_scratch() -> None:
    method = {
        "name": "pipeline",
        "generator": "draws",
        "selector": {"name": "choose"},
        "hypergradient": {"name": "estimate", "solver": "direct", "fallback": {"name": "other"}},
        "outer": "move",
    }
    config = config_of(method=method)
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

# the table, the code and the place of its error, and the name that is near
WRONG: list[tuple[Any, ...]] = [
    (at(*RTOL, value=-1.0), "wrong-value", RTOL, ""),
    (at(*RTOL, value="1e-3"), "wrong-type", RTOL, ""),
    (at(*MAX_STEPS, value=3.9), "wrong-type", MAX_STEPS, ""),
    (at(*MAX_STEPS, value=True), "wrong-type", MAX_STEPS, ""),
    (at(*SOLVER, "max_step", value=3), "unknown-option", (*SOLVER, "max_step"), "max_steps"),
    (at(*SOLVER, "name", value="directt"), "unknown-linear-solver", (*SOLVER, "name"), "direct"),
    (at(*SOLVER, value={"rtol": 0.5, "max_steps": 500}), "conflicting-options", SOLVER, ""),
    (at(*SOLVER, "guess", value=3), "not-supported", (*SOLVER, "guess"), ""),
    (at(*SOLVER, value=3), "wrong-type", SOLVER, ""),
    (at("generator", "noisy", value=1), "wrong-type", ("generator", "noisy"), ""),
    (at("generator", "label", value=1), "wrong-type", ("generator", "label"), ""),
    (at("generator", "clip", value="x"), "wrong-type", ("generator", "clip"), ""),
    (at("generator", "batch_size", value=0), "wrong-value", ("generator", "batch_size"), ""),
    (at("generator", "betas", value=[0.9]), "wrong-length", ("generator", "betas"), ""),
    (at("generator", "spread", value=[1, "a"]), "wrong-type", ("generator", "spread", 1), ""),
    (at("generator", "spread", value="12"), "wrong-type", ("generator", "spread"), ""),
    (at("generator", "limits", value={"a": "b"}), "wrong-type", ("generator", "limits", "a"), ""),
    (at("generator", "until", value=1.5), "wrong-type", ("generator", "until"), ""),
    (
        at("outer", "schedule", "kind", value="cosin"),
        "unknown-choice",
        ("outer", "schedule", "kind"),
        "cosine",
    ),
    (at("outer", "schedule", value=3), "wrong-type", ("outer", "schedule"), ""),
    (at("outter", value=3), "unknown-option", ("outter",), "outer"),
    (at("margn", value=3.0), "unknown-option", ("margn",), "margin"),
    (at("margin", value="wide"), "wrong-type", ("margin",), ""),
    ({"generator": "draws"}, "missing-option", ("name",), ""),
    (
        {"name": "pipeline", "generator": "draws", "selector": "choose", "outer": "move"},
        "missing-option",
        ("hypergradient",),
        "",
    ),
]


@pytest.mark.parametrize(("method", "code", "place", "near"), WRONG)
def test_a_wrong_value_of_a_method_has_a_code_a_place_and_what_is_near(
    method: Any, code: str, place: tuple[str | int, ...], near: str
) -> None:
    assert_wrong({"method": method}, code, ("method", *place), near)


def assert_wrong(
    tables: dict[str, Any], code: str, place: tuple[str | int, ...], near: str
) -> None:
    error = error_of(**tables)
    suggestions = (near,) if near else ()
    assert (error.code, error.place) == (code, ("run.toml", *place))
    assert error.did_you_mean == suggestions


@pytest.mark.parametrize(
    ("tables", "code", "place", "near"),
    [
        ({"task": "wrok"}, "unknown-task", ("task",), "work"),
        ({"sed": 1}, "unknown-option", ("sed",), "seed"),
        ({"method_name": "x"}, "unknown-option", ("method_name",), "method"),
        ({"seed": -1}, "out-of-range", ("seed",), ""),
        ({"schema": 2}, "not-supported", ("schema",), ""),
        ({"budget": "60"}, "wrong-budget", ("budget",), ""),
        ({"budget": {"seconds": 1, "outer_steps": 2}}, "wrong-budget", ("budget",), ""),
        ({"budget": {"seconds": 0}}, "out-of-range", ("budget", "seconds"), ""),
        ({"budget": {"outer_steps": 2.5}}, "wrong-type", ("budget", "outer_steps"), ""),
        ({"run": {"device": "gpu"}}, "wrong-value", ("run", "device"), ""),
        ({"run": {"out": "a\0b"}}, "wrong-value", ("run", "out"), ""),
        ({"run": {"out": "~nobody-has-this-name/x"}}, "missing-file", ("run", "out"), ""),
        ({"run": {"out": "$NO_SUCH_VARIABLE"}}, "missing-variable", ("run", "out"), ""),
        ({"run": {"dtype": "float16"}}, "unknown-choice", ("run", "dtype"), "float64"),
    ],
)
def test_a_wrong_value_outside_the_method_has_a_code_and_a_place(
    tables: dict[str, Any], code: str, place: tuple[str, ...], near: str
) -> None:
    assert_wrong(tables, code, place, near)


def test_all_errors_come_at_once() -> None:
    method = {
        "name": "recipe",
        "generator": {"count": 3.9, "cont": 1, "lr": 0, "batch_size": 0},
        "hypergradient": {"solver": {"name": "cg"}},
    }
    error = error_of(method=method, seed="0")
    assert [(each.code, ".".join(each.place[1:])) for each in error.errors] == [
        ("wrong-type", "seed"),
        ("unknown-option", "method.generator.cont"),
        ("wrong-type", "method.generator.count"),
        ("wrong-value", "method.generator.lr"),
        ("wrong-value", "method.generator.batch_size"),
        ("unknown-linear-solver", "method.hypergradient.solver.name"),
    ]
    assert error.errors[1].did_you_mean == ("count",)
    with rejects("several-errors", of=ConfigError) as caught:
        RunConfig.from_dict({}, source="run.toml", registry=REGISTRY)
    missing = [(error.code, error.place[1]) for error in caught.value.errors]
    assert missing == [("missing-option", name) for name in ("task", "method", "budget")]


def write(folder: Path, text: str = TEXT) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_set_lays_values_over_the_file(tmp_path: Path) -> None:
    sets = [
        "method.generator.count=4",
        "method.hypergradient.solver=other",
        "method.generator.betas=[0.5, 0.9]",
        "method.generator.label=two words",
        'budget="25 steps"',
        "task.size=7",
        "run.dtype=float64",
    ]
    config = load(write(tmp_path), sets, seed=5, out="elsewhere", registry=REGISTRY)
    assert isinstance(config.method, Pipeline)
    assert config.method.generator == Generator(
        count=4, batch_size=64, betas=(0.5, 0.9), label="two words"
    )
    assert config.method.hypergradient == Estimate(solver=Other())
    assert (config.task, config.seed, config.budget) == (Work(size=7), 5, Budget(outer_steps=25))
    assert config.run == RunSettings(out="elsewhere", dtype="float64")


@pytest.mark.parametrize(
    ("assignment", "code", "place"),
    [
        ("method.generator.coutn=4", "unknown-option", ("method", "generator", "coutn")),
        ("method.generator.count=four", "wrong-type", ("method", "generator", "count")),
        ("method.generator.count=-4", "wrong-value", ("method", "generator", "count")),
        ("count", "wrong-format", ("--set count",)),
        ("a..b=1", "wrong-format", ("--set a..b=1",)),
        ("budget.seconds=3", "wrong-type", ("--set budget.seconds=3",)),
    ],
)
def test_a_wrong_set_is_rejected(
    tmp_path: Path, assignment: str, code: str, place: tuple[str, ...]
) -> None:
    with rejects(code, *place, of=ConfigError):
        load(write(tmp_path), [assignment], registry=REGISTRY)


def test_a_configuration_from_python_needs_no_registry_and_equals_toml() -> None:
    method = Pipeline(
        generator=Generator(lr=1),
        selector=Choose(),
        hypergradient=Estimate(solver=Direct(rtol=1)),
        outer=Move(lr=1),
    )
    config = RunConfig(task=Work(), method=method, budget=Budget(seconds=60))
    again = RunConfig.from_toml(config.to_toml(), registry=REGISTRY)
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


def test_the_hash_knows_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    assert len(config.config_hash) == 8
    assert int(config.config_hash, 16) >= 0
    assert attrs.evolve(config, seed=9, run=RunSettings(out="x")).config_hash == config.config_hash
    others = {
        config.config_hash,
        attrs.evolve(config, budget=Budget(outer_steps=3)).config_hash,
        attrs.evolve(config, task=Work(size=4)).config_hash,
        config_of(method=at("generator", "count", value=9)).config_hash,
        attrs.evolve(config, run=RunSettings(dtype="float64")).config_hash,
    }
    monkeypatch.setattr(Work, "version", "2")
    assert len(others | {config.config_hash}) == 6


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
        out=st.text(st.characters(exclude_characters="~$\0"), min_size=1),
    ),
    method_name=st.sampled_from(["pipeline", "recipe"]),
)


@settings(max_examples=15, deadline=None)
@given(config=configs)
def test_a_configuration_survives_the_trip_through_toml(config: RunConfig) -> None:
    text = config.to_toml()
    again = RunConfig.from_toml(text, registry=REGISTRY)
    assert again == config
    assert again.to_toml() == text
    assert again.config_hash == config.config_hash


# --- the fingerprint of data


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file"), DataError("missing-file", "no such file")]
)
def test_data_that_cannot_be_read_have_the_reason_for_their_contents(error: Exception) -> None:
    def fail() -> None:
        raise error

    assert data_of(SimpleNamespace(made_of=fail)) == {"made_of": str(error)}
    with rejects("wrong-result", of=ConfigError):
        data_of(SimpleNamespace(made_of=lambda: {"rows": b"digest"}))
