"""What the phases of RHO-LOSS share: the losses of many rows, and sources' shares of rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hgms_core import Data, Key, NumericalError, Problem, State, Tree


def epoch_rows(key: Key, count: int, update: int, batch_size: int) -> Tensor:
    """Which of ``count`` rows an update sees: epoch after epoch, each in an order of its own, sees every row once."""
    epoch, at = divmod(update, math.ceil(count / batch_size))
    order = torch.randperm(count, generator=key.fold("epoch", epoch).generator())
    return order[at * batch_size : (at + 1) * batch_size]


def row_losses(problem: Problem, x: Tree, data: Data, index: Tensor, step: int, chunk: int) -> Tensor:
    """The loss of each row, ``[B]`` on the CPU, without a graph and without dropout, ``chunk`` rows at a time."""
    assert problem.sources is not None
    with torch.no_grad():
        losses = torch.cat([problem.sources.examples(x, data.rows(part.to(data.device))) for part in torch.split(index, chunk)])
    if not torch.isfinite(losses).all():
        raise NumericalError(f"step {step}: the loss of a row is not finite; lower the learning rates, or check the rows")
    return losses.cpu()


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
