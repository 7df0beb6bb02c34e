"""Lower steps as compiled programs: one step a program, or several of them where a step is small."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from attrs import evolve
from torch import Tensor

from hgms_branches.steps import Coefficients, Rule, move_
from hgms_core import Group, Loss, Problem, Tree, clone, gradient
from hgms_graphs import Programs

SMALL = 4_000_000
"""Multiply-adds of a step of a group up to which several steps are one program: what a launch costs is then worth saving."""
STEPS = 5
"""Steps of a program at most: what it takes to compile grows with them."""


def advance_compiled(
    programs: Programs,
    name: str,
    problem: Problem,
    theta: Tree,
    rule: Rule,
    group: Group,
    moments: Tree,
    index: Tensor | None,
    rates: Sequence[float | Tensor],
    decay: float | Tensor,
    rows: int,
) -> Tensor:
    """What :func:`advance` does, by programs that the generator ``name`` asks for. ``index`` numbers the ``rows`` of every
    step, ``[steps, rows]`` (after an axis of members where each has its own; None: all)."""
    stacked, like = isinstance(group.part, slice), next(iter(group.x.values()))
    numbers = _table(rule, rates, decay, like)
    decays, axis = isinstance(decay, Tensor) or bool(decay), None if index is None else index.dim() - 2
    # Of the problem's loss, since the group's may be a new form of it at every call.
    key = (name, problem.g, evolve(rule, done=0), stacked, decays, axis)
    block = programs(key, partial(_block, group.loss, rule, stacked, decays, axis))
    length = _length(len(rates), sum(leaf.numel() for leaf in group.x.values()) * rows)
    x, last, value = group.x, moments, torch.empty(())
    data = problem.lower_data
    whole = data.batch(None) if index is None else None
    for first in range(0, len(rates), length):
        batches = data.batch(index[..., first : first + length, :]) if index is not None else whole
        x, last, value = block(theta, x, last, batches, numbers[first : first + length])
    torch._foreach_copy_([*group.x.values(), *moments.values()], [*x.values(), *last.values()])
    return value


def _block(
    loss: Loss, rule: Rule, stacked: bool, decays: bool, axis: int | None, theta: Tree, x: Tree, moments: Tree, batches: Tree,
    numbers: Tensor,
) -> tuple[Tree, Tree, Tensor]:  # fmt: skip
    """(x, moments, the lower losses before the last step) after a step for each row of ``numbers``; ``batches`` has the steps'
    own along ``axis`` (None: all take the same)."""
    x, moments = clone(x), clone(moments)
    value = numbers.new_empty(())
    for step, row in enumerate(numbers.unbind()):
        batch = batches if axis is None else {name: leaf.select(axis, step) for name, leaf in batches.items()}
        grads, value = gradient(loss, theta, x, batch)
        coefficients = Coefficients(row[0], row[1] if decays else None, row[2], row[3].reshape(-1)[0])
        move_(rule, list(x.values()), list(moments.values()), grads, coefficients, stacked)
    return x, moments, value


def _table(rule: Rule, rates: Sequence[float | Tensor], decay: float | Tensor, like: Tensor) -> Tensor:
    """Rate, decay and Adam's two of every step, ``[steps, 4]``; ``[steps, 4, members]`` where members differ."""
    steps = [Coefficients.of(rule, rule.done + count, rate, decay) for count, rate in enumerate(rates, start=1)]
    rows = [(step.rate, 1.0 if step.kept is None else step.kept, step.scale, step.correction) for step in steps]
    if any(isinstance(number, Tensor) for row in rows for number in row):
        members = like.shape[0]
        wide = [[torch.as_tensor(number, dtype=like.dtype).expand(members) for number in row] for row in rows]
        return torch.stack([torch.stack(row) for row in wide]).to(like.device, non_blocking=True)
    return torch.tensor(rows, dtype=like.dtype).to(like.device, non_blocking=True)


def _length(steps: int, work: int) -> int:
    """Steps of a program: the most that divide all ``steps``, so that one program serves."""
    most = STEPS if work <= SMALL else 1
    return max(length for length in range(1, most + 1) if steps % length == 0)
