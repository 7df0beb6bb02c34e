"""Losses of N stacked candidates: one vmapped computation, or one candidate after the other.

``auto`` depends on the sizes (:func:`prefers_stack`) and never on measured time, so that runs are
reproducible. It evaluates one candidate after the other if ``torch.func.vmap`` cannot evaluate
the loss: ``.item()``, an ``if`` on a value, in-place fills, boolean indexes, NumPy.

A loss that declares :class:`~hgms_core.capabilities.StacksCandidates` replaces
``torch.func.vmap``. For example, all candidates of a language model share its frozen base, and its
method checkpoints activations, which vmap does not support. For such a loss, ``auto`` evaluates
one candidate after the other on a CPU, and on every device if it declares ``NotStackable``.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from textwrap import shorten
from typing import Any, Literal, get_args

import torch
from attrs import frozen
from torch import Tensor

from hgms_core.capabilities import NotStackable, StacksCandidates, find
from hgms_core.data import Batch
from hgms_core.errors import ConfigError, HgmsError, one_of
from hgms_core.hypergrad import twice_differentiable_attention
from hgms_core.problem import Loss
from hgms_core.torch_errors import NOT_STACKABLE, explain_errors, first_line, out_of_memory
from hgms_core.trees import Tree

LOG = logging.getLogger("hgms")

Mode = Literal["auto", "stacked", "loop"]
"""How N candidates are evaluated: in one computation, one after the other, or by the mode that is
possible and likely faster (``auto``).
"""

Trial = Callable[[], tuple[Tree, Batch]]
"""Returns (θ, batch) for a trial of a loss. The batch has a leading axis N if each candidate has a
separate batch.
"""

IMPURE = ("random-loss", "loss-with-state")
"""Error codes of losses that are wrong in every mode."""

STACK_BELOW = 5_000_000
"""The largest number of multiply-adds in one candidate's forward pass for which stacking is faster
on a CPU (`benchmarks/bench_pipeline.py`).
"""


def prefers_stack(x: Tree, rows: int, mode: Mode) -> bool:
    """Return whether to evaluate the stacked ``x`` at once on batches of ``rows`` examples.

    On a GPU, ``auto`` always stacks, because the kernels of a single candidate are too small. On a
    CPU it stacks up to STACK_BELOW multiply-adds; above this size, N candidates do not fit into the
    cache. A parameter costs about one multiply-add per example.
    """
    leaf = next(iter(x.values()))
    if mode != "auto" or leaf.shape[0] == 1:
        return mode == "stacked"
    size = sum(leaf[0].numel() for leaf in x.values())
    return leaf.is_cuda or size * rows <= STACK_BELOW


@frozen(eq=False)
class Group:
    """Candidates out of N that are evaluated together: views of their rows, and their loss.

    ``part`` selects their rows from a tensor with a leading axis N. It is a slice for a stacked
    group, and a number for a single candidate without the axis.
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
    trial: Trial | None = None,
) -> list[Group]:
    """Split the N candidates into groups that are evaluated one after the other.

    A group is a single candidate (``mode = "loop"``), or a stack of at most ``chunk`` candidates,
    which limits the memory of activations. ``auto`` decides by the size of the candidates and by
    ``rows``, the number of rows in one candidate's batch. With ``own_batch``, each candidate has a
    separate batch; otherwise all candidates share one batch. The ``x`` of a group are views.

    ``trial()`` returns (θ, batch) for a trial of the loss before ``auto`` stacks it, once per loss.
    If ``torch.func.vmap`` cannot evaluate the loss, each candidate is a separate group. Cost: two
    values, which no budget counts.
    """
    one_of("mode", mode, get_args(Mode))
    count = next(iter(x.values())).shape[0]
    own = find(loss, StacksCandidates)
    if mode == "auto" and count > 1 and (own or find(loss, NotStackable)):
        # A loss with this method has a large model; one candidate then keeps all CPU cores busy.
        mode = "stacked" if own and next(iter(x.values())).is_cuda else "loop"
    stacked = prefers_stack(x, rows, mode)
    if stacked and mode == "auto" and trial is not None:
        stacked = _is_stackable(loss, x, own_batch, trial)
    if not stacked:
        return [Group(i, {name: leaf[i] for name, leaf in x.items()}, loss) for i in range(count)]
    step = chunk or count
    parts = [slice(first, min(first + step, count)) for first in range(0, count, step)]
    return [
        Group(part, {name: leaf[part] for name, leaf in x.items()}, _vmap_loss(loss, own_batch))
        for part in parts
    ]


_TRIED: dict[int, dict[bool, bool]] = {}
"""Whether vmap can evaluate a loss, by the id of the loss and ``own_batch``. An entry exists as
long as its loss.
"""


def _is_stackable(loss: Loss, x: Tree, own_batch: bool, trial: Trial) -> bool:
    tried = _TRIED.get(id(loss))
    if tried is None:
        tried = {}
        try:
            weakref.finalize(loss, _TRIED.pop, id(loss), None).atexit = False
            _TRIED[id(loss)] = tried
        except TypeError:
            pass  # a loss without weak references is tried at each call
    if own_batch not in tried:
        theta, batch = trial()
        two = {name: leaf[:2].detach() for name, leaf in x.items()}
        own = {name: leaf[:2] for name, leaf in batch.items()} if own_batch else batch
        try:
            with torch.no_grad():
                _vmap_loss(loss, own_batch)(theta, two, own)
        except ConfigError as error:
            if error.code in IMPURE:
                raise
            if error.code != NOT_STACKABLE.code:
                _first(loss, theta, two, own, own_batch)
            LOG.warning(
                "candidates are evaluated one after the other, which may be slower: torch.func.vmap"
                " cannot evaluate the loss (%s)",
                shorten(first_line(error.__cause__ or error), 120, placeholder=" …"),
            )
            tried[own_batch] = False
        else:
            tried[own_batch] = True
    return tried[own_batch]


def _vmap_loss(loss: Loss, own_batch: bool) -> Loss:
    """Return ``loss`` for stacked candidates.

    It raises ``loss-not-stackable`` if only vmap cannot evaluate the loss.
    """
    own = find(loss, StacksCandidates)
    if own is not None:
        return lambda theta, x, batch: own.stacked_losses(theta, x, batch, own_batch)
    mapped = torch.func.vmap(loss, in_dims=(None, 0, 0 if own_batch else None))

    def evaluate(theta: Tree, x: Tree, batch: Batch) -> Tensor:
        try:
            with explain_errors():
                return mapped(theta, x, batch)
        except HgmsError:
            raise
        except Exception as error:  # vmap may not support an operation of the loss
            if out_of_memory(error):
                raise
            _first(loss, theta, x, batch, own_batch)
            raise NOT_STACKABLE.at() from error

    return evaluate


def _first(loss: Loss, theta: Tree, x: Tree, batch: Batch, own_batch: bool) -> None:
    """Evaluate the first candidate without vmap. This raises the error of the loss, if any."""
    with torch.no_grad():
        loss(
            theta,
            {name: leaf[0] for name, leaf in x.items()},
            {name: leaf[0] for name, leaf in batch.items()} if own_batch else batch,
        )


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
    """Return the losses of all candidates on one shared batch, ``[N]``, without a graph.

    Notes
    -----
    Cost: N values.

    Examples
    --------
    >>> square = lambda theta, x, batch: theta["t"] * x["x"] ** 2
    >>> values(square, {"t": torch.tensor(2.0)}, {"x": torch.tensor([1.0, 3.0])}, {})
    tensor([ 2., 18.])
    """
    with torch.no_grad():
        parts = groups(loss, x, rows=rows, mode=mode, chunk=chunk, trial=lambda: (theta, batch))
        return torch.cat([part.loss(theta, part.x, batch).reshape(-1) for part in parts])


def gradient(
    loss: Loss, theta: Tree, x: Tree, batch: Batch, graph: bool = False
) -> tuple[list[Tensor], Tensor]:
    """Return (∇_x loss as a list of leaves, the loss), for one candidate or a stacked group.

    Stacked candidates do not interact, so the gradient of the sum of their losses contains the
    gradient of each candidate. One ordinary backward pass over a vmapped forward pass computes it.
    With ``graph``, the gradient is a differentiable function of θ, and of x if x requires one.

    Notes
    -----
    Cost: one gradient per candidate.

    Examples
    --------
    >>> gradient(lambda theta, x, batch: (x["x"] ** 2).sum(), {}, {"x": torch.tensor([3.0])}, {})
    ([tensor([6.])], tensor(9.))
    """
    leaves = [
        leaf if graph and leaf.requires_grad else leaf.detach().requires_grad_()
        for leaf in x.values()
    ]
    twice = twice_differentiable_attention() if graph else contextlib.nullcontext()
    with torch.enable_grad(), twice:
        value = loss(theta, dict(zip(x, leaves, strict=True)), batch)
        total = value.sum() if value.dim() else value
        grads = torch.autograd.grad(total, leaves, create_graph=graph, materialize_grads=True)
    return list(grads), value.detach()
