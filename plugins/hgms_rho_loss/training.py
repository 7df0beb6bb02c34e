"""What the phases of RHO-LOSS share: AdamW on the mean loss of rows, losses of many rows, and sources' shares of rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hgms_core import Data, Key, NumericalError, Problem, State, Tree, gradient


def epoch_rows(key: Key, data: Data, update: int, batch_size: int) -> Tensor:
    """The rows that an update sees: epoch after epoch, each in an order of its own, sees every row once."""
    epoch, at = divmod(update, math.ceil(data.size / batch_size))
    order = torch.randperm(data.size, generator=key.fold("epoch", epoch).generator())
    return order[at * batch_size : (at + 1) * batch_size]


def adamw(
    problem: Problem, batch: Tree, state: Tree, *, step: int, count: int, lr: float, betas: tuple[float, float], eps: float,
    weight_decay: float,
) -> tuple[Tree, Tensor]:  # fmt: skip
    """One update on the mean loss of a batch, whatever its rows' sources. ``state`` holds leaves ``x.``, ``m.`` and ``v.``, and
    stays. ``count`` is how many updates the moments will then have seen."""
    x, m, v = (of(state, part) for part in "xmv")
    grads, loss = gradient(problem.f, problem.theta0, x, batch)
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
    trees = (dict(zip(x, leaves, strict=True)) for leaves in (moved, first, second))
    return merged(*trees), loss


def row_losses(problem: Problem, x: Tree, data: Data, index: Tensor, step: int, chunk: int) -> Tensor:
    """The loss of each row, ``[B]`` on the CPU, without a graph and without dropout, ``chunk`` rows at a time."""
    assert problem.sources is not None
    with torch.no_grad():
        losses = torch.cat([problem.sources.examples(x, data.rows(part.to(data.device))) for part in torch.split(index, chunk)])
    if not torch.isfinite(losses).all():
        raise NumericalError(f"step {step}: the loss of a row is not finite; lower the learning rates, or check the rows")
    return losses.cpu()


def fresh(x: Tree) -> Tree:
    """The state of training that begins at ``x``."""
    zeros = {name: torch.zeros_like(leaf) for name, leaf in x.items()}
    return merged(x, zeros, zeros)


def merged(x: Tree, m: Tree, v: Tree) -> Tree:
    return {f"{part}.{name}": leaf for part, tree in zip("xmv", (x, m, v), strict=True) for name, leaf in tree.items()}


def of(state: Tree, part: str) -> Tree:
    """x, m or v."""
    return {name.removeprefix(f"{part}."): leaf for name, leaf in state.items() if name.startswith(f"{part}.")}


def counts_of(data: Data, rows: Tensor) -> Tensor:
    """How many of the rows each source holds.

    >>> counts_of(Data(size=5, strata=(("a", 2), ("b", 3))), torch.tensor([1, 2, 3, 4]))
    tensor([1, 3])
    """
    strata = data.strata or ()
    ends = torch.tensor([size for _, size in strata]).cumsum(0)
    return torch.bincount(torch.bucketize(rows, ends, right=True), minlength=len(strata))


def highest(scores: Tensor, number: int) -> Tensor:
    """The positions of the highest scores, of equal ones those that stand first."""
    return scores.sort(descending=True, stable=True).indices[:number]


def on_host(state: State) -> State:
    """The state with all that is counted by rows on the CPU, where it is small and never waited for; x stays on its device."""
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
