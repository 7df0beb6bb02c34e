"""Losses of N stacked candidates: one vmapped computation, or one candidate after the other.

``auto`` decides from the sizes (:func:`prefers_stack`), never from a clock, so that a run is the
same every time. A loss may know how to evaluate stacked candidates itself: a method
``stacked(theta, x, batch, own_batch) -> [N]``, which is then used instead of ``torch.func.vmap`` (a
language model shares its frozen base among the candidates, and checkpoints activations, which vmap
cannot). On a CPU, and with ``stacked = None``, one candidate is evaluated after the other unless
asked otherwise.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from attrs import frozen
from torch import Tensor

from hgms_core.data import Batch
from hgms_core.errors import one_of
from hgms_core.problem import Loss
from hgms_core.torch_errors import explained
from hgms_core.trees import Tree

Mode = Literal["auto", "stacked", "loop"]
"""How N candidates are evaluated: in one computation, one after the other, or whichever is
likely faster (``auto``).
"""

STACK_BELOW = 5_000_000
"""Multiply-adds of one candidate's forward pass up to which stacking is faster on a CPU
(`benchmarks/bench_pipeline.py`).
"""


def prefers_stack(x: Tree, rows: int, mode: Mode) -> bool:
    """Whether to evaluate the stacked ``x`` at once on batches of ``rows`` examples. On a GPU
    always (each kernel is otherwise too small); on a CPU up to STACK_BELOW (a parameter costs about
    one multiply-add an example): beyond, N spill the cache.
    """
    leaf = next(iter(x.values()))
    if mode != "auto" or leaf.shape[0] == 1:
        return mode == "stacked"
    size = sum(leaf[0].numel() for leaf in x.values())
    return leaf.is_cuda or size * rows <= STACK_BELOW


@frozen(eq=False)
class Group:
    """Some of N stacked candidates, evaluated together: views of their rows, and the loss that fits
    them. ``part`` selects the rows from anything with a leading axis N: a slice of a stacked group,
    a number of a single candidate without the axis.
    """

    part: slice | int
    x: Tree
    loss: Loss

    def rows_of(self, stacked: Any) -> Any:
        return None if stacked is None else stacked[self.part]


def groups(
    loss: Loss,
    x: Tree,
    *,
    own_batch: bool = False,
    rows: int = 1,
    mode: Mode = "auto",
    chunk: int | None = None,
) -> list[Group]:
    """The N candidates, split into groups that are evaluated one after the other: each alone
    (``mode = "loop"``) or stacked, at most ``chunk`` of them at a time, which bounds the memory of
    activations. ``auto`` picks by their size, and by ``rows`` of one candidate's batch. With
    ``own_batch`` each candidate has its own; else all share one. A group's ``x`` are views.
    """
    one_of("mode", mode, get_args(Mode))
    count = next(iter(x.values())).shape[0]
    if mode == "auto" and count > 1 and hasattr(loss, "stacked"):
        # On a CPU one candidate of a model that is worth a form of its own keeps the cores busy.
        mode = "stacked" if loss.stacked is not None and next(iter(x.values())).is_cuda else "loop"
    if not prefers_stack(x, rows, mode):
        return [Group(i, {name: leaf[i] for name, leaf in x.items()}, loss) for i in range(count)]
    step = chunk or count
    parts = [slice(first, min(first + step, count)) for first in range(0, count, step)]
    return [
        Group(part, {name: leaf[part] for name, leaf in x.items()}, _vmapped(loss, own_batch))
        for part in parts
    ]


def _vmapped(loss: Loss, own_batch: bool) -> Loss:
    stacked = getattr(loss, "stacked", None)
    if stacked is not None:
        return lambda theta, x, batch: stacked(theta, x, batch, own_batch)
    mapped = torch.func.vmap(loss, in_dims=(None, 0, 0 if own_batch else None))

    def evaluated(theta: Tree, x: Tree, batch: Batch) -> Tensor:
        with explained():
            return mapped(theta, x, batch)

    return evaluated


def values(
    loss: Loss,
    theta: Tree,
    x: Tree,
    batch: Batch,
    *,
    rows: int = 1,
    mode: Mode = "auto",
    chunk: int | None = None,
) -> Tensor:
    """``loss`` of every candidate on one shared batch, ``[N]``, without a graph. Cost: N values.

    >>> square = lambda theta, x, batch: theta["t"] * x["x"] ** 2
    >>> values(square, {"t": torch.tensor(2.0)}, {"x": torch.tensor([1.0, 3.0])}, {})
    tensor([ 2., 18.])
    """
    with torch.no_grad():
        parts = groups(loss, x, rows=rows, mode=mode, chunk=chunk)
        return torch.cat([part.loss(theta, part.x, batch).reshape(-1) for part in parts])


def gradient(loss: Loss, theta: Tree, x: Tree, batch: Batch) -> tuple[list[Tensor], Tensor]:
    """(∇_x loss as a list of leaves, the loss itself), for one candidate or for a stacked group.

    Stacked candidates do not interact, so the gradient of the sum of their losses holds each one's
    own gradient: one ordinary backward pass over a vmapped forward pass. Cost: one gradient a
    candidate.

    >>> gradient(lambda theta, x, batch: (x["x"] ** 2).sum(), {}, {"x": torch.tensor([3.0])}, {})
    ([tensor([6.])], tensor(9.))
    """
    leaves = [leaf.detach().requires_grad_() for leaf in x.values()]
    with torch.enable_grad():
        value = loss(theta, dict(zip(x, leaves, strict=True)), batch)
        grads = torch.autograd.grad(value.sum(), leaves, materialize_grads=True)
    return list(grads), value.detach()
