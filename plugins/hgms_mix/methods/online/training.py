"""Functions that the four methods share: mixtures, batches drawn by a mixture, and training on
them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

import hgms_mix.lm
from hgms_core import ConfigError, Cost, Data, Key, Problem, Sources, Tree


class Settings(Protocol):
    """The settings that training requires of a method: AdamW and the batch size."""

    @property
    def lr(self) -> float: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...


def even(sources: Sources) -> Tensor:
    """Return ω = 1/S."""
    return torch.full((len(sources.names),), 1 / len(sources.names), dtype=torch.float64)


def shares_of_rows(problem: Problem, sources: Sources) -> Tensor:
    """Return ω_s = n_s / n, the share of source s of all rows.

    The counts are from the files of the sources, even if the task keeps fewer rows.
    """
    sizes = hgms_mix.lm.source_sizes(problem)
    counts = torch.tensor([sizes[name] for name in sources.names], dtype=torch.float64)
    return counts / counts.sum()


def theta_of(sources: Sources, weights: Tensor) -> Tree:
    """Return the θ that gives these weights of the sources."""
    return sources.theta(dict(zip(sources.names, weights.tolist(), strict=True)))


def tilted(weights: Tensor, scores: Tensor) -> Tensor:
    """Return ω_s e^(scores_s), normalised to sum 1: a step of exponentiated gradient.

    >>> tilted(torch.tensor([0.5, 0.5]), torch.tensor([3.0, 1.0]).log())
    tensor([0.7500, 0.2500])
    """
    return torch.softmax(weights.log() + scores, 0)


def mixture_rows(
    data: Data, sources: Sources, weights: Tensor, key: Key, batch_size: int, steps: int
) -> Tensor:
    """Return row numbers ``[steps, batch_size]`` drawn by the mixture.

    Source s has ω_s·batch_size rows per batch, rounded up or down at random with this mean. Within
    one call, no row of a source is repeated before all its rows are used. Rows are drawn by the
    name of the source, not by its position.
    """
    strata = data.strata or ()
    shares = dict(zip(sources.names, weights.tolist(), strict=True))
    sizes = dict(strata)
    first = 0
    firsts = {}
    for name, size in strata:
        firsts[name], first = first, first + size
    names = sorted(sizes)
    ends = (
        torch.tensor([0.0, *(shares[name] for name in names)], dtype=torch.float64)
        .cumsum(0)
        .mul(batch_size)
    )
    ends = ends.clamp_max(batch_size)
    ends[-1] = batch_size
    luck = torch.rand(steps, 1, generator=key.fold("counts").generator(), dtype=torch.float64)
    counts = (ends + luck).floor().diff(dim=1).long()
    parts = []
    for position, name in enumerate(names):
        total = int(counts[:, position].sum())
        numbers = key.fold("rows", name).indices(sizes[name], max(1, total), 1)[0, :total]
        parts.append(torch.split(firsts[name] + numbers, counts[:, position].tolist()))
    return torch.stack([torch.cat(step) for step in zip(*parts, strict=True)])


def trained(
    problem: Problem,
    weights: Tensor,
    train: Tree,
    method: Settings,
    *,
    key: Key,
    done: int,
    count: int,
    step: int,
) -> tuple[Tree, Tensor, Cost]:
    """Run ``count`` further updates of AdamW, after ``done``, on batches drawn by the mixture.

    Returns the state, the loss of the last batch and the cost.

    Cost: 1 lower gradient per update.
    """
    data = problem.lower_data
    sources = _sources(problem)
    loss = torch.empty(())
    index = mixture_rows(data, sources, weights, key.fold(done), method.batch_size, count)
    for i in range(count):
        train, loss = hgms_mix.lm.adamw(
            sources.pooled,
            problem.theta0,
            data.rows(index[i].to(data.device)),
            train,
            method,
            lr=method.lr,
            count=done + i + 1,
            step=step,
        )
    return train, loss, Cost(lower_gradients=count, rows=count * method.batch_size)


def check_batch(sources: Sources, method: str, batch_size: int) -> None:
    """Raise ConfigError if a batch is too small for rows of all sources."""
    if batch_size < len(sources.names):
        raise ConfigError(
            "out-of-range",
            f"batch_size={batch_size} must be at least {len(sources.names)}: method {method!r} "
            "requires rows of all sources in a batch",
            place=("method", "batch_size"),
        )


def _sources(problem: Problem) -> Sources:
    return hgms_mix.lm.sources_of(problem, "training by a mixture draws from")
