"""Split the rows of an optimiser step across ranks.

The step equals the step of one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import define
from torch import Tensor
from torch.utils.data import Dataset, Sampler


@define(eq=False)
class Dealt(Sampler[list[int]]):
    """The micro-batches of rank ``rank`` of ``count``.

    Each optimiser step has ``together`` rows of ``order``; the last step has the remaining rows.
    Each rank has ``accumulation`` micro-batches per step. The rows of a step are split into
    consecutive micro-batches for all ranks, with sizes as equal as possible. These are assigned to
    the ranks in turn, so all ranks have rows of similar lengths. If there are fewer rows than
    micro-batches, the other micro-batches contain the complement ``~row`` of the first row.
    :class:`Unlearned` returns such a row without tokens to learn.

    >>> [
    ...     list(Dealt([4, 0, 1, 2, 3], together=4, accumulation=1, rank=rank, count=2))
    ...     for rank in (0, 1)
    ... ]
    [[[4, 0], [3]], [[1, 2], [-4]]]
    """

    order: Any
    together: int
    accumulation: int
    rank: int
    count: int

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.order, "set_epoch"):
            self.order.set_epoch(epoch)

    def __len__(self) -> int:
        return -(-len(self.order) // self.together) * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        for rows in torch.tensor(list(self.order), dtype=torch.int64).split(self.together):
            parts = rows.tensor_split(self.accumulation * self.count)
            for part in parts[self.rank :: self.count]:
                yield part.tolist() if len(part) else [~int(rows[0])]


@define(eq=False)
class Unlearned(Dataset[tuple[Tensor, Tensor]]):
    """``rows`` of (tokens, completion mask); ``~row`` returns the row with no tokens to learn."""

    rows: Sequence[tuple[Tensor, Tensor]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        if number >= 0:
            return self.rows[number]
        tokens, mask = self.rows[~number]
        return tokens, torch.zeros_like(mask)
