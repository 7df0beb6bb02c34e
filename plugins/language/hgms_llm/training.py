"""AdamW on lower rows as a pure step: the training that methods need which rank rows. State in, state out."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from hgms_core import Batch, Loss, NumericalError, Tree, gradient


class Moments(Protocol):
    """What AdamW is besides its learning rate; a method that has these fields is one."""

    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...


def adamw(
    loss: Loss, theta: Tree, batch: Batch, state: Tree, moments: Moments, *, lr: float, count: int, step: int
) -> tuple[Tree, Tensor]:
    """One update on a loss of a batch, and that loss's value; the decay is decoupled.

    ``state`` holds leaves ``x.``, ``m.`` and ``v.``, and stays as it is; ``count`` is how many updates the moments will then
    have seen, ``step`` the run's step, for the message.

    Cost: 1 lower gradient. Memory: the state twice, and a gradient.

    Raises:
        NumericalError: the loss is not finite.

    Source: Kingma and Ba 2015; Loshchilov and Hutter 2019.
    """
    x, m, v = (adamw_part(state, part) for part in "xmv")
    grads, value = gradient(loss, theta, x, batch)
    if not torch.isfinite(value):
        raise NumericalError(f"step {step}: the training loss is {float(value)}; lower lr, or check the rows and the model")
    beta1, beta2 = moments.betas
    first = torch._foreach_lerp(list(m.values()), grads, 1 - beta1)
    second = torch._foreach_mul(list(v.values()), beta2)
    torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
    root = torch._foreach_sqrt(second)
    torch._foreach_div_(root, math.sqrt(1 - beta2**count))
    torch._foreach_add_(root, moments.eps)
    moved = torch._foreach_mul(list(x.values()), 1 - lr * moments.weight_decay)
    torch._foreach_addcdiv_(moved, first, root, -lr / (1 - beta1**count))
    return _merged(*(dict(zip(x, leaves, strict=True)) for leaves in (moved, first, second))), value


def adamw_start(x: Tree) -> Tree:
    """The state of training that begins at ``x``.

    >>> sorted(adamw_start({"w": torch.ones(2)}))
    ['m.w', 'v.w', 'x.w']
    """
    zeros = {name: torch.zeros_like(leaf) for name, leaf in x.items()}
    return _merged(x, zeros, zeros)


def adamw_part(state: Tree, part: str) -> Tree:
    """x, m or v of a state."""
    return {name.removeprefix(f"{part}."): leaf for name, leaf in state.items() if name.startswith(f"{part}.")}


def _merged(x: Tree, m: Tree, v: Tree) -> Tree:
    return {f"{part}.{name}": leaf for part, tree in zip("xmv", (x, m, v), strict=True) for name, leaf in tree.items()}
