"""The warm-up: its learning rates, and which rows an update sees."""

from __future__ import annotations

import math

import torch
from attrs import frozen
from torch import Tensor

from hgms_core import Key


@frozen(kw_only=True)
class Schedule:
    """Linear up over the first ``warmup`` share of all updates, then linearly down to (almost) nothing.

    >>> schedule = Schedule(lr=2e-5, warmup=0.03, epochs=4, updates=1000)
    >>> [f"{schedule.average(epoch):.2e}" for epoch in range(4)]      # what the LESS authors report, to two digits
    ['1.68e-05', '1.29e-05', '7.73e-06', '2.58e-06']
    """

    lr: float
    warmup: float
    epochs: int
    updates: int
    """Updates of one epoch."""

    def rate(self, update: int) -> float:
        total = self.epochs * self.updates
        rising = math.ceil(self.warmup * total)
        if update < rising:
            return self.lr * (update + 1) / rising
        return self.lr * (total - update) / (total - rising)

    def average(self, epoch: int) -> float:
        return sum(self.rate(epoch * self.updates + i) for i in range(self.updates)) / self.updates


def epoch_rows(key: Key, rows: Tensor, epoch: int, update: int, batch_size: int) -> Tensor:
    """Which of ``rows`` an update of an epoch sees; every epoch has an order of its own and sees each row once."""
    order = torch.randperm(len(rows), generator=key.fold("epoch", epoch).generator())
    return rows[order[update * batch_size : (update + 1) * batch_size]]
