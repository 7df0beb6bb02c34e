"""One lower step as a differentiable function of θ and of the state before it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from hgms.optim.rule import Rule
from hgms.optim.torch_rule import TorchRule
from hgms_core import Loss, Problem, Tree
from hgms_core.hypergrad import twice_differentiable_attention

Batches = Sequence[tuple[float, Tree]]
"""The batches of a step, each with its share of the gradient."""


@frozen(eq=False)
class Course:
    """A run with one step per rate: its start, its moments and its row numbers (None: all rows).

    ``accumulate`` is the number of batches per step. With a torch optimiser, rates and decay are
    factors on the optimiser's settings.
    """

    rule: Rule | TorchRule
    problem: Problem
    x: Tree
    moments: Tree
    index: Tensor | None
    rates: list[float]
    decay: float
    rows: int
    accumulate: int = 1

    def state(self) -> list[Tree]:
        """Return [x, optimiser state] before the first step."""
        return [self.x, *self.rule.parts(self.moments, list(self.x))]


def differentiable_step(
    g: Loss,
    rule: Rule | TorchRule,
    theta: Tree,
    state: list[Tree],
    batches: Batches,
    numbers: Any,
    graph: bool,
) -> tuple[list[Tree], Tensor]:
    """Return ([x, optimiser state] after one step, loss before it).

    With ``graph``, the results are differentiable functions of ``theta`` and ``state``. The
    operations are the same as in :func:`hgms.generators.branches.steps.advance`, so a replayed
    branch rounds identically.
    """
    x, slopes, value = gradient_of_step(g, theta, state[0], batches, graph)
    with torch.set_grad_enabled(graph):
        return rule.step(x, clip_by_norm(rule.clip, slopes, list(x)), state[1:], numbers), value


def gradient_of_step(
    g: Loss, theta: Tree, x: Tree, batches: Batches, graph: bool
) -> tuple[Tree, list[Tensor], Tensor]:
    """Return (x, ∇_x g on all batches together, loss).

    Tensors of x without a graph become autograd leaves. With ``graph``, the gradient is a function
    of θ and x.
    """
    leaves = [leaf if leaf.requires_grad else leaf.detach().requires_grad_() for leaf in x.values()]
    x = dict(zip(x, leaves, strict=True))
    with (
        torch.enable_grad(),
        twice_differentiable_attention() if graph else contextlib.nullcontext(),
    ):
        value = None
        slopes = []
        for share, batch in batches:
            part = g(theta, x, batch)
            grads = torch.autograd.grad(part, leaves, create_graph=graph, materialize_grads=True)
            if value is None:
                value = _times(share, [part.detach()])[0]
                slopes = _times(share, grads)
            else:
                value = value + share * part.detach()
                slopes = [slope + share * grad for slope, grad in zip(slopes, grads, strict=True)]
    assert value is not None
    return x, slopes, value


def _times(share: float, leaves: Sequence[Tensor]) -> list[Tensor]:
    return [*leaves] if share == 1 else [share * leaf for leaf in leaves]


def clip_by_norm(bound: float | None, slopes: list[Tensor], names: list[str]) -> Tree:
    """The gradients by name, scaled down to norm ``bound``."""
    grads = dict(zip(names, slopes, strict=True))
    if bound is None:
        return grads
    norm = torch.cat([slope.reshape(-1) for slope in slopes]).norm()
    # clamp_min applies the bound: its derivative at a zero gradient is 0, and not 0·inf.
    return {name: grad * (bound / norm.clamp_min(bound)) for name, grad in grads.items()}
