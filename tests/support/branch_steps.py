"""Branches as anybody would write them: an optimiser of torch, one step a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hgms.generators.branches import Branches
from hgms_core import Candidates, Key, Problem, Tree
from support.helpers import KEY, network_problem

PROBLEM = network_problem()
THETA = PROBLEM.theta0
Build = Callable[[list[Tensor]], torch.optim.Optimizer]


def propose(
    branches: Any, problem: Problem = PROBLEM, start: Any = None, key: Key = KEY
) -> Candidates:
    begun = start or branches.init(problem, KEY)
    return branches.propose(problem, problem.theta0, begun, key)  # type: ignore[no-any-return]


def drawn(branches: Branches, member: int, key: Key = KEY) -> list[Tree]:
    """The batches of a branch of ``PROBLEM``."""
    key = key.fold("batches") if branches.batches == "shared" else key.fold("batches", member)
    index = PROBLEM.lower_data.draw(key, branches.batch_size, branches.steps)
    return [
        PROBLEM.lower_data.batch(None if index is None else index[step])
        for step in range(branches.steps)
    ]


class ByHand:
    """Steps on ``PROBLEM``, which go on where the last ones ended."""

    def __init__(
        self,
        build: Build,
        schedule: Any = None,
        start: Tree = PROBLEM.x0,
        clip: float | None = None,
    ) -> None:
        self.leaves = {name: leaf.clone().requires_grad_() for name, leaf in start.items()}
        self.optimizer = build(list(self.leaves.values()))
        self.clip = clip
        self.schedule = schedule and schedule(self.optimizer)

    def run(self, batches: Sequence[Tree]) -> Tree:
        for batch in batches:
            self.optimizer.zero_grad()
            PROBLEM.g(THETA, self.leaves, batch).backward()
            if self.clip is not None:
                grads = [leaf.grad for leaf in self.leaves.values() if leaf.grad is not None]
                size = torch.cat([grad.reshape(-1) for grad in grads]).norm()
                torch._foreach_mul_(grads, self.clip / max(float(size), self.clip))
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
        return {name: leaf.detach().clone() for name, leaf in self.leaves.items()}
