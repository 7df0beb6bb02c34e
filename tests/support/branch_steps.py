"""Branches as anybody would write them: an optimiser of torch, one step a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from hgms.generators.branches import Branches
from hgms_core import Candidates, Key, Problem, State, Tree
from support.helpers import KEY, assert_same, counted, network_problem

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
    key = (
        key.fold("batches")
        if branches.diversity.batches == "shared"
        else key.fold("batches", member)
    )
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


def second_start(generator: Any) -> State:
    """A start with history: what is carried after one outer step."""
    state = generator.init(PROBLEM, KEY)
    found = propose(generator, start=state, key=KEY.fold("before"))
    return generator.carry(  # type: ignore[no-any-return]
        state, found, torch.tensor(1), KEY.fold("carry"), PROBLEM
    )


def check_repeats(generator: Any, rtol: float, atol: float) -> None:
    """A proposal repeats itself, changes nothing around it, and is the same in each mode."""
    start = second_start(generator)
    before = deepcopy((start, torch.get_rng_state()))
    modes = ({}, {}, {"mode": "loop"}, {"mode": "stacked"}, {"mode": "stacked", "chunk": 2})
    found = [propose(evolve(generator, **options), start=start) for options in modes]
    ends = [(each.x, each.aux, each.losses) for each in found]
    assert_same(ends[0], ends[1])
    assert_same(ends[3:], [ends[2]] * 2, rtol, atol)
    assert found[3].cost == found[4].cost == found[2].cost
    assert_same((start, torch.get_rng_state()), before)
    other = propose(generator, start=start, key=KEY.fold("other"))
    assert not torch.equal(found[0].x["w"][1], other.x["w"][1])


def check_replays(generator: Any, rtol: float, atol: float) -> None:
    """A branch run again, as a function of θ or forward, is the proposed one; costs are true."""
    problem, seen = counted(PROBLEM)
    steps = generator.steps
    proposed: Any = propose(generator, problem, second_start(generator))
    for member in (0, 2):
        for last in (None, 2, 100):
            theta = {name: leaf.clone().requires_grad_() for name, leaf in THETA.items()}
            end, cost = proposed.replay(torch.tensor(member), theta, last)
            assert all(leaf.requires_grad for leaf in end.values())
            detached = {name: leaf.detach() for name, leaf in end.items()}
            assert_same(detached, proposed.at(member), rtol, atol)
            assert (cost.lower_gradients, cost.products) == (steps, 2 if last == 2 else steps)
        seen.clear()
        end, cost = proposed.replay(torch.tensor(member), THETA, None)
        assert_same(end, proposed.at(member), rtol, atol)  # a run forward, without a graph
        assert not any(leaf.requires_grad for leaf in end.values())
        assert cost.calls == cost.lower_gradients == seen["g"] == steps
        assert cost.rows == seen["g_rows"]
