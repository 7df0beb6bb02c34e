"""Runs of torch optimisers: one optimiser per branch, on views of the stacked tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from hgms.generators.branches.steps import Slope
from hgms.optim import Stepper
from hgms.optim.rule import clip_
from hgms.optim.torch_rule import TorchRule
from hgms_core import ConfigError, Group, Tree, stack


def advance_torch(
    rule: TorchRule,
    group: Group,
    moments: Tree,
    slope: Slope,
    rates: Sequence[Sequence[float]],
    decays: Sequence[float],
    remember: bool,
) -> tuple[Tensor, list[Tree], int]:
    """Move ``group.x`` in place by one step per entry of ``rates``, one optimiser per member.

    An entry of ``rates`` contains one factor per member. Return (lower losses before the last step,
    memory of each member, gradients per member).
    """
    stacked = isinstance(group.part, slice)
    loss = torch.empty(())
    calls = 0
    members = [_member(slope.x, i if stacked else None) for i in range(len(decays))]
    memories = [
        {name: leaf[i] for name, leaf in moments.items()} if stacked else moments
        for i in range(len(decays))
    ]
    steppers = [
        Stepper.of(rule.build, leaves, memory)
        for leaves, memory in zip(members, memories, strict=True)
    ]

    def slopes(step: int) -> Tensor:
        nonlocal calls
        calls += 1
        grads, losses = slope.at(step)
        if rule.clip is not None:
            clip_(grads, rule.clip, stacked)
        for i, leaves in enumerate(members):
            for leaf, grad in zip(leaves.values(), grads, strict=True):
                leaf.grad = grad[i] if stacked else grad
        return losses

    options: list[dict[str, Any]] = []
    for step, factors in enumerate(rates):
        options = rule.times.options(rule.done + step)
        for stepper, rate, decay in zip(steppers, factors, decays, strict=True):
            stepper.set(options, rate, decay)
        if rule.needs_closure:
            loss = cast("Any", steppers[0].optimizer).step(partial(slopes, step))
            continue
        loss = slopes(step)
        for stepper in steppers:
            stepper.optimizer.step()
    return loss, [stepper.memory(options) for stepper in steppers] if remember else [], calls


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


def _member(x: Tree, row: int | None) -> Tree:
    """Return one branch's leaves, which share memory with ``x``."""
    return {
        name: (leaf if row is None else leaf[row]).detach().requires_grad_()
        for name, leaf in x.items()
    }
