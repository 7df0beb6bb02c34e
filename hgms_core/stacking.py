"""Losses of N stacked candidates at once: one vmapped computation, or a loop where vmap does not fit.

The stacked form pays where a single candidate is too small to fill the processor. ``auto`` decides from the sizes
(see :func:`prefers_stack`), never from a clock, so that a run is the same every time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from hgms_core.problem import Batch, Loss
from hgms_core.trees import Tree, detach, take

Mode = Literal["auto", "stacked", "loop"]

STACK_BELOW = 2_000_000
"""Multiply-adds of one candidate's forward pass below which stacking is faster on a CPU (measured: docs/benchmarks.md)."""


def prefers_stack(x: Tree, rows: int, mode: Mode) -> bool:
    """Whether to evaluate the stacked candidates ``x`` as one computation on batches of ``rows`` examples.

    On a GPU always (each kernel is otherwise too small). On a CPU only for small candidates: a parameter costs about one
    multiply-add an example, and beyond ``STACK_BELOW`` one candidate keeps the cores busy, while N stacked ones only spill
    the cache.
    """
    if mode != "auto":
        return mode == "stacked"
    leaf = next(iter(x.values()))
    size = sum(each[0].numel() for each in x.values())
    return leaf.is_cuda or size * rows <= STACK_BELOW


def _chunks(count: int, chunk: int | None) -> Iterator[slice]:
    step = count if chunk is None else chunk
    return (slice(first, min(first + step, count)) for first in range(0, count, step))


def _rows(tree: Tree, part: slice) -> Tree:
    return {name: leaf[part] for name, leaf in tree.items()}


def values(
    loss: Loss, theta: Tree, x: Tree, batch: Batch, *, own_batch: bool = False, mode: Mode = "auto", rows: int = 1,
    chunk: int | None = None,
) -> Tensor:
    """``loss`` of every candidate, ``[N]``, without a graph.

    ``own_batch`` says that ``batch`` is stacked too (candidate i sees row i); otherwise all share it. ``chunk`` bounds how
    many candidates are evaluated at a time. Cost: N values.
    """
    count = next(iter(x.values())).shape[0]
    with torch.no_grad():
        if not prefers_stack(x, rows, mode):
            return torch.stack(
                [loss(theta, take(x, i), take(batch, i) if own_batch else batch) for i in range(count)]
            )
        pieces = []
        for part in _chunks(count, chunk):
            piece = _rows(batch, part) if own_batch else batch
            pieces.append(_vmapped(loss, own_batch)(theta, _rows(x, part), piece))
        return torch.cat(pieces)


@functools.lru_cache(maxsize=64)
def _vmapped(loss: Loss, own_batch: bool) -> Loss:
    return torch.func.vmap(loss, in_dims=(None, 0, 0 if own_batch else None))


def gradients(
    loss: Loss, theta: Tree, x: Tree, batch: Batch, *, own_batch: bool = False, mode: Mode = "auto", rows: int = 1,
    chunk: int | None = None,
) -> tuple[list[Tensor], Tensor]:
    """(∇_x ``loss`` of every candidate, their losses): a stacked list of leaves and ``[N]``.

    The candidates do not interact, so the gradient of the sum of their losses holds each one's own gradient; that takes one
    ordinary backward pass over a vmapped forward pass. Cost: N gradients; memory: the gradients, and activations of
    ``chunk`` candidates.
    """
    count = next(iter(x.values())).shape[0]
    theta = detach(theta)
    stacked = prefers_stack(x, rows, mode)
    parts = list(_chunks(count, chunk)) if stacked else [slice(i, i + 1) for i in range(count)]
    if stacked and len(parts) == 1:
        return _gradient_of_part(_vmapped(loss, own_batch), theta, x, batch)
    output = [torch.empty_like(leaf) for leaf in x.values()]
    losses = []
    for part in parts:
        piece = _rows(batch, part) if own_batch else batch
        if stacked:
            grads, value = _gradient_of_part(_vmapped(loss, own_batch), theta, _rows(x, part), piece)
        else:
            single = take(piece, 0) if own_batch else piece
            grads, value = _gradient_of_part(loss, theta, {name: leaf[part.start] for name, leaf in x.items()}, single)
        for target, grad in zip(output, grads, strict=True):
            target[part] = grad
        losses.append(value.reshape(-1))
    return output, torch.cat(losses)


def _gradient_of_part(loss: Loss, theta: Tree, x: Tree, batch: Batch) -> tuple[list[Tensor], Tensor]:
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in x.items()}
    with torch.enable_grad():
        value = loss(theta, leaves, batch)
        grads = torch.autograd.grad(value.sum(), list(leaves.values()), materialize_grads=True)
    return list(grads), value.detach()
