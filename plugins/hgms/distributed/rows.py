"""A problem whose losses are computed in parts: each rank computes some rows of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from hgms.distributed.collectives import spread_tree, sum_over_ranks
from hgms.plugins import LOG
from hgms_core import Data, Key, Loss, Problem, Sources, Tree
from hgms_core.capabilities import HasOutputs, find

ROWS = 64
"""Rows per part in the test whether a loss is a mean over rows."""


def by_rows(problem: Problem, group: Any) -> Problem:
    """Return the problem with g and f computed jointly by the ranks of ``group``::

        g(θ, x; B) = 1/S Σ_r g(θ, x; B_r)        B_r: the r-th of S equal parts of the rows of B

    This equation is true if g is a mean over the rows of a batch, plus terms without rows.
    Gradients, Hessian products and their transposes each take one sum over ranks. Every rank
    computes the full loss if the batch cannot be split into S equal parts or the loss is not such a
    mean. Components that use g's outputs (Gauss–Newton products) also receive the full batch.
    """
    count = dist.get_world_size(group)
    if count == 1:
        return problem
    key = ("by rows", count)
    # the problem is the same at every step, and the entry has no reference to it
    if key not in problem.kept:
        uppers = {id(data): data for data in problem.upper_data.values()}.values()
        problem.kept[key] = attrs.evolve(
            problem,
            g=_split_loss(problem.g, problem, [problem.lower_data], group, "lower"),
            f=_split_loss(problem.f, problem, uppers, group, "upper"),
            compiler=None,
        )
    return problem.kept[key]


def _split_loss(
    loss: Loss, problem: Problem, tables: Iterable[Data], group: Any, level: str
) -> Loss:
    """Return the loss in parts, if it is a mean over the rows of all these ``tables``.

    Otherwise return the loss itself, and log a message once.
    """
    tables = [data for data in tables if data.size]
    if tables and all(is_mean(loss, problem, data, dist.get_world_size(group)) for data in tables):
        return _of_parts(loss, group)
    if tables and dist.get_rank() == 0:
        LOG.warning(
            "the %s loss is no mean over the rows of a batch: every rank computes all of it", level
        )
    return loss


def is_mean(loss: Loss, problem: Problem, data: Data, count: int) -> bool:
    """Return whether the loss of a batch is the mean of the losses of ``count`` equal parts.

    The test is exact up to rounding, and runs near the start of the problem. A mixture of sources
    is not such a mean, and its losses are too expensive for the test.
    """
    rows = min(data.size, ROWS * count) // count * count
    if not rows or problem.find(Sources) is not None:
        return False
    key = Key(0).fold("ranks")
    batch = data.batch(key.indices(data.size, rows, 1, data.device)[0])
    theta, x = (
        {name: _beside(leaf, key.fold(name)) for name, leaf in tree.items()}
        for tree in (problem.theta0, problem.x0)
    )
    with torch.no_grad():
        whole = loss(theta, x, batch)
        parts = [part_of(batch, rank, count) for rank in range(count)]
        if any(part is None for part in parts):
            return False
        mean = torch.stack([loss(theta, x, part) for part in parts if part is not None]).mean()
    return bool(torch.isfinite(whole)) and torch.allclose(
        mean, whole, rtol=1e3 * torch.finfo(whole.dtype).eps, atol=0.0
    )


def _beside(leaf: Tensor, key: Key) -> Tensor:
    noise = torch.randn(leaf.shape, generator=key.generator(), dtype=torch.float32)
    return leaf + 0.1 * noise.to(leaf)


def part_of(batch: Tree, rank: int, count: int) -> Tree | None:
    """Return the ``rank``-th of ``count`` equal parts of each column of a batch.

    The result is None if no equal parts exist.

    Examples
    --------
    >>> part_of({"a": torch.arange(4), "upper.b": torch.arange(2)}, 1, 2)
    {'a': tensor([2, 3]), 'upper.b': tensor([1])}
    >>> part_of({"a": torch.arange(3)}, 1, 2) is None, part_of({}, 0, 2) is None
    (True, True)
    """
    if not batch or any(not leaf.dim() or leaf.shape[0] % count for leaf in batch.values()):
        return None
    return {name: leaf.chunk(count)[rank] for name, leaf in batch.items()}


def _of_parts(loss: Loss, group: Any) -> Loss:
    rank = dist.get_rank(group)
    count = dist.get_world_size(group)

    def value(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        part = part_of(batch, rank, count)
        if part is None:
            return loss(theta, x, batch)
        return (
            sum_over_ranks(loss(spread_tree(theta, group), spread_tree(x, group), part), group)
            / count
        )

    outputs: Any = find(loss, HasOutputs)  # a Composite keeps its outputs and criterion
    return value if outputs is None else attrs.evolve(outputs, value=value)
