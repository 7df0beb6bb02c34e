"""Generators, tasks and methods that each fail one check of the kit."""

from __future__ import annotations

import itertools
import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from attrs import evolve

from hgms_core import Candidates, Cost, Key, Problem, State
from hgms_core.capabilities import Capabilities, ProposesSome
from support.kit_parts import DOC, changed, like
from support.kit_wholes import Line, NoRule, Runs, Walk

# --- generators
# --------------------------------------------------------------------------------------------------


def proposes(change: Callable[[Any, Any], Candidates], sound: Any = None) -> Any:
    """A generator whose candidates are changed on their way out."""
    return changed(sound or Runs(), propose=lambda own, plain, *inputs: change(own, plain(*inputs)))


def proposes_some(change: Callable[..., Candidates]) -> Any:
    """A generator of parts: ``change(own, whole, members, inputs)``."""

    class InParts(Runs):
        __doc__ = DOC

        capabilities: ClassVar[Capabilities] = frozenset({ProposesSome})

        def propose_some(
            self, problem: Any, theta: Any, start: Any, key: Any, progress: float, members: Any
        ) -> Any:
            inputs = (problem, theta, start, key, progress)
            return change(self, self.propose(*inputs), members, inputs)

    return InParts()


def again(change: Callable[..., Any]) -> Any:
    """A generator with another way back: ``change(own, plain, p, theta, start, key, i, last)``."""
    return changed(Runs(), again=change)


def half_of_the_derivative(own: Any, plain: Any, *inputs: Any) -> Any:
    whole, cost = plain(*inputs)
    with torch.enable_grad():
        half = {name: leaf.detach() + 0.5 * (leaf - leaf.detach()) for name, leaf in whole.items()}
    return half, cost


def declared(share: float) -> Any:
    return proposes(
        lambda own, c: evolve(
            c, cost=Cost(**{name: int(share * n) for name, n in c.cost.numbers().items()})
        )
    )


def carries(change: Callable[..., Any], sound: Any = None) -> Any:
    return changed(sound or Runs(), carry=change)


GENERATORS: list[tuple[str, Any]] = [
    (
        "candidates",
        proposes(
            lambda own, c: evolve(c, x={name: leaf.movedim(0, -1) for name, leaf in c.x.items()}),
            Runs(count=2),
        ),
    ),
    (
        "descends",
        changed(
            Runs(),
            run=lambda own, plain, *inputs, **more: Runs(noise=0.0, lr=-0.01).run(*inputs, **more),
        ),
    ),
    (
        "parts",  # each from its first candidate on
        proposes_some(
            lambda own, whole, members, inputs: like(own, Runs, count=len(members)).propose(*inputs)
        ),
    ),
    (
        "replay",
        again(
            lambda own, plain, p, theta, start, key, i, last: plain(
                p, theta, start, key.fold("again"), i, last
            )
        ),
    ),
    (
        "replay",  # runs only the steps that it differentiates
        again(
            lambda own, plain, *inputs: Runs(
                steps=own.steps if inputs[-1] is None else inputs[-1]
            ).again(*inputs[:-1], None)
        ),
    ),
    ("replay-gradient", again(half_of_the_derivative)),
    (
        "losses",
        proposes(lambda own, c: evolve(c, losses=torch.zeros(c.count, dtype=torch.float64))),
    ),
    *(("oracle-counts", declared(share)) for share in (0.0, 0.25, 3.0)),
    (
        "key",
        changed(
            Runs(),
            run=lambda own, plain, p, theta, start, key, *more, **graph: plain(
                p, theta, start, Key(0), *more, **graph
            ),
        ),
    ),
    ("carry", carries(lambda own, plain, start, c, *_: {"x": c.at(0)}, NoRule())),
    (
        "state",
        carries(lambda own, plain, *inputs: {**plain(*inputs), "generator": inputs[3].generator()}),
    ),
    (
        "chunks",
        proposes(
            lambda own, c: evolve(
                c, x={name: leaf + 0.1 * (own.mode == "stacked") for name, leaf in c.x.items()}
            )
        ),
    ),
    (
        "wells",  # all runs are the noise-free one, which begins a little to the right
        changed(
            Runs(),
            run=lambda own, plain, p, theta, start, key, i, **graph: plain(
                p,
                theta,
                {"x": {name: leaf + 1e-3 for name, leaf in start["x"].items()}},
                key,
                0,
                **graph,
            ),
        ),
    ),
]


# --- tasks
# --------------------------------------------------------------------------------------------------


def task(**changes: Callable[[Problem], Any]) -> Any:
    """The task with a problem that is changed on its way out."""
    return changed(
        Line(),
        problem=lambda own, plain, *inputs: evolve(
            (made := plain(*inputs)), **{name: change(made) for name, change in changes.items()}
        ),
    )


def table(change: Callable[..., Any]) -> Any:
    """The task with other rows: ``change(plain, seed, role, dtype)``."""
    return changed(Line(), table=lambda own, plain, *inputs: change(plain, *inputs))


CALLS = itertools.count()
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
TASKS: list[tuple[str, Any]] = [
    ("smoke", changed(Line(), problem=lambda *_: socket.create_connection(("127.0.0.1", 9)))),
    ("seed", table(lambda plain, seed, *more: plain(next(CALLS), *more))),
    ("other-seed", table(lambda plain, seed, *more: plain(0, *more))),
    (
        "coupling",
        task(g=lambda p: lambda theta, x, batch: p.f(theta, x, batch) + theta["penalty"].sum()),
    ),
    ("losses", task(f=lambda p: lambda theta, x, batch: p.f(theta, x, batch)[None])),
    ("losses", task(upper_data=lambda p: {"differentiate": p.lower_data})),
    ("metrics", task(evaluate=lambda p: lambda theta, x: {"test_eror": 0.0})),
    ("metrics", task(evaluate=lambda p: lambda theta, x: {"test_error": math.nan})),
    (
        "files",
        table(
            lambda plain, *inputs: {
                **plain(*inputs),
                "y": len(PROJECT.read_bytes()) + 0 * plain(*inputs)["y"],
            }
        ),
    ),
    (
        "splits",
        table(lambda plain, seed, role, *more: plain(seed, role.replace("select", "train"), *more)),
    ),
    (
        "twice-differentiable",
        task(g=lambda p: lambda t, x, b: p.g(t, x, b) + x["x"].detach() @ x["x"]),
    ),
    ("stacked", task(g=lambda p: lambda t, x, b: p.g(t, x, b) * (1 + 0 * float(x["x"].sum())))),
    (
        "projection",
        task(project=lambda p: lambda theta: {"penalty": theta["penalty"].clamp_min(0.5)}),
    ),
    ("projection", task(project=lambda p: lambda theta: {"penalty": 0.5 * theta["penalty"]})),
]
CHANGES_INPUTS = [
    task(evaluate=lambda p: lambda theta, x: p.evaluate(theta, {"x": x["x"].add_(1.0)})),
    task(evaluate=lambda p: lambda theta, x: {"test_error": float(theta["penalty"].exp_())}),
]


# --- methods
# --------------------------------------------------------------------------------------------------


def steps(change: Callable[..., Any]) -> Any:
    """A method with other steps: ``change(own, plain, problem, state, progress)``."""
    return changed(Walk(), step=change)


def records(change: Callable[[Any, Any], Any]) -> Any:
    """A method whose record and state are changed: ``change(state, record) -> (state, record)``."""
    return steps(lambda own, plain, *inputs: change(*plain(*inputs)))


def counts(change: Callable[[int], int]) -> Any:
    return records(
        lambda state, record: (state, {**record, "oracle_calls": change(record["oracle_calls"])})
    )


def results(change: Callable[[Any, Any], Any]) -> Any:
    return changed(Walk(), result=lambda own, plain, state: change(*plain(state)))


def own_budget(state: State, record: Any) -> Any:
    if state["calls"] > 20:
        raise RuntimeError("no more steps")
    return state, record


def swallows(state: State, record: Any) -> Any:
    """Raises an error of its own where the losses break down."""
    leaves = (*state["theta"].values(), *state["x"].values())
    if not all(bool(leaf.isfinite().all()) for leaf in leaves):
        raise ZeroDivisionError("the loss is gone")
    return state, record


METHODS: list[tuple[str, Any]] = [
    ("result", results(lambda theta, x: (x, theta))),
    (
        "result",
        results(
            lambda theta, x: (
                theta,
                {name: leaf.clone().requires_grad_() for name, leaf in x.items()},
            )
        ),
    ),
    ("records", records(lambda state, record: (state, {"upper_loss": record["upper_loss"]}))),
    ("records", records(lambda state, record: (state, {**record, "theta": state["theta"]}))),
    *(("records", counts(of)) for of in (lambda calls: calls % 17, lambda calls: 3 * calls)),
    (
        "roles",
        steps(
            lambda own, plain, p, *more: plain(
                evolve(p, upper_data={**p.upper_data, "differentiate": p.upper_data["stop"]}), *more
            )
        ),
    ),
    (
        "projection",
        steps(lambda own, plain, p, *more: plain(evolve(p, project=lambda theta: theta), *more)),
    ),
    ("optimum", Walk(lr=-0.2)),
    (
        "resume",
        records(
            lambda state, record: (
                {**state, "history": [*state.get("history", ()), object()]},
                record,
            )
        ),
    ),
    ("budget", records(own_budget)),
    ("failure", records(swallows)),
]
