"""Outer optimisers against torch.optim, and projections against a solver that knows nothing of
sorting.
"""

from __future__ import annotations

import copy
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

from hgms.outer import (
    Adam,
    AdamW,
    ExponentiatedGradient,
    ProjectedGradient,
    Projection,
    Schedule,
    Sgd,
)
from hgms_core import OuterOptimizer, State, Tree, norm

THETA = {"a": normal(3, 2), "b": normal(4, seed=1), "c": normal(seed=2)}
STEPS = 12


def slopes(step: int) -> Tree:
    return {
        name: (0.5 if step % 3 else 3.0) * normal(*leaf.shape, seed=10 * step + i)
        for i, (name, leaf) in enumerate(THETA.items())
    }


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
EVERYTHING = [pair[0] for pair in PAIRS.values()] + [ExponentiatedGradient(lr=0.1)]


def with_torch(make: Any, clip: float | None = None, rates: Any = None) -> Tree:
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in THETA.items()}
    optimizer = make(list(leaves.values()))
    scheduler = None if rates is None else torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
    for step in range(STEPS):
        for name, leaf in leaves.items():
            leaf.grad = slopes(step)[name]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(leaves.values()), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def with_ours(outer: Any, start: Tree = THETA) -> tuple[Tree, State]:
    theta = start
    state = outer.init(start)
    for step in range(STEPS):
        theta, state = outer.step(theta, slopes(step), state, step / STEPS)
    return theta, state


@pytest.mark.parametrize("name", PAIRS)
def test_each_is_torch_optim(name: str) -> None:
    ours, theirs = PAIRS[name]
    theta, state = with_ours(ours)
    assert_same(theta, with_torch(theirs), rtol=1e-12, atol=1e-14)
    assert state["step"] == STEPS


@pytest.mark.parametrize("name", PAIRS)
def test_clipping_bounds_all_leaves_together(name: str) -> None:
    ours, theirs = PAIRS[name]
    theta, _ = with_ours(evolve(ours, clip=2.0))
    # torch divides by the norm + 1e-6
    assert_same(theta, with_torch(theirs, clip=2.0), rtol=1e-4, atol=1e-6)
    longest = max(float(norm(slopes(step))) for step in range(STEPS))
    shortest = min(float(norm(slopes(step))) for step in range(STEPS))
    assert shortest < 2.0 < longest


def test_a_zero_gradient_is_clipped_to_zero() -> None:
    zero = {"t": torch.zeros(3, dtype=F64)}
    outer = Sgd(lr=1.0, clip=1.0)
    assert_same(outer.step({"t": normal(3)}, zero, outer.init(zero), 0.0)[0], {"t": normal(3)})


SCHEDULES = {
    "cosine": (
        Schedule(kind="cosine", final=0.1),
        lambda t: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * t / STEPS)),
    ),
    "inverse": (Schedule(kind="inverse", decay_steps=3), lambda t: 1 / (1 + t / 3)),
    "constant": (Schedule(), lambda t: 1.0),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_are_those_of_torch(name: str, schedule: str) -> None:
    ours, theirs = PAIRS[name]
    shape, rates = SCHEDULES[schedule]
    theta, _ = with_ours(evolve(ours, schedule=shape))
    assert_same(theta, with_torch(theirs, rates=rates), rtol=1e-12, atol=1e-14)


def test_the_cosine_ends_at_its_floor_and_stays_there() -> None:
    shape = Schedule(kind="cosine", final=0.25)
    assert shape.factor(0, 0.0) == 1.0
    assert shape.factor(5, 0.5) == pytest.approx(0.625)
    assert shape.factor(9, 1.0) == shape.factor(9, 1.7) == 0.25


@pytest.mark.parametrize("outer", EVERYTHING, ids=lambda outer: outer.name)
def test_a_step_changes_nothing_it_was_given(outer: Any) -> None:
    assert isinstance(outer, OuterOptimizer)
    start = {name: leaf.abs() + 0.1 for name, leaf in THETA.items()}
    _, state = with_ours(outer, start)
    before = copy.deepcopy((start, state))
    one, after = outer.step(start, slopes(0), state, 0.3)
    two, again = outer.step(start, slopes(0), state, 0.3)
    assert_same((start, state), before)
    assert_same((one, after), (two, again))
    assert all(one[name].shape == leaf.shape for name, leaf in THETA.items())


# --- projections

vectors = st.lists(st.floats(-5, 5), min_size=1, max_size=6)


@given(vectors)
@settings(max_examples=60, deadline=None)
def test_the_simplex_projection_is_the_root_of_its_optimality_condition(
    values: list[float],
) -> None:
    # KKT: p = max(z − τ, 0) with Σp = 1. τ by bracketing, without sorting.
    z = np.array(values)
    tau = scipy.optimize.brentq(
        lambda t: np.maximum(z - t, 0).sum() - 1, z.min() - 2, z.max(), xtol=1e-14, rtol=1e-14
    )
    found = Projection(kind="simplex").apply({"p": torch.tensor(values, dtype=F64)})["p"]
    assert_same(found, torch.from_numpy(np.maximum(z - tau, 0)), rtol=0, atol=1e-9)


@given(st.lists(st.floats(-2, 2), min_size=3, max_size=3))
@settings(max_examples=15, deadline=None)
def test_no_point_of_the_simplex_is_nearer(values: list[float]) -> None:
    z = torch.tensor(values, dtype=F64)
    found = Projection(kind="simplex").apply({"p": z})["p"]
    grid = torch.linspace(0, 1, 41, dtype=F64)
    a, b = torch.meshgrid(grid, grid, indexing="ij")
    points = torch.stack([a, b, 1 - a - b], -1).reshape(-1, 3)
    points = points[(points >= 0).all(1)]
    assert float((found - z).norm()) <= float((points - z).norm(dim=1).min()) + 1e-12


PROJECTIONS = {
    "none": Projection(),
    "box": Projection(kind="box", low=-0.5, high=0.25),
    "ball": Projection(kind="ball", radius=0.7),
    "simplex": Projection(kind="simplex"),
}


@pytest.mark.parametrize("kind", PROJECTIONS)
@given(seed=st.integers(0, 1000), scale=st.sampled_from([0.0, 1e-3, 1.0, 1e6]))
@settings(max_examples=25, deadline=None)
def test_a_projection_is_feasible_idempotent_and_nonexpansive(
    kind: str, seed: int, scale: float
) -> None:
    projection = PROJECTIONS[kind]
    point = {"a": scale * normal(3, 2, seed=seed), "b": scale * normal(4, seed=seed + 1)}
    other = {name: leaf + normal(*leaf.shape, seed=seed + 2) for name, leaf in point.items()}
    found = projection.apply(point)
    moved = projection.apply(other)
    if kind == "box":
        assert all(bool(((leaf >= -0.5) & (leaf <= 0.25)).all()) for leaf in found.values())
    if kind == "ball":
        assert float(norm(found)) <= 0.7 * (1 + 1e-14)
    if kind == "simplex":
        assert all(
            bool((leaf >= 0).all()) and float(leaf.sum()) == pytest.approx(1, abs=1e-9)
            for leaf in found.values()
        )
    assert_same(projection.apply(found), found, rtol=1e-12, atol=1e-10)
    between = norm({name: found[name] - moved[name] for name in found})
    apart = norm({name: point[name] - other[name] for name in point})
    assert float(between) <= float(apart) * (1 + 1e-9)


def test_the_ball_is_for_all_leaves_together_and_keeps_the_direction() -> None:
    found = Projection(kind="ball", radius=0.5).apply(THETA)
    assert float(norm(found)) == pytest.approx(0.5, rel=1e-12)
    assert_same(found, {name: 0.5 * leaf / norm(THETA) for name, leaf in THETA.items()}, rtol=1e-12)


def test_projected_gradient_minimises_a_quadratic_on_a_box() -> None:
    centre = torch.tensor([2.0, -3.0, 0.3], dtype=F64)
    scale = torch.tensor([1.0, 4.0, 2.0], dtype=F64)
    outer = ProjectedGradient(lr=0.2, projection=Projection(kind="box", low=-1.0, high=1.0))
    theta = {"t": torch.zeros(3, dtype=F64)}
    state = outer.init({"t": torch.zeros(3, dtype=F64)})
    for _ in range(200):
        theta, state = outer.step(theta, {"t": scale * (theta["t"] - centre)}, state, 0.0)
    assert_same(theta["t"], torch.tensor([1.0, -1.0, 0.3], dtype=F64), rtol=1e-12)


@pytest.mark.parametrize("outer", [Adam, AdamW])
def test_adaptive_steps_are_projected_too(outer: Any) -> None:
    made = outer(lr=0.5, projection=Projection(kind="box", low=-0.1, high=0.1))
    theta, _ = with_ours(made)
    assert max(float(leaf.abs().max()) for leaf in theta.values()) <= 0.1


def test_exponentiated_gradient_finds_a_mixture() -> None:
    # min ½‖p − q‖² over the simplex has the solution q; and min ⟨c, p⟩ the best vertex.
    q = torch.tensor([0.1, 0.2, 0.7], dtype=F64)
    outer = ExponentiatedGradient(lr=1.0)
    theta = {"p": torch.full((3,), 1 / 3, dtype=F64)}
    state = outer.init({"p": torch.full((3,), 1 / 3, dtype=F64)})
    for _ in range(400):
        theta, state = outer.step(theta, {"p": theta["p"] - q}, state, 0.0)
        assert float(theta["p"].sum()) == pytest.approx(1.0, abs=1e-12)
    assert_same(theta["p"], q, rtol=1e-6)
    vertex = {"p": torch.full((3,), 1 / 3, dtype=F64)}
    for _ in range(100):
        vertex, state = outer.step(
            vertex, {"p": torch.tensor([0.0, -1.0, 1.0], dtype=F64)}, state, 0.0
        )
    assert_same(vertex["p"], torch.tensor([0.0, 1.0, 0.0], dtype=F64), atol=1e-12)


def test_exponentiated_gradient_is_mirror_descent_and_safe() -> None:
    p = torch.tensor([0.2, 0.0, 0.8], dtype=F64)
    h = torch.tensor([1.0, -5.0, -2.0], dtype=F64)
    outer = ExponentiatedGradient(lr=0.3)
    weights = p * torch.exp(-0.3 * h)
    assert_same(
        outer.step({"p": p}, {"p": h}, outer.init({"p": p}), 0.0)[0]["p"],
        weights / weights.sum(),
        rtol=1e-12,
    )
    huge = ExponentiatedGradient(lr=1e3).step({"p": p}, {"p": h}, {"step": 0}, 0.0)[0]["p"]
    assert_same(huge, torch.tensor([0.0, 0.0, 1.0], dtype=F64))


@pytest.mark.parametrize("start", [[0.0, 0.0], [-1.0, -2.0], [1.0, math.nan]])
def test_exponentiated_gradient_refuses_logits(start: list[float]) -> None:
    with rejects("wrong-value", "theta0", "p"):
        ExponentiatedGradient().init({"p": torch.tensor(start)})


@pytest.mark.parametrize(
    ("make", "options", "code", "field"),
    [
        (Sgd, {"lr": 0.0}, "out-of-range", "lr"),
        (Sgd, {"momentum": 1.0}, "out-of-range", "momentum"),
        (Adam, {"betas": (0.9, 1.0)}, "out-of-range", "betas"),
        (AdamW, {"weight_decay": -1.0}, "out-of-range", "weight_decay"),
        (Projection, {"kind": "box", "low": 2.0, "high": 1.0}, "out-of-range", "high"),
        (Projection, {"radius": 0.0}, "out-of-range", "radius"),
        (Schedule, {"final": 1.5}, "out-of-range", "final"),
        (Schedule, {"kind": "step"}, "unknown-choice", "kind"),
    ],
)
def test_bad_fields_are_named(make: Any, options: dict[str, Any], code: str, field: str) -> None:
    with rejects(code, field):
        make(**options)
