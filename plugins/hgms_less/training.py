"""Adam on the mean loss of rows, and the warm-up's learning rates."""

from __future__ import annotations

import math

import torch
from attrs import frozen
from torch import Tensor

from hgms_core import Key, NumericalError, Problem, Tree, gradient


@frozen(kw_only=True)
class Schedule:
    """Linear up over the first ``warmup`` share of all updates, then linearly down to (almost) nothing.

    >>> schedule = Schedule(lr=2e-5, warmup=0.03, epochs=4, updates=1000)
    >>> [f"{schedule.average(epoch):.2e}" for epoch in range(4)]      # what the LESS authors report, to two digits
    ['1.68e-05', '1.29e-05', '7.73e-06', '2.58e-06']
    """

    lr: float
    warmup: float
    epochs: int
    updates: int
    """Updates of one epoch."""

    def rate(self, update: int) -> float:
        total = self.epochs * self.updates
        rising = math.ceil(self.warmup * total)
        if update < rising:
            return self.lr * (update + 1) / rising
        return self.lr * (total - update) / (total - rising)

    def average(self, epoch: int) -> float:
        return sum(self.rate(epoch * self.updates + i) for i in range(self.updates)) / self.updates


def epoch_rows(key: Key, rows: Tensor, epoch: int, update: int, batch_size: int) -> Tensor:
    """Which of ``rows`` an update of an epoch sees; every epoch has an order of its own and sees each row once."""
    order = torch.randperm(len(rows), generator=key.fold("epoch", epoch).generator())
    return rows[order[update * batch_size : (update + 1) * batch_size]]


def adam(
    problem: Problem, rows: Tensor, state: Tree, *, step: int, count: int, lr: float, betas: tuple[float, float],
    eps: float, weight_decay: float,
) -> tuple[Tree, Tensor]:  # fmt: skip
    """One update on the mean loss of lower rows, by number. ``state`` holds leaves ``x.``, ``m.`` and ``v.``, and stays.

    ``count`` is how many updates the moments will then have seen. The decay is decoupled (AdamW).
    """
    x, m, v = (of(state, part) for part in "xmv")
    data = problem.lower_data
    grads, loss = gradient(problem.f, problem.theta0, x, data.rows(rows.to(data.device)))
    if not torch.isfinite(loss):
        raise NumericalError(f"step {step}: the training loss is {float(loss)}; lower lr, or check the rows and the model")
    beta1, beta2 = betas
    first = torch._foreach_lerp(list(m.values()), grads, 1 - beta1)
    second = torch._foreach_mul(list(v.values()), beta2)
    torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
    root = torch._foreach_sqrt(second)
    torch._foreach_div_(root, math.sqrt(1 - beta2**count))
    torch._foreach_add_(root, eps)
    moved = torch._foreach_mul(list(x.values()), 1 - lr * weight_decay)
    torch._foreach_addcdiv_(moved, first, root, -lr / (1 - beta1**count))
    return merged(dict(zip(x, moved, strict=True)), dict(zip(m, first, strict=True)), dict(zip(v, second, strict=True))), loss


def fresh(x: Tree) -> Tree:
    """The state of training that begins at ``x``."""
    zeros = {name: torch.zeros_like(leaf) for name, leaf in x.items()}
    return merged(x, zeros, zeros)


def merged(x: Tree, m: Tree, v: Tree) -> Tree:
    return {f"{part}.{name}": leaf for part, tree in zip("xmv", (x, m, v), strict=True) for name, leaf in tree.items()}


def of(state: Tree, part: str) -> Tree:
    """x, m or v."""
    return {name.removeprefix(f"{part}."): leaf for name, leaf in state.items() if name.startswith(f"{part}.")}
