"""A plugin file that is right in every way, for test_wrong_classes.py to spoil: a method."""

from __future__ import annotations

from typing import ClassVar

import attrs
import torch

from hgms_core import Problem, Record, State, Tree, gradient, hookimpl, hypergradient


@attrs.frozen(kw_only=True)
class Mine:
    """Five steps on x, then one with momentum on θ along the implicit hypergradient with H = I.

    >>> Mine().lr
    0.2

    Source: alternating gradient descent.
    """

    name: ClassVar[str] = "mine"
    lr: float = 0.2

    def init(self, problem: Problem, seed: int) -> State:
        m = {name: torch.zeros_like(leaf) for name, leaf in problem.theta0.items()}
        return {"theta": dict(problem.theta0), "x": dict(problem.x0), "m": m, "calls": 0}

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        theta = state["theta"]
        x = dict(state["x"])
        below = problem.lower_data.whole
        above = problem.upper_data["differentiate"].whole
        for _ in range(5):
            grads, _ = gradient(problem.g, theta, x, below)
            x = {
                name: leaf - 0.5 * grad for (name, leaf), grad in zip(x.items(), grads, strict=True)
            }
        estimate = hypergradient(
            lambda t, x: problem.f(t, x, above),
            lambda t, x: problem.g(t, x, below),
            theta,
            x,
            solver=lambda matvec, b: b,
        )
        m = {name: 0.5 * leaf + estimate.value[name] for name, leaf in state["m"].items()}
        theta = problem.project({name: leaf - self.lr * m[name] for name, leaf in theta.items()})
        calls = state["calls"] + 5 + estimate.cost.calls
        return {"theta": theta, "x": x, "m": m, "calls": calls}, {
            "upper_loss": estimate.upper_loss,
            "oracle_calls": calls,
        }

    def result(self, state: State) -> tuple[Tree, Tree]:
        return state["theta"], state["x"]


@hookimpl
def hgms_register_methods() -> list[type]:
    return [Mine]
