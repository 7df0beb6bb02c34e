"""Langevin steps as compiled programs, several a program where a step is small; their noise is
drawn outside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hgms.compiled import Programs
from hgms_core import Group, Loss, Problem, Tree, clone, gradient

SMALL = 4_000_000
"""Multiply-adds of a step of a group up to which several steps are one program."""
STEPS = 5
"""Steps of a program at most: what it takes to compile grows with them."""

Draw = Callable[[int], Tensor]
"""The noise of a step, ``[chains, numbers]``; steps come in order."""


def moved_compiled(
    programs: Programs,
    problem: Problem,
    theta: Tree,
    group: Group,
    index: Tensor | None,
    draw: Draw,
    lr: float,
    scale: float,
    steps: int,
    rows: int,
) -> Tensor:
    """Moves ``group.x`` in place through all steps; the losses before the last. ``index`` numbers
    the ``rows`` of every step, ``[steps, rows]`` (after an axis of chains where they are stacked;
    None: all).
    """
    axis = None if index is None else index.dim() - 2
    # the group's loss may be new at every call
    key = ("ula", problem.g, isinstance(group.part, slice), axis, lr, scale)
    block = programs(key, partial(_block, group.loss, axis, lr, scale))
    most = STEPS if sum(leaf.numel() for leaf in group.x.values()) * rows <= SMALL else 1
    length = max(length for length in range(1, most + 1) if steps % length == 0)
    x = group.x
    value = torch.empty(())
    data = problem.lower_data
    whole = data.batch(None) if index is None else None
    for first in range(0, steps, length):
        batches = whole if index is None else data.batch(index[..., first : first + length, :])
        x, value = block(
            theta, x, batches, torch.stack([draw(step) for step in range(first, first + length)])
        )
    torch._foreach_copy_(list(group.x.values()), list(x.values()))
    return value


def _block(
    loss: Loss,
    axis: int | None,
    lr: float,
    scale: float,
    theta: Tree,
    x: Tree,
    batches: Tree,
    noise: Tensor,
) -> tuple[Tree, Tensor]:
    """x after a step for each row of ``noise``, and the losses before the last."""
    x = clone(x)
    value = noise.new_empty(())
    for step, drawn in enumerate(noise.unbind()):
        batch = (
            batches
            if axis is None
            else {name: leaf.select(axis, step) for name, leaf in batches.items()}
        )
        grads, value = gradient(loss, theta, x, batch)
        torch._foreach_add_(list(x.values()), grads, alpha=-lr)
        add_noise_(list(x.values()), drawn, scale)
    return x, value


def add_noise_(leaves: list[Tensor], drawn: Tensor, scale: float) -> None:
    """leaves += scale·ξ, ξ the rows of ``drawn`` cut into leaves of one chain, or of stacked
    ones.
    """
    parts = drawn.split([leaf.numel() // drawn.shape[0] for leaf in leaves], dim=1)
    for leaf, part in zip(leaves, parts, strict=True):
        leaf.add_(part.reshape(leaf.shape), alpha=scale)
