"""Runs of torch optimisers: one optimiser per branch, on views of the stacked tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hgms.optim import Stepper
from hgms.optim.torch_rule import TorchRule
from hgms_core import ConfigError, Tree, stack


def advance_torch(
    rule: TorchRule,
    members: Sequence[Tree],
    memories: Sequence[Tree],
    slopes: Callable[[int], tuple[list[Tree], Tensor]],
    first: int,
    factors: Sequence[tuple[Sequence[float], Sequence[float]]],
    remember: bool,
) -> tuple[Tensor, list[Tree]]:
    """Move the leaves of each member in place, by one step per entry of ``factors``.

    ``slopes(step)`` returns the gradients of the members and their losses at the current leaves.
    ``first`` is the number of the first step. An entry of ``factors`` contains a factor on the rate
    and one on the decay per member. Return (lower losses before the last step, memory of each
    member).
    """
    loss = torch.empty(())
    # leaves of the optimisers, which share memory with the members
    leaves = [
        {name: leaf.detach().requires_grad_() for name, leaf in member.items()}
        for member in members
    ]
    steppers = [Stepper.of(rule.build, *each) for each in zip(leaves, memories, strict=True)]
    options: list[dict[str, Any]] = []
    for step, (rates, decays) in enumerate(factors, start=first):
        options = rule.times.options(rule.done + step)
        grads, loss = slopes(step)
        for stepper, slope, rate, decay in zip(steppers, grads, rates, decays, strict=True):
            stepper.set(options, rate, decay)
            for name, leaf in stepper.leaves.items():
                leaf.grad = slope[name]
            stepper.optimizer.step()
    return loss, [stepper.memory(options) for stepper in steppers] if remember else []


def join_memories(memories: Sequence[Tree]) -> Tree:
    """Return the memories of all branches, stacked."""
    shapes = [{name: leaf.shape for name, leaf in memory.items()} for memory in memories]
    if any(shape != shapes[0] for shape in shapes):
        raise ConfigError(
            "not-supported",
            "the state of the optimiser has another shape in each branch, so a branch cannot "
            "continue with the state of another branch",
            place=("generator", "optimizer", "moments"),
            hint='set moments = "fresh" or count = 1',
        )
    return stack(memories)
