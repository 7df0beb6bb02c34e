"""The references of every comparison: θ fixed and x trained on validation rows alone, on both,
or on the true labels too; and a θ drawn by the seed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, network_problem, normal

from hgms.adapters import from_losses
from hgms.methods import BoundedCurvature, KeepBest, LearnedStart, StartingAt, Tilted
from hgms.methods.random_theta import draw_theta
from hgms.runs import RunConfig
from hgms_core import Data, Pipeline

pytestmark = pytest.mark.usefixtures("one_registry")
EXACT = {"steps": 200, "optimizer": {"name": "sgd", "lr": 0.2}, "batch_size": "none"}
NETWORK = network_problem()


def config(name: str, **parts: Any) -> RunConfig:
    table = {"task": "quadratic", "method": {"name": name, **parts}, "budget": "1 steps"}
    return RunConfig.from_dict(table)


def method(name: str, **parts: Any) -> Any:
    return config(name, **parts).method


@pytest.mark.parametrize(
    ("name", "keys", "wrappers"),
    [
        (
            "soba",
            {
                "tilt": 0.0,
                "reference": "none",
                "learn_start": False,
                "mixture": "none",
                "max_curvature": "none",
            },
            set(),
        ),
        ("hg-ms", {"tilt": 2}, {KeepBest, Tilted}),
        ("soba", {"reference": "clean", "tilt": 0.5}, {BoundedCurvature, Tilted, StartingAt}),
        (
            "hg-ms",
            {"generator": "trajectory", "learn_start": True, "tilt": 0.1, "mixture": {"a": 1.0}},
            {KeepBest, Tilted, LearnedStart, StartingAt},
        ),
    ],
)
def test_keys_beside_the_parts_put_their_wrapper_around(
    name: str, keys: dict[str, Any], wrappers: set[type]
) -> None:
    """The configuration is read back the same."""
    found = config(name, **keys)
    layers, inner = set(), found.method
    while not isinstance(inner, Pipeline):
        layers.add(type(inner))
        inner = inner.method  # type: ignore[attr-defined]
    assert layers == wrappers
    table = found.as_dict()["method"]
    assert table["name"] == name
    assert {key: table[key] for key in keys if key != "generator"}.items() <= keys.items()
    assert RunConfig.from_toml(found.to_toml()) == found


def points(rows: int, around: float, seed: int) -> Data:
    return Data.of({"a": around + normal(rows, 2, seed=seed)})


# x* = (mean of the training rows + θ) under g, the mean of validation rows under f; θ = 5 is the
# reference "clean".
PROBLEM = from_losses(
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
ROWS = torch.cat([PROBLEM.upper_data[role].whole["a"] for role in ("differentiate", "select")])
TRAIN, ABOVE = PROBLEM.lower_data.whole["a"].mean(0), ROWS.mean(0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("uniform", TRAIN),
        ("theta0", TRAIN),
        ("validation-only", ABOVE),
        ("uniform-tilted", (TRAIN + ABOVE) / 2),
        ("oracle-clean", TRAIN + 5),
        ("oracle-joint", (TRAIN + 5 + ABOVE) / 2),
        ("random-theta", TRAIN + draw_theta(PROBLEM, 0, 1.0)["t"]),
    ],
)
def test_each_reference_ends_at_its_own_minimiser_and_moves_no_theta(
    name: str, expected: torch.Tensor
) -> None:
    parts: dict[str, Any] = {"generator": EXACT, "keep": "last"}
    made = method(name, **({"method": parts} if name == "validation-only" else parts))
    state, _ = made.step(PROBLEM, made.init(PROBLEM, 0), 0.0)
    theta, x = made.result(state)
    assert_same(x["x"], expected, atol=1e-12)
    first = {"oracle": PROBLEM.references["clean"], "random": draw_theta(PROBLEM, 0, 1.0)}
    assert_same(theta, first.get(name.split("-")[0], PROBLEM.theta0))


def test_random_theta_is_drawn_by_the_seed_around_the_first_and_projected() -> None:
    """Moments of 20,000 coordinates."""
    wide = evolve(PROBLEM, theta0={"t": torch.full((20_000,), 2.0, dtype=F64)})
    theta, again, other = (draw_theta(wide, seed, 0.5)["t"] for seed in (3, 3, 4))
    assert abs(float(theta.mean()) - 2) < 4 * 0.5 / 20_000**0.5
    assert abs(float(theta.std()) / 0.5 - 1) < 4 / (2 * 20_000) ** 0.5
    assert torch.equal(theta, again)
    assert not torch.equal(theta, other)
    positive = evolve(wide, project=lambda theta: {"t": theta["t"].clamp(min=0.0)})
    assert float(draw_theta(positive, 3, 5.0)["t"].min()) == 0.0


def test_training_rows_and_stopping_rows_do_not_reach_what_validation_alone_trains() -> None:
    made = method(
        "validation-only", method={"generator": {"steps": 5, "batch_size": 6}, "keep": "last"}
    )
    other = network_problem(rows=30).lower_data
    changed = evolve(
        NETWORK,
        g=lambda theta, x, batch: float("nan") * NETWORK.g(theta, x, batch),
        lower_data=other,
        upper_data={**NETWORK.upper_data, "stop": other},
    )
    ends = []
    for each in (NETWORK, changed):
        state = made.init(each, 0)
        for _ in range(3):
            state, record = made.step(each, state, 0.0)
        ends.append(made.result(state)[1])
        assert record["oracle_calls"] == 3 * 6  # 5 gradients and a value of f each
    assert_same(*ends)
    assert not torch.equal(ends[0]["w"], NETWORK.x0["w"])
