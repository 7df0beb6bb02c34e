"""Compiled functions for Langevin steps: several steps per function if a step is small.

The noise is drawn outside of the compiled functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from attrs import frozen
from torch import Tensor

from hgms.compiled import Programs
from hgms_core import Group, Loss, Problem, Tree, clone, gradient

SMALL = 4_000_000
"""Maximum multiply-adds per step of a group for compiling several steps into one function."""
STEPS = 5
"""Maximum steps per compiled function. The compile time grows with their number."""

Draw = Callable[[int], Tensor]
"""The noise of a step, ``[chains, numbers]``; steps are drawn in order."""


@frozen
class Walk:
    """``steps`` steps x ← x − lr ∇g + scale·ξ, each on ``rows`` rows."""

    lr: float
    scale: float
    steps: int
    rows: int


def moved_compiled(
    programs: Programs,
    problem: Problem,
    theta: Tree,
    group: Group,
    index: Tensor | None,
    draw: Draw,
    walk: Walk,
) -> Tensor:
    """Move ``group.x`` in place through all steps; return the losses before the last step.

    ``index`` contains the row numbers of every step, ``[walk.steps, walk.rows]`` (None: all
    rows). A chain axis comes first if chains are stacked.
    """
    axis = None if index is None else index.dim() - 2
    # the group's loss may be a new object in each call
    key = ("ula", problem.g, isinstance(group.part, slice), axis, walk.lr, walk.scale)
    block = programs(key, partial(_block, group.loss, axis, walk.lr, walk.scale))
    most = STEPS if sum(leaf.numel() for leaf in group.x.values()) * walk.rows <= SMALL else 1
    length = max(length for length in range(1, most + 1) if walk.steps % length == 0)
    x = group.x
    value = torch.empty(())
    data = problem.lower_data
    whole = data.batch(None) if index is None else None
    for first in range(0, walk.steps, length):
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
    """Return x after one step per row of ``noise``, and the losses before the last step."""
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
    """Add scale·ξ to ``leaves``.

    ξ are the rows of ``drawn``, split into leaves of one chain, or of stacked chains.
    """
    parts = drawn.split([leaf.numel() // drawn.shape[0] for leaf in leaves], dim=1)
    for leaf, part in zip(leaves, parts, strict=True):
        leaf.add_(part.reshape(leaf.shape), alpha=scale)
