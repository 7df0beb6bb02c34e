"""A plugin file that is right in every way, for test_wrong_classes.py to spoil: a candidate
generator.
"""

from __future__ import annotations

from typing import ClassVar

import attrs
import torch

from hgms_core import Candidates, Cost, Key, Problem, State, Tree, gradient, hookimpl, stack


@attrs.frozen(kw_only=True)
class Mine:
    """N runs of gradient descent, each from the start plus noise of its own.

    >>> Mine(count=2).count
    2

    Source: gradient descent.
    """

    name: ClassVar[str] = "mine"
    count: int = 3
    steps: int = 5
    lr: float = 0.1
    noise: float = 0.5

    def init(self, problem: Problem, key: Key) -> State:
        return {"x": dict(problem.x0)}

    def propose(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
        batch = problem.lower_data.whole
        ends = []
        for i in range(self.count):
            draw = key.fold(i).generator()
            x = {
                name: leaf
                + (self.noise if i else 0.0)
                * torch.randn(leaf.shape, generator=draw, dtype=torch.float64).to(leaf)
                for name, leaf in start["x"].items()
            }
            for _ in range(self.steps):
                grads, _ = gradient(problem.g, theta, x, batch)
                x = {
                    name: leaf - self.lr * grad
                    for (name, leaf), grad in zip(x.items(), grads, strict=True)
                }
            ends.append(x)
        x = stack(ends)
        calls = self.count * self.steps
        return Candidates(
            x=x, cost=Cost(lower_gradients=calls, rows=calls * problem.lower_data.count(None))
        )

    def carry(
        self, start: State, candidates: Candidates, index: torch.Tensor, key: Key, problem: Problem
    ) -> State:
        return {"x": candidates.at(index)}


@hookimpl
def hgms_register_generators() -> list[type]:
    return [Mine]
