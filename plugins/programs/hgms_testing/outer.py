"""Checks of outer optimisers: they go down, stay where they must, and go on after a restart as if nothing had been."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hgms_core import State, Tree
from hgms_run import pack, unpack
from hgms_testing.kit import Check, demand, difference, normal, place, refused, shown, snapshot

F64 = torch.float64
STEPS = 400


def checks() -> Iterator[Check]:
    for question in (check_structure, check_quadratic, check_simplex, check_feasible, check_state):
        yield Check("outer", question)


def start(dtype: torch.dtype = F64) -> Tree:
    """Two probability vectors: what every optimiser accepts."""
    return {"a": torch.full((3,), 1 / 3, dtype=dtype, device=place()), "b": torch.full((2,), 0.5, dtype=dtype, device=place())}


def exercise(outer: Any, dtype: torch.dtype, variant: int) -> tuple[Any, Callable[[], Any]]:
    theta = start(dtype)
    gradient = {name: normal(len(leaf), seed=60 + variant + len(leaf)).to(dtype) for name, leaf in theta.items()}
    _, state = outer.step(theta, gradient, outer.init(theta), 0.0)

    def call() -> Any:
        return outer.init(theta), outer.step(theta, gradient, state, 0.5)

    return {"theta": theta, "gradient": gradient, "state": state}, call


def through_json(state: State) -> State:
    """The state after it was written to a run folder and read again."""
    structure, leaves = pack(state)
    return dict(unpack(json.loads(json.dumps(structure)), leaves))


def _run(outer: Any, theta: Tree, gradient: Callable[[Tree], Tree], steps: int = STEPS) -> tuple[Tree, State]:
    state = outer.init(theta)
    for step in range(steps):
        theta, state = outer.step(theta, gradient(theta), state, step / steps)
    return theta, state


def _distance(theta: Tree, target: Tree) -> float:
    return max(float((theta[name] - target[name]).abs().max()) for name in target)


def check_structure(outer: Any) -> None:
    """The next θ has the names, shapes and dtype of θ, without a graph, and is finite; progress 0 and 1 are fine, and so is a
    gradient with its names in another order."""
    theta = start()
    gradient = {name: torch.ones_like(theta[name]) for name in reversed(theta)}
    for progress in (0.0, 1.0):
        moved, _ = outer.step(theta, gradient, outer.init(theta), progress)
        wanted, came = ({name: list(leaf.shape) for name, leaf in tree.items()} for tree in (theta, moved))
        demand(wanted == came, f"θ has {wanted}, the next one {came}")
        bad = [name for name, leaf in moved.items() if leaf.requires_grad or not torch.isfinite(leaf).all()]
        demand(not bad, f"at progress {progress} the leaf {bad} has a graph or is not finite")


def check_quadratic(outer: Any) -> None:
    """400 steps on ½‖θ − c‖² end near c, from anywhere; a ConfigError that says why it cannot start there is fine."""
    theta = {"a": torch.tensor([2.0, -1.0, 0.0], dtype=F64, device=place()), "b": torch.zeros(2, dtype=F64, device=place())}
    target = {
        "a": torch.tensor([0.5, 0.3, -0.6], dtype=F64, device=place()),
        "b": torch.tensor([0.2, -0.4], dtype=F64, device=place()),
    }
    if refused(lambda: outer.init(theta)):
        return
    theta_end, _ = _run(outer, theta, lambda at: {name: leaf - target[name] for name, leaf in at.items()})
    demand(_distance(theta_end, target) <= 0.1, f"it ends at a = {shown(theta_end['a'])}, c is {shown(target['a'])}")


def check_simplex(outer: Any) -> None:
    """400 steps over probability vectors towards one inside the simplex end near it, and end on the simplex."""
    target = {
        "a": torch.tensor([0.6, 0.3, 0.1], dtype=F64, device=place()),
        "b": torch.tensor([0.8, 0.2], dtype=F64, device=place()),
    }
    theta_end, _ = _run(outer, start(), lambda at: {name: leaf - target[name] for name, leaf in at.items()})
    demand(_distance(theta_end, target) <= 0.1, f"it ends at a = {shown(theta_end['a'])}, the target is {shown(target['a'])}")
    sums = torch.stack([leaf.sum() for leaf in theta_end.values()])
    demand((sums - 1).abs().max() <= 0.1, f"the leaves sum to {shown(sums)}, not to 1 each within 0.1")


def check_feasible(outer: Any) -> None:
    """A `projection` of its own holds after every step, however large the step."""
    project = getattr(getattr(outer, "projection", None), "apply", None)
    theta = start()
    state = outer.init(theta)
    for step in range(5):
        gradient = {name: 10.0 * normal(len(leaf), seed=70 + step) for name, leaf in theta.items()}
        theta, state = outer.step(theta, gradient, state, step / 5)
        off = _distance(project(theta), theta) if project is not None else 0.0
        demand(
            off <= 1e-9, f"after step {step + 1} θ is {off:.2g} away from where its projection puts it: a = {shown(theta['a'])}"
        )


def check_state(outer: Any) -> None:
    """Its state can be saved, and goes on from there bit for bit as if it had not been."""

    def gradient(theta: Tree) -> Tree:
        return {name: leaf - torch.linspace(0, 0.5, len(leaf), dtype=F64, device=place()) for name, leaf in theta.items()}

    theta, state = _run(outer, start(), gradient, 5)
    again = through_json(state)
    first, second = (outer.step(theta, gradient(theta), memory, 0.5) for memory in (state, again))
    differs = difference(snapshot(first[0]), snapshot(second[0]))
    demand(not differs, f"after its state was saved and loaded {differs}")
