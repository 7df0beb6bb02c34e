"""Sort the rows of an optimiser step by length.

The rows of a micro-batch then need little padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attrs import define
from torch import Tensor
from torch.utils.data import Sampler


@define(eq=False)
class ByLength(Sampler[int]):
    """The rows of each optimiser step, sorted by length.

    ``order`` determines the rows of a step (``together`` rows). The sum over a step's rows is the
    same in any order, except for rounding.

    >>> list(ByLength([4, 0, 1, 2, 3], torch.tensor([5, 1, 4, 2, 3]), together=3))
    [1, 4, 0, 3, 2]
    """

    order: Any
    lengths: Tensor
    together: int

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.order, "set_epoch"):
            self.order.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        for rows in torch.tensor(list(self.order), dtype=torch.int64).split(self.together):
            yield from rows[self.lengths[rows].argsort(stable=True)].tolist()
