"""Lower steps as compiled programs: one step a program, or several of them where a step is
small.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from attrs import evolve
from torch import Tensor

from hgms.compiled import Programs
from hgms.generators.branches.rule import Coefficients, Rule, move_
from hgms.optim.adam import corrections
from hgms_core import Group, Loss, Problem, Tree, clone, gradient

SMALL = 4_000_000
"""Multiply-adds of a step of a group up to which several steps are one program: what a launch
costs is then worth saving.
"""
STEPS = 5
"""Steps of a program at most: what it takes to compile grows with them."""
TINY = 100_000
"""Multiply-adds of a step up to which a program holds twice as many."""


def advance_compiled(
    programs: Programs,
    name: str,
    problem: Problem,
    theta: Tree,
    rule: Rule,
    group: Group,
    moments: Tree,
    index: Tensor | None,
    rates: Sequence[Sequence[float]],
    decays: Sequence[float],
    rows: int,
) -> Tensor:
    """What :func:`advance` does, by programs that the generator ``name`` asks for. ``index``
    numbers the ``rows`` of every step, ``[steps, rows]`` (after an axis of members where each has
    its own; None: all).
    """
    stacked = isinstance(group.part, slice)
    like = next(iter(group.x.values()))
    numbers = table(rule, rates, decays, like)
    decayed = any(decays)
    axis = None if index is None else index.dim() - 2
    # Of the problem's loss, since the group's may be a new form of it at every call.
    key = (name, problem.g, evolve(rule, done=0), stacked, decayed, axis)
    block = programs(key, partial(_block, group.loss, rule, stacked, decayed, axis))
    length = _length(len(rates), sum(leaf.numel() for leaf in group.x.values()) * rows)
    x = group.x
    last = moments
    value = torch.empty(())
    data = problem.lower_data
    whole = data.batch(None) if index is None else None
    for first in range(0, len(rates), length):
        batches = data.batch(index[..., first : first + length, :]) if index is not None else whole
        x, last, value = block(theta, x, last, batches, numbers[first : first + length])
    torch._foreach_copy_([*group.x.values(), *moments.values()], [*x.values(), *last.values()])
    return value


def _block(
    loss: Loss,
    rule: Rule,
    stacked: bool,
    decayed: bool,
    axis: int | None,
    theta: Tree,
    x: Tree,
    moments: Tree,
    batches: Tree,
    numbers: Tensor,
) -> tuple[Tree, Tree, Tensor]:
    """(x, moments, the lower losses before the last step) after a step for each row of ``numbers``;
    ``batches`` has the steps' own along ``axis`` (None: all take the same)."""
    x = clone(x)
    moments = clone(moments)
    value = numbers.new_empty(())
    for step, row in enumerate(numbers.unbind()):
        batch = (
            batches
            if axis is None
            else {name: leaf.select(axis, step) for name, leaf in batches.items()}
        )
        grads, value = gradient(loss, theta, x, batch)
        coefficients = Coefficients(
            row[0], row[1] if decayed else None, row[2], row[3].reshape(-1)[0]
        )
        move_(rule, list(x.values()), list(moments.values()), grads, coefficients, stacked)
    return x, moments, value


def table(
    rule: Rule, rates: Sequence[Sequence[float]], decays: Sequence[float], like: Tensor
) -> Tensor:
    """The :class:`Coefficients` of every step, ``[steps, 4]``; ``[steps, 4, members]`` where
    members differ. In float64, as a step that is not compiled has them."""
    alike = all(len(set(numbers)) == 1 for numbers in (*rates, decays))
    members = slice(0, 1) if alike else slice(None)
    rate = torch.tensor([step[members] for step in rates], dtype=torch.float64)
    decay = torch.tensor(decays[members], dtype=torch.float64)
    count = torch.arange(rule.done + 1, rule.done + len(rates) + 1, dtype=torch.float64)
    count = count.unsqueeze(1)
    scale, correction = corrections(rate, count, rule.betas)
    table = torch.stack([rate, 1 - rate * decay, scale, correction.expand_as(rate)], 1)
    return (table.squeeze(2) if alike else table).to(like.device, like.dtype, non_blocking=True)


def _length(steps: int, work: int) -> int:
    """Steps of a program: the most that divide all ``steps``, so that one program serves."""
    most = 2 * STEPS if work <= TINY else STEPS if work <= SMALL else 1
    return max(length for length in range(1, most + 1) if steps % length == 0)
