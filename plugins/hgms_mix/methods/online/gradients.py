"""Gradients of all source losses at one x, and their agreement with a target gradient.

One pass computes all gradients if this is faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import hgms_mix.lm
from hgms_core import Batch, Data, Key, Problem, Sources, Tree, gradient, groups


def even_rows(data: Data, sources: Sources, key: Key, count: int, steps: int) -> Tensor:
    """Return the numbers of ``count`` rows of every source, ``[steps, S, count]``, in source
    order.
    """
    places = {name: place for place, (name, _) in enumerate(data.strata or ())}
    index = data.numbers(key, count * len(places), steps).reshape(steps, len(places), count)
    return index[:, [places[name] for name in sources.names]]


def source_gradients(
    problem: Problem, x: Tree, index: Tensor, step: int
) -> tuple[list[Tensor], Tensor]:
    """Return ∇_x ℓ_s on the rows ``index[s]``, as leaves ``[S, …]``, and the losses ``[S]``.

    One pass uses S copies of x, each with separate rows. If the model is so large that a single
    copy keeps the machine busy, sources are processed one after the other.

    The copies are views: only their gradients take memory.
    """
    sources = hgms_mix.lm.sources_of(problem, "gradients are of")
    count = len(index)
    batch = problem.lower_data.rows(index.to(problem.lower_data.device))
    copies = {name: leaf.expand(count, *leaf.shape) for name, leaf in x.items()}
    parts = []
    losses = []
    for group in groups(
        sources.pooled,
        copies,
        own_batch=True,
        rows=index.shape[1],
        trial=lambda: (problem.theta0, batch),
    ):
        own = {name: group.rows_of(leaf) for name, leaf in batch.items()}
        grads, values = gradient(group.loss, problem.theta0, group.x, own)
        parts.append([leaf[None] for leaf in grads] if isinstance(group.part, int) else grads)
        losses.append(values.reshape(-1))
    values = torch.cat(losses)
    hgms_mix.lm.check_finite(values, "the loss of a source", step)
    return [torch.cat(leaves) for leaves in zip(*parts, strict=True)], values


def directions_of(
    sources: Sources, theta: Tree, x: Tree, batch: Batch
) -> tuple[Tree, Tensor, Tensor]:
    """Return (u, n, ℓ) of a batch.

    u_s = Σ_i ∇_x ℓ_i(x) over the batch's rows of source s, leaves ``[S, …]``. n is the number of
    these rows, ``[S]``. ℓ is the mean loss of all rows.

    Rows of a source are evaluated together: one pass per source, over all rows of the batch in
    total.
    """
    count = len(sources.names)
    u = {name: leaf.new_zeros(count, *leaf.shape) for name, leaf in x.items()}
    held = next(iter(x.values())).new_zeros(count)
    losses = list[Tensor]()
    for source in batch["source"].unique().tolist():
        where = (batch["source"] == source).nonzero()[:, 0]
        own = {name: leaf.index_select(0, where) for name, leaf in batch.items() if leaf.dim()}
        grads, loss = gradient(sources.pooled, theta, x, own)
        held[source] = len(where)
        losses.append(loss * len(where))
        torch._foreach_add_([leaf[source] for leaf in u.values()], grads, alpha=len(where))
    return u, held, torch.stack(losses).sum() / held.sum()


def norms(grads: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norms of stacked vectors, ``[S]``.

    Examples
    --------
    >>> norms([torch.tensor([[3.0], [0.0]]), torch.tensor([[4.0], [1.0]])])
    tensor([5., 1.])
    """
    return (
        torch.stack([leaf.reshape(leaf.shape[0], -1).square().sum(1) for leaf in grads])
        .sum(0)
        .sqrt()
    )


def at_most(grads: Sequence[Tensor], limit: float | None) -> list[Tensor]:
    """Scale stacked vectors that are longer than the ``limit`` to this length (None: no limit)."""
    if limit is None:
        return list(grads)
    factor = (limit / (norms(grads) + 1e-6)).clamp_max(1)
    return [leaf * factor.reshape(-1, *[1] * (leaf.dim() - 1)) for leaf in grads]


def products(grads: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return ⟨a_r, b_s⟩ of two stacks of vectors, ``[R, S]``.

    Examples
    --------
    >>> products([torch.tensor([[1.0, 2.0]])], [torch.tensor([[1.0, 0.0], [0.0, 1.0]])])
    tensor([[1., 2.]])
    """
    return torch.stack(
        [
            a.reshape(a.shape[0], math.prod(a.shape[1:]))
            @ b.reshape(b.shape[0], math.prod(b.shape[1:])).T
            for a, b in zip(grads, others, strict=True)
        ]
    ).sum(0)


def mix(grads: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """Return Σ_s ω_s g_s."""
    return [torch.tensordot(weights.to(leaf), leaf, dims=1) for leaf in grads]
