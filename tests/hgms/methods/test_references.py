"""The references of every comparison: θ fixed and x trained on validation rows alone, on both,
or on the true labels too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, network_problem, normal, rejects

from hgms.config.as_table import AT_REST
from hgms.methods import LearnedStart, StartingAt, Tilted, references
from hgms.methods.random_theta import drawn
from hgms.rows import joined
from hgms.runs import RunConfig
from hgms_core import Data, Method, Pipeline, Problem

WRAPPERS = (Tilted, LearnedStart, StartingAt)
CPU = torch.device("cpu")
EXACT = {"steps": 200, "optimizer": "sgd", "lr": 0.2, "batch_size": "none", "schedule": "constant"}


def method(name: str, **parts: Any) -> Method:
    return RunConfig.from_dict(
        {"task": "quadratic", "method": {"name": name, **parts}, "budget": "1 steps"}
    ).method


@pytest.mark.parametrize(
    ("keys", "wrappers"),
    [
        ({}, set()),
        ({"tilt": 0.0, "reference": "none", "learn_start": False, "mixture": "none"}, set()),
        ({"tilt": 2}, {Tilted}),
        ({"reference": "clean", "tilt": 0.5}, {Tilted, StartingAt}),
        ({"mixture": {"a": 1.0}}, {StartingAt}),
        (
            {"generator": "trajectory", "learn_start": True, "tilt": 0.1, "reference": "clean"},
            set(WRAPPERS),
        ),
    ],
)
def test_keys_beside_the_parts_put_their_wrapper_around(
    keys: dict[str, Any], wrappers: set[type]
) -> None:
    """On a method of these parts, whichever package it comes from; the configuration is read
    back the same.
    """
    for name in ("hg-ms", "soba") if "generator" not in keys else ("hg-ms",):
        config = RunConfig.from_dict(
            {"task": "quadratic", "method": {"name": name, **keys}, "budget": "1 steps"}
        )
        layers = set()
        inner = config.method
        while not isinstance(inner, Pipeline):
            layers.add(type(inner))
            inner = inner.method  # type: ignore[attr-defined]
        assert layers == wrappers
        table = config.resolved()["method"]
        assert table["name"] == name
        assert [key for key in keys if key in AT_REST and table[key] != keys[key]] == []
        assert RunConfig.from_toml(config.to_toml()) == config


def test_wrappers_are_for_pipelines() -> None:
    with rejects("unknown-option", "method", "tilt"):
        method("validation-only", tilt=1.0)
    with rejects("wrong-value", "method"):
        Tilted(method=method("random-search"), tilt=1.0)


def points(rows: int, around: float, seed: int) -> Data:
    return Data.of({"a": around + normal(rows, 2, seed=seed)})


# x* = (mean of the training rows + θ) under g, the mean of validation rows under f; θ = 5 is the
# reference "clean".
PROBLEM = Problem(
    theta0={"t": torch.zeros(1, dtype=F64)},
    x0={"x": torch.zeros(2, dtype=F64)},
    g=lambda theta, x, batch: 0.5 * (x["x"] - theta["t"] - batch["a"]).square().sum(-1).mean(),
    f=lambda theta, x, batch: 0.5 * (x["x"] - batch["a"]).square().sum(-1).mean(),
    lower_data=points(12, 3.0, 1),
    upper_data={
        "differentiate": points(9, -1.0, 2),
        "select": points(5, -2.0, 3),
        "stop": points(4, 1.0, 4),
    },
    references={"clean": {"t": torch.full((1,), 5.0, dtype=F64)}},
)
TRAIN, FIRST, SECOND = (
    data.whole["a"]
    for data in (
        PROBLEM.lower_data,
        PROBLEM.upper_data["differentiate"],
        PROBLEM.upper_data["select"],
    )
)
BOTH = torch.cat([FIRST, SECOND])
EXPECTED = {
    "uniform": TRAIN.mean(0),
    "validation-only": BOTH.mean(0),
    "uniform-tilted": (TRAIN.mean(0) + BOTH.mean(0)) / 2,
    "oracle-clean": TRAIN.mean(0) + 5,
    "oracle-joint": (TRAIN.mean(0) + 5 + BOTH.mean(0)) / 2,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_each_reference_ends_at_its_own_minimiser_and_moves_no_theta(name: str) -> None:
    parts: dict[str, Any] = {"generator": EXACT, "keep": "last"}
    made = method(name, **({"method": parts} if name == "validation-only" else parts))
    state, _ = made.step(PROBLEM, made.init(PROBLEM, 0), 0.0)
    theta, x = made.result(state)
    assert_same(x["x"], EXPECTED[name], atol=1e-12)
    assert_same(theta, PROBLEM.references["clean"] if name.startswith("oracle") else PROBLEM.theta0)


def test_random_theta_is_drawn_once_by_the_seed_around_the_first_and_projected() -> None:
    """Moments of 20,000 coordinates; one seed, one θ, whatever the steps; Θ is kept."""
    wide = evolve(PROBLEM, theta0={"t": torch.full((20_000,), 2.0, dtype=F64)})
    theta = drawn(wide, 3, 0.5)["t"]
    assert abs(float(theta.mean()) - 2) < 4 * 0.5 / 20_000**0.5
    assert abs(float(theta.std()) / 0.5 - 1) < 4 / (2 * 20_000) ** 0.5
    assert_same(theta, drawn(wide, 3, 0.5)["t"])
    assert not torch.equal(theta, drawn(wide, 4, 0.5)["t"])
    positive = evolve(wide, project=lambda theta: {"t": theta["t"].clamp(min=0.0)})
    assert float(drawn(positive, 3, 5.0)["t"].min()) == 0.0

    made = method("random-theta", generator=EXACT, keep="last")
    state, _ = made.step(PROBLEM, made.init(PROBLEM, 5), 0.0)
    theta0, x = made.result(state)
    assert_same(theta0, drawn(PROBLEM, 5, 1.0))
    assert_same(x["x"], TRAIN.mean(0) + theta0["t"], atol=1e-12)


def test_theta0_is_uniform_by_another_name() -> None:
    uniform, theta0 = (
        item for item in references.hgms_register_methods() if item.name in ("uniform", "theta0")
    )
    assert evolve(theta0, name="uniform", summary=uniform.summary) == uniform
    assert (theta0.parts, theta0.on) == (uniform.parts, uniform.on)
    assert method("theta0") == method("uniform")


def test_rows_of_both_roles_are_joined_in_every_shape_of_batch() -> None:
    both = joined(PROBLEM.upper_data["differentiate"], PROBLEM.upper_data["select"])
    everything = torch.cat([FIRST, SECOND])
    assert both.size == 14
    assert torch.equal(both.batch(None)["a"], everything)
    index = torch.tensor([[[0, 13], [9, 8]], [[4, 10], [13, 1]]])
    assert torch.equal(both.rows(index)["a"], everything[index])
    assert joined(Data.none(), both) is both
    assert joined(both, Data.none()) is both


def test_training_rows_and_stopping_rows_do_not_reach_what_validation_alone_trains() -> None:
    problem = network_problem()
    made = method(
        "validation-only", method={"generator": {"steps": 5, "batch_size": 6}, "keep": "last"}
    )
    other = network_problem(rows=30)
    changed = evolve(
        problem,
        g=lambda theta, x, batch: float("nan") * problem.g(theta, x, batch),
        lower_data=other.lower_data,
        upper_data={**problem.upper_data, "stop": other.lower_data},
    )
    ends = []
    for each in (problem, changed):
        state = made.init(each, 0)
        for _ in range(3):
            state, record = made.step(each, state, 0.0)
        ends.append(made.result(state)[1])
        assert record["oracle_calls"] == 3 * 6  # 5 gradients and a value of f each
    assert_same(*ends)
    assert not torch.equal(ends[0]["w"], problem.x0["w"])


SIZES = {"train_size": 60, "validation_size": 50, "test_size": 50, "hidden": 5}


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("validation-only", {"name": "hyper-cleaning", **SIZES}),
        ("uniform-tilted", {"name": "ridge-cv"}),
        pytest.param("uniform-tilted", {"name": "logistic-cv"}, marks=pytest.mark.extended),
    ],
)
def test_the_references_learn_on_tasks_with_rows(name: str, task: dict[str, Any]) -> None:
    parts: dict[str, Any] = {"generator": {"steps": 20}}
    table = {
        "task": task,
        "method": {"name": name, **({"method": parts} if name == "validation-only" else parts)},
    }
    config = RunConfig.from_dict({**table, "budget": "3 steps"})
    assert RunConfig.from_toml(config.to_toml()) == config
    problem = config.task.problem(0, CPU, F64)
    state = config.method.init(problem, 0)
    for _ in range(3):
        state, _ = config.method.step(problem, state, 0.0)
    theta, x = config.method.result(state)
    stop = problem.upper_data["stop"].batch(None)
    assert float(problem.f(theta, x, stop)) < 0.95 * float(
        problem.f(problem.theta0, problem.x0, stop)
    )
    assert_same(theta, problem.theta0)
