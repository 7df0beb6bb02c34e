"""A problem and a method of a person's own, for the tests of what takes them."""

from __future__ import annotations

from typing import Any

import torch

from hgms.adapters import from_losses
from hgms_core import Data, Key, Problem, State, Tree


def bowl(seed: int = 0, *, rows: int = 6, metrics: bool = True, scale: float = 1.0) -> Problem:
    """min over θ of (x − 2)² + mean of the rows, where x* = θ."""
    draw = Key(seed).fold("bowl").generator()
    data = Data.of({"a": torch.randn(rows, generator=draw, dtype=torch.float64)})

    def g(theta: Tree, x: Tree, batch: Tree) -> torch.Tensor:
        return (x["x"] - theta["t"]).square().sum()

    def f(theta: Tree, x: Tree, batch: Tree) -> torch.Tensor:
        return scale * (x["x"] - 2 - batch["a"]).square().mean()

    def evaluate(theta: Tree, x: Tree) -> dict[str, float]:
        return {"distance": float((x["x"] - 2 - data.whole["a"].mean()).norm()), "curious": 1.0}

    zero = torch.zeros(1, dtype=torch.float64)
    return from_losses(
        theta0={"t": zero},
        x0={"x": zero + 1},
        g=g,
        f=f,
        lower_data=data,
        upper_data=dict.fromkeys(("differentiate", "select", "stop"), data),
        **({"evaluate": evaluate} if metrics else {}),
    )


class Follow:
    """No attrs class, registered nowhere: θ follows the slope of f at x = θ, exactly."""

    name = "follow"

    def __init__(self, rate: float = 0.25, breaks: int | None = None) -> None:
        self.rate = rate
        self.breaks = breaks

    def init(self, problem: Problem, seed: int) -> State:
        return {"theta": dict(problem.theta0), "step": 0, "seed": seed}

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, dict[str, Any]]:
        if state["seed"] == self.breaks:
            raise RuntimeError("as it was told")
        x = {"x": state["theta"]["t"].clone().requires_grad_()}
        loss = problem.f(state["theta"], x, problem.upper_data["differentiate"].batch(None))
        [slope] = torch.autograd.grad(loss, [x["x"]])
        theta = {"t": state["theta"]["t"] - self.rate * slope}
        return {**state, "theta": theta, "step": state["step"] + 1}, {
            "upper_loss": loss,
            "oracle_calls": state["step"] + 1,
        }

    def result(self, state: State) -> tuple[Tree, Tree]:
        return state["theta"], {"x": state["theta"]["t"]}


class Halve:
    """Halves x in each step; θ is 1, whatever it is."""

    name = "halve"

    def init(self, problem: Problem, seed: int) -> State:
        return {"x": dict(problem.x0)}

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, dict[str, Any]]:
        x = state["x"]["x"] / 2
        return {"x": {"x": x}}, {"upper_loss": x.sum(), "scores": x[:2]}

    def result(self, state: State) -> tuple[Tree, Tree]:
        return {"t": torch.ones(1)}, state["x"]
