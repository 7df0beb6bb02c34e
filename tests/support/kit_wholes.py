"""Sound generators, tasks and methods, small enough to break in many ways."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

import torch
from attrs import frozen
from torch import Tensor

from hgms.adapters import from_losses, hypergradient
from hgms_core import Candidates, Cost, Data, Key, Problem, Record, State, Tree, gradient, stack
from support.kit_parts import DOC


@frozen(kw_only=True)
class Runs:
    """N runs of noisy gradient descent."""

    __doc__ = DOC
    name: ClassVar[str] = "runs"
    count: int = 3
    steps: int = 5
    lr: float = 0.1
    noise: float = 0.5
    batch_size: int | None = None
    mode: str = "loop"
    chunk: int | None = None
    carry_rule: Literal["selected", "per-branch", "restart"] = "selected"

    def init(self, problem: Problem, key: Key) -> State:
        return {"x": stack([problem.x0] * self.count), "step": 0}

    def run(
        self, problem: Problem, theta: Tree, start: State, key: Key, i: int, graph: bool = False
    ) -> tuple[Tree, Tensor]:
        generator = key.fold(i).generator()
        noise = {
            name: torch.randn(leaf[i].shape, generator=generator, dtype=torch.float64)
            for name, leaf in start["x"].items()
        }
        x = {
            name: leaf[i] + (self.noise if i else 0.0) * noise[name].to(leaf)
            for name, leaf in start["x"].items()
        }
        index = problem.lower_data.draw(key.fold("batch", i), self.batch_size, self.steps)
        loss = torch.zeros(())
        for step in range(self.steps):
            batch = problem.lower_data.batch(None if index is None else index[step])
            if graph:
                leaves = {
                    name: leaf if leaf.requires_grad else leaf.requires_grad_()
                    for name, leaf in x.items()
                }
                loss = problem.g(theta, leaves, batch)
                grads = list(torch.autograd.grad(loss, list(leaves.values()), create_graph=True))
            else:
                grads, loss = gradient(problem.g, theta, x, batch)
            x = {
                name: leaf - self.lr * grad
                for (name, leaf), grad in zip(x.items(), grads, strict=True)
            }
        return x, loss

    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float = 0.0
    ) -> Candidates:
        ends = [self.run(problem, theta, start, key, i) for i in range(self.count)]
        calls = self.count * self.steps
        cost = Cost(lower_gradients=calls, rows=calls * problem.lower_data.count(self.batch_size))
        replay = partial(self._replay, problem, start, key)
        return Candidates(
            x=stack([x for x, _ in ends]),
            losses=torch.stack([loss for _, loss in ends]),
            cost=cost,
            replay=replay,
        )

    def _replay(
        self, problem: Problem, start: State, key: Key, index: Tensor, theta: Tree, last: int | None
    ) -> tuple[Tree, Cost]:
        return self.again(problem, theta, start, key, index, last)

    def again(
        self, problem: Problem, theta: Tree, start: State, key: Key, index: Tensor, last: int | None
    ) -> tuple[Tree, Cost]:
        with torch.enable_grad():
            end, _ = self.run(problem, theta, start, key, int(index), graph=True)
        within = self.steps if any(leaf.requires_grad for leaf in theta.values()) else 0
        rows = problem.lower_data.count(self.batch_size) * (self.steps + 2 * within)
        return end, Cost(
            lower_gradients=self.steps, products=within, cross_products=within, rows=rows
        )

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        if self.carry_rule == "restart":
            return {"x": stack([problem.initial(key)] * self.count), "step": start["step"] + 1}
        x = (
            candidates.x
            if self.carry_rule == "per-branch"
            else stack([candidates.at(index)] * candidates.count)
        )
        return {"x": x, "step": start["step"] + 1}


@frozen(kw_only=True)
class NoRule:
    """Two runs of gradient descent with two rates; the next ones start where the second, the
    slower, came to.
    """

    __doc__ = DOC
    name: ClassVar[str] = "no-rule"
    rates: tuple[float, ...] = (0.2, 0.1)

    def init(self, problem: Problem, key: Key) -> State:
        return {"x": dict(problem.x0)}

    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float = 0.0
    ) -> Candidates:
        grads, _ = gradient(problem.g, theta, start["x"], problem.lower_data.whole)
        moved = [
            {
                n: leaf - rate * grad
                for (n, leaf), grad in zip(start["x"].items(), grads, strict=True)
            }
            for rate in self.rates
        ]
        rows = problem.lower_data.count(None)
        return Candidates(x=stack(moved), cost=Cost(lower_gradients=1, rows=rows))

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        return {"x": candidates.at(index)}


@frozen(kw_only=True)
class Line:
    """A line through noisy points."""

    __doc__ = DOC
    name: ClassVar[str] = "line"
    version: ClassVar[str] = "1"
    metrics: ClassVar[Mapping[str, bool]] = {"test_error": False}
    rows: int = 12

    def table(self, seed: int, role: str, dtype: torch.dtype) -> Tree:
        generator = Key(seed).fold("line", role).generator()
        a = torch.randn(self.rows, 3, generator=generator, dtype=torch.float64)
        y = a.sum(1) + 0.1 * torch.randn(self.rows, generator=generator, dtype=torch.float64)
        return {"a": a.to(dtype), "y": y.to(dtype)}

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        def error(x: Tree, batch: Tree) -> Tensor:
            return (batch["a"] @ x["x"] - batch["y"]).square().mean()

        test = self.table(seed, "test", dtype)
        return from_losses(
            theta0={"penalty": torch.zeros(1, dtype=dtype)},
            x0={"x": torch.zeros(3, dtype=dtype)},
            g=lambda theta, x, batch: (
                error(x, batch) + theta["penalty"].exp().sum() * x["x"].square().sum()
            ),
            f=lambda theta, x, batch: error(x, batch),
            lower_data=Data.of(self.table(seed, "train", dtype)),
            upper_data={
                role: Data.of(self.table(seed, role, dtype))
                for role in ("differentiate", "select", "stop")
            },
            evaluate=lambda theta, x: {"test_error": float(error(x, test))},
        )


@frozen(kw_only=True)
class Walk:
    """A few gradient steps on x, then one on θ along the implicit hypergradient with H = I."""

    __doc__ = DOC
    name: ClassVar[str] = "walk"
    lr: float = 0.2

    def init(self, problem: Problem, seed: int) -> State:
        return {"theta": dict(problem.theta0), "x": dict(problem.x0), "calls": 0}

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
        theta = problem.project(
            {name: leaf - self.lr * estimate.value[name] for name, leaf in theta.items()}
        )
        calls = state["calls"] + 5 + estimate.cost.calls
        return {"theta": theta, "x": x, "calls": calls}, {
            "upper_loss": estimate.upper_loss,
            "oracle_calls": calls,
        }

    def result(self, state: State) -> tuple[Tree, Tree]:
        return state["theta"], state["x"]
