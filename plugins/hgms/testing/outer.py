"""Checks of outer optimisers: descent, feasibility and exact resumption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hgms.facts import settings_of
from hgms.testing.kit import (
    F64,
    NotAsked,
    demand,
    demand_saved,
    normal,
    numbers,
    place,
    shapes,
    show,
    unsound,
)
from hgms_core import ConfigError, State, Tree

STEPS = 400


def start(dtype: torch.dtype = F64) -> Tree:
    """Return two probability vectors: a start that every optimiser accepts."""
    return {
        "a": torch.full((3,), 1 / 3, dtype=dtype, device=place()),
        "b": numbers([0.5, 0.5], dtype),
    }


def exercise(outer: Any, dtype: torch.dtype, variant: int) -> tuple[Any, Callable[[], Any]]:
    theta = start(dtype)
    gradient = {
        name: normal(len(leaf), seed=60 + variant + len(leaf)).to(dtype)
        for name, leaf in theta.items()
    }
    _, state = outer.step(theta, gradient, outer.init(theta), 0.0)

    def call() -> Any:
        return outer.init(theta), outer.step(theta, gradient, state, 0.5)

    return {"theta": theta, "gradient": gradient, "state": state}, call


def _towards(target: Tree) -> Callable[[Tree], Tree]:
    """Return the gradient of ½‖θ − c‖² for the target c."""
    return lambda theta: {name: leaf - target[name] for name, leaf in theta.items()}


def _run(outer: Any, theta: Tree, target: Tree, steps: int = STEPS) -> tuple[Tree, State]:
    state = outer.init(theta)
    for step in range(steps):
        theta, state = outer.step(theta, _towards(target)(theta), state, step / steps)
    return theta, state


def _distance(theta: Tree, target: Tree) -> float:
    return max(float((theta[name] - target[name]).abs().max()) for name in target)


def check_structure(outer: Any) -> None:
    """The next θ has the names, shapes and dtype of θ, has no graph and is finite. Progress 0
    and 1 are accepted, and so is a gradient with its names in another order.
    """
    theta = start()
    gradient = {name: torch.ones_like(theta[name]) for name in reversed(theta)}
    for progress in (0.0, 1.0):
        moved, _ = outer.step(theta, gradient, outer.init(theta), progress)
        demand(
            shapes(theta) == shapes(moved), f"θ has {shapes(theta)}, the next one {shapes(moved)}"
        )
        bad = unsound(moved)
        demand(not bad, f"at progress {progress} {', '.join(bad)}")


def check_quadratic(outer: Any) -> None:
    """400 steps on ½‖θ − c‖² end within 0.1 of c from any start. A ConfigError with the reason why
    the optimiser rejects the start is accepted.
    """
    theta = {"a": numbers([2.0, -1.0, 0.0]), "b": numbers([0.0, 0.0])}
    target = {"a": numbers([0.5, 0.3, -0.6]), "b": numbers([0.2, -0.4])}
    try:
        outer.init(theta)
    except ConfigError as error:
        raise NotAsked(f"it rejects this θ: {error.message}") from None
    end, _ = _run(outer, theta, target)
    demand(
        _distance(end, target) <= 0.1, f"it ends at a = {show(end['a'])}, c is {show(target['a'])}"
    )


def check_simplex(outer: Any) -> None:
    """400 steps over probability vectors towards a target inside the simplex end within 0.1 of the
    target and of the simplex.
    """
    target = {"a": numbers([0.6, 0.3, 0.1]), "b": numbers([0.8, 0.2])}
    end, _ = _run(outer, start(), target)
    demand(
        _distance(end, target) <= 0.1,
        f"it ends at a = {show(end['a'])}, the target is {show(target['a'])}",
    )
    sums = torch.stack([leaf.sum() for leaf in end.values()])
    demand(
        (sums - 1).abs().max() <= 0.1, f"the leaves sum to {show(sums)}, not to 1 each within 0.1"
    )


def check_feasible(outer: Any) -> None:
    """If the optimiser has a field `projection`, its constraint is met after every step of any
    size.
    """
    projection = settings_of(outer).get("projection")
    project = dict if projection is None else projection.apply
    theta = start()
    state = outer.init(theta)
    for step in range(5):
        gradient = {name: 10.0 * normal(len(leaf), seed=70 + step) for name, leaf in theta.items()}
        theta, state = outer.step(theta, gradient, state, step / 5)
        off = _distance(project(theta), theta)
        demand(
            off <= 1e-9,
            (
                f"after step {step + 1} θ is {off:.2g} away from where its projection puts it: a = "
                f"{show(theta['a'])}"
            ),
        )


def check_state(outer: Any) -> None:
    """The state can be saved, and a run that resumes from it is bit for bit the same."""
    target = {
        name: torch.linspace(0, 0.5, len(leaf), dtype=F64, device=place())
        for name, leaf in start().items()
    }
    theta, state = _run(outer, start(), target, 5)
    demand_saved(state, lambda memory: outer.step(theta, _towards(target)(theta), memory, 0.5)[0])
