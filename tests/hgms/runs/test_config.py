"""Configurations: strict, every error at once with its place, and the same again after a trip
through TOML.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from attrs import evolve
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

from hgms.config import Budget
from hgms.methods import KeepBest
from hgms.runs import RunConfig, RunSettings, load
from hgms_core import Pipeline
from hgms_core.errors import ConfigError

PLAIN = Pipeline(
    generator=Generator(),
    selector=Choose(),
    hypergradient=Estimate(solver=Direct(), fallback=Other()),
    outer=Move(),
)


@pytest.mark.parametrize(
    ("method", "pipeline"),
    [
        (
            "recipe",
            KeepBest(
                method=Pipeline(
                    generator=Generator(count=8, batch_size=64),
                    selector=Choose(),
                    hypergradient=Estimate(solver=Direct(rtol=1e-3)),
                    outer=Move(schedule=Schedule(kind="cosine", final=0.1)),
                )
            ),
        ),
        # overrides change fields or replace parts
        (
            {
                "name": "recipe",
                "generator": {"count": 2, "batch_size": "none"},
                "hypergradient": {"solver": {"name": "other", "shift": 2}},
                "outer": {"schedule": {"final": 0.5}},
            },
            KeepBest(
                method=Pipeline(
                    generator=Generator(count=2, batch_size=None),
                    selector=Choose(),
                    hypergradient=Estimate(solver=Other(shift=2.0)),
                    outer=Move(schedule=Schedule(kind="cosine", final=0.5)),
                )
            ),
        ),
        (
            {
                "name": "pipeline",
                "generator": "draws",
                "selector": {"name": "choose"},
                "hypergradient": {
                    "name": "estimate",
                    "solver": "direct",
                    "fallback": {"name": "other"},
                },
                "outer": "move",
            },
            PLAIN,
        ),
    ],
    ids=["composition", "overrides", "from scratch"],
)
def test_a_table_or_a_name_is_a_pipeline(method: Any, pipeline: Pipeline) -> None:
    config = config_of(method=method)
    name = method if isinstance(method, str) else method["name"]
    wanted = (pipeline, name, Work(), Budget(seconds=60.0), 0)
    found = (config.method, config.method_name, config.task, config.budget, config.seed)
    assert found == wanted


def at(*path: str, value: Any) -> dict[str, Any]:
    """The recipe with one value set far down."""
    table: Any = value
    for part in reversed(path):
        table = {part: table}
    return {"name": "recipe", **table}


SOLVER = ("hypergradient", "solver")


# the table, the code and the place of its error, and the name that is near
WRONG: list[tuple[Any, ...]] = [
    (at(*SOLVER, "rtol", value=-1.0), "wrong-value", (*SOLVER, "rtol"), ""),
    (at(*SOLVER, "max_steps", value=3.9), "wrong-type", (*SOLVER, "max_steps"), ""),
    (at(*SOLVER, "max_step", value=3), "unknown-option", (*SOLVER, "max_step"), "max_steps"),
    (at(*SOLVER, "name", value="directt"), "unknown-linear-solver", (*SOLVER, "name"), "direct"),
    (at(*SOLVER, value={"rtol": 0.5, "max_steps": 500}), "conflicting-options", SOLVER, ""),
    (at(*SOLVER, "guess", value=3), "not-supported", (*SOLVER, "guess"), ""),
    (at(*SOLVER, value=3), "wrong-type", SOLVER, ""),
    (at("generator", "noisy", value=1), "wrong-type", ("generator", "noisy"), ""),
    (at("generator", "batch_size", value=0), "wrong-value", ("generator", "batch_size"), ""),
    (at("generator", "betas", value=[0.9]), "wrong-length", ("generator", "betas"), ""),
    (at("generator", "spread", value=[1, "a"]), "wrong-type", ("generator", "spread", 1), ""),
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
    ({"generator": "draws"}, "missing-option", ("name",), ""),
    (
        {"name": "pipeline", "generator": "draws", "selector": "choose", "outer": "move"},
        "missing-option",
        ("hypergradient",),
        "",
    ),
]


OUTSIDE: list[tuple[Any, ...]] = [
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
    ({"run": {"matmul": "quick"}}, "unknown-choice", ("run", "matmul"), ""),
    ({"run": {"compile": "always"}}, "wrong-type", ("run", "compile"), ""),
    # an integer that no float holds
    ({"run": {"checkpoint_seconds": 10**400}}, "out-of-range", ("run", "checkpoint_seconds"), ""),
]


@pytest.mark.parametrize(
    ("tables", "code", "place", "near"),
    [({"method": row[0]}, row[1], ("method", *row[2]), row[3]) for row in WRONG] + OUTSIDE,
)
def test_a_wrong_value_has_a_code_a_place_and_what_is_near(
    tables: dict[str, Any], code: str, place: tuple[str | int, ...], near: str
) -> None:
    error = error_of(**tables)
    assert (error.code, error.place) == (code, ("run.toml", *place))
    assert error.did_you_mean == ((near,) if near else ())


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
    assert isinstance(config.method, KeepBest)
    pipeline: Any = config.method.method
    assert pipeline.generator == Generator(
        count=4, batch_size=64, betas=(0.5, 0.9), label="two words"
    )
    assert pipeline.hypergradient == Estimate(solver=Other())
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


def test_the_hash_knows_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    assert evolve(config, seed=9, run=RunSettings(out="x")).config_hash == config.config_hash
    others = {
        config.config_hash,
        evolve(config, budget=Budget(outer_steps=3)).config_hash,
        evolve(config, task=Work(size=4)).config_hash,
        config_of(method=at("generator", "count", value=9)).config_hash,
        *(
            evolve(config, run=RunSettings(**settings)).config_hash
            for settings in (
                {"dtype": "float64"},
                {"matmul": "exact"},
                {"matmul": "fast"},
                {"compile": True},
                {"compile": False},
            )
        ),
    }
    monkeypatch.setattr(Work, "version", "2")
    assert len(others | {config.config_hash}) == 10


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
plain_pipelines = st.builds(
    Pipeline,
    generator=generators,
    selector=st.just(Choose()),
    hypergradient=st.builds(Estimate, solver=solvers, fallback=st.none() | solvers),
    outer=st.builds(
        Move,
        lr=numbers,
        schedule=st.builds(Schedule, kind=st.sampled_from(["constant", "cosine"]), final=positive),
    ),
)
pipelines = plain_pipelines | st.builds(KeepBest, method=plain_pipelines)
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
        matmul=st.sampled_from(["auto", "exact", "fast"]),
        compile=st.sampled_from(["auto", True, False]),
        out=st.text(st.characters(codec="utf-8", exclude_characters="~$\0"), min_size=1),
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


# --- files that nobody vouches for


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (str(tmp_path / "absent.toml"), str(tmp_path / "pipe.toml"), "/dev/zero"):
        with rejects("unreadable-file", path, of=ConfigError):
            load(path, registry=REGISTRY)
    with rejects("wrong-format", "run.toml", of=ConfigError) as caught:
        load(write(tmp_path, "seed = \n"), registry=REGISTRY)
    assert "(at line 1, column 8)" in caught.value.message
