"""Outer optimisers against torch.optim, and projections against a solver that knows nothing of
sorting.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import F64, assert_same, normal, rejects
from torch import Tensor

from hgms.outer import (
    Adam,
    AdamW,
    ExponentiatedGradient,
    ProjectedGradient,
    Projection,
    Schedule,
    Sgd,
)
from hgms_core import Tree, norm

THETA = {"a": normal(3, 2), "b": normal(4, seed=1), "c": normal(seed=2)}
STEPS = 12
SLOPES: list[Tree] = [
    {
        name: (0.5 if step % 3 else 3.0) * normal(*leaf.shape, seed=10 * step + i)
        for i, (name, leaf) in enumerate(THETA.items())
    }
    for step in range(STEPS)
]
SIZES = [float(norm(slope)) for slope in SLOPES]


def tensor(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=F64)


PAIRS: dict[str, tuple[Any, Any]] = {
    "sgd": (Sgd(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (Sgd(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "projected": (ProjectedGradient(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adam": (
        Adam(lr=0.1, betas=(0.8, 0.9), eps=1e-5),
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9), eps=1e-5),
    ),
    "adamw": (
        AdamW(lr=0.1, weight_decay=0.2),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2),
    ),
}
OPTIONS: dict[str, tuple[dict[str, Any], Any]] = {
    # ours, and the factors of the rate
    "constant": ({}, lambda t: 1.0),
    "clipped": ({"clip": 2.0}, lambda t: 1.0),
    "cosine": (
        {"schedule": Schedule(kind="cosine", final=0.1)},
        lambda t: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * t / STEPS)),
    ),
    "inverse": (
        {"schedule": Schedule(kind="inverse", decay_steps=3, power=0.5)},
        lambda t: (1 + t / 3) ** -0.5,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("options", OPTIONS)
def test_each_is_torch_optim(name: str, options: str) -> None:
    (ours, make), (changes, rates) = PAIRS[name], OPTIONS[options]
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in THETA.items()}
    optimizer = make(list(leaves.values()))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
    assert min(SIZES) < 2.0 < max(SIZES)
    outer = evolve(ours, **changes)
    theta, state = THETA, outer.init(THETA)
    for step, (slope, size) in enumerate(zip(SLOPES, SIZES, strict=True)):
        for name, leaf in leaves.items():
            leaf.grad = slope[name] * (min(1, 2.0 / size) if "clip" in changes else 1)
        optimizer.step()
        scheduler.step()
        theta, state = outer.step(theta, slope, state, step / STEPS)
    assert_same(theta, {k: leaf.detach() for k, leaf in leaves.items()}, rtol=1e-12, atol=1e-14)
    assert state["step"] == STEPS


def test_a_zero_gradient_is_clipped_to_zero_and_a_cosine_stays_at_its_floor() -> None:
    theta, outer = {"t": normal(3)}, Sgd(lr=1.0, clip=1.0)
    assert_same(outer.step(theta, {"t": 0 * theta["t"]}, outer.init(theta), 0.0)[0], theta)
    shape = Schedule(kind="cosine", final=0.25)
    factors = [shape.factor(9, progress) for progress in (0.0, 0.5, 1.0, 1.7)]
    assert factors == pytest.approx([1.0, 0.625, 0.25, 0.25], rel=1e-15)


# --- projections


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
def test_the_simplex_projection_is_the_root_of_its_optimality_condition(
    values: list[float],
) -> None:
    # KKT: p = max(z − τ, 0) with Σp = 1. τ by bracketing, without sorting.
    z = np.array(values)
    ends = (z.min() - 2, z.max())
    tau = scipy.optimize.brentq(
        lambda t: np.maximum(z - t, 0).sum() - 1, *ends, xtol=1e-14, rtol=1e-14
    )
    found = Projection(kind="simplex").apply({"p": tensor(*values)})["p"]
    assert_same(found, torch.from_numpy(np.maximum(z - tau, 0)), rtol=0, atol=1e-9)


PROJECTIONS = {
    "none": (Projection(), lambda tree: True),
    "box": (
        Projection(kind="box", low=-0.5, high=0.25),
        lambda tree: all(bool(((x >= -0.5) & (x <= 0.25)).all()) for x in tree.values()),
    ),
    "ball": (
        Projection(kind="ball", radius=0.7),
        lambda tree: float(norm(tree)) <= 0.7 * (1 + 1e-14),
    ),
    "simplex": (
        Projection(kind="simplex"),
        lambda tree: all(
            bool((x >= 0).all()) and abs(float(x.sum()) - 1) < 1e-9 for x in tree.values()
        ),
    ),
}


@pytest.mark.parametrize("kind", PROJECTIONS)
@given(seed=st.integers(0, 1000), scale=st.sampled_from([0.0, 1e-3, 1.0, 1e6]))
@settings(max_examples=10, deadline=None)
def test_a_projection_is_feasible_idempotent_and_nonexpansive(
    kind: str, seed: int, scale: float
) -> None:
    projection, feasible = PROJECTIONS[kind]
    point = {"a": scale * normal(3, 2, seed=seed), "b": scale * normal(4, seed=seed + 1)}
    other = {name: leaf + normal(*leaf.shape, seed=seed + 2) for name, leaf in point.items()}
    found, moved = projection.apply(point), projection.apply(other)
    assert feasible(found)
    assert_same(projection.apply(found), found, rtol=1e-12, atol=1e-10)
    between, apart = (
        float(norm({name: a[name] - b[name] for name in a}))
        for a, b in ((found, moved), (point, other))
    )
    assert between <= apart * (1 + 1e-9)


def test_the_ball_is_for_all_leaves_together_and_keeps_the_direction() -> None:
    found = Projection(kind="ball", radius=0.5).apply(THETA)
    assert_same(found, {name: 0.5 * leaf / norm(THETA) for name, leaf in THETA.items()}, rtol=1e-12)


# --- where they end

CENTRE, SCALE = tensor([2.0, -3.0, 0.3], [1.0, 4.0, 2.0])
BOX = {"lr": 0.2, "projection": Projection(kind="box", low=-1.0, high=1.0)}
THIRDS = tensor(1 / 3, 1 / 3, 1 / 3)


@pytest.mark.parametrize(
    ("outer", "start", "slope", "best"),
    [
        # the minimum of a quadratic on a box; Adam only stays in it
        (ProjectedGradient(**BOX), 0 * THIRDS, lambda t: SCALE * (t - CENTRE), (1.0, -1.0, 0.3)),
        (Adam(**BOX), 0 * THIRDS, lambda t: SCALE * (t - CENTRE), None),
        (AdamW(**BOX), 0 * THIRDS, lambda t: SCALE * (t - CENTRE), None),
        # min ½‖p − q‖² over the simplex has the solution q; and min ⟨c, p⟩ the best vertex
        (
            ExponentiatedGradient(lr=1.0),
            THIRDS,
            lambda p: p - tensor(0.1, 0.2, 0.7),
            (0.1, 0.2, 0.7),
        ),
        (ExponentiatedGradient(lr=1.0), THIRDS, lambda p: tensor(0.0, -1.0, 1.0), (0.0, 1.0, 0.0)),
    ],
)
def test_steps_stay_feasible_and_reach_the_minimum(
    outer: Any, start: Tensor, slope: Any, best: Any
) -> None:
    theta, state = {"t": start}, outer.init({"t": start})
    mixture = isinstance(outer, ExponentiatedGradient)
    for _ in range(300):
        theta, state = outer.step(theta, {"t": slope(theta["t"])}, state, 0.0)
        if mixture:
            assert float(theta["t"].sum()) == pytest.approx(1.0, abs=1e-12)
        else:
            assert float(theta["t"].abs().max()) <= 1.0
    if best is not None:
        close = {"rtol": 1e-6, "atol": 1e-12} if mixture else {"rtol": 1e-12}
        assert_same(theta["t"], tensor(*best), **close)


def test_exponentiated_gradient_is_mirror_descent_and_safe() -> None:
    p, h = tensor([0.2, 0.0, 0.8], [1.0, -5.0, -2.0])
    weights = p * torch.exp(-0.3 * h)
    for lr, expected in ((0.3, weights / weights.sum()), (1e3, tensor(0.0, 0.0, 1.0))):
        outer = ExponentiatedGradient(lr=lr)
        moved, _ = outer.step({"p": p}, {"p": h}, outer.init({"p": p}), 0.0)
        assert_same(moved["p"], expected, rtol=1e-12)


@pytest.mark.parametrize("start", [[0.0, 0.0], [-1.0, -2.0], [1.0, math.nan]])
def test_exponentiated_gradient_refuses_logits(start: list[float]) -> None:
    with rejects("wrong-value", "theta0", "p"):
        ExponentiatedGradient().init({"p": torch.tensor(start)})


@pytest.mark.parametrize(
    ("make", "options", "code", "field"),
    [
        (Sgd, {"lr": 0.0}, "out-of-range", "lr"),
        (Sgd, {"momentum": 1.0}, "out-of-range", "momentum"),
        (Adam, {"betas": (0.9, 1.0)}, "out-of-range", "betas.1"),
        (AdamW, {"weight_decay": -1.0}, "out-of-range", "weight_decay"),
        (Projection, {"kind": "box", "low": 2.0, "high": 1.0}, "out-of-range", "high"),
        (Projection, {"radius": 0.0}, "out-of-range", "radius"),
        (Schedule, {"final": 1.5}, "out-of-range", "final"),
        (Schedule, {"kind": "step"}, "unknown-choice", "kind"),
    ],
)
def test_bad_fields_are_named(make: Any, options: dict[str, Any], code: str, field: str) -> None:
    name, *position = field.split(".")
    with rejects(code, name, *map(int, position)):
        make(**options)
