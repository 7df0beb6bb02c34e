"""The warm-up: its learning rates, and a warning for too few updates."""

from __future__ import annotations

import math
from typing import final

from attrs import field, frozen

from hgms_core import component
from hgms_core.validators import less_than, not_negative, positive
from hgms_mix.lm import some_share


@final
@component
class Warmup:
    """Table ``warmup`` of LESS: training on a random part of all rows.

    Parameters
    ----------
    share
        Of the pool's rows.
    epochs
        Passes over them; gradients are compared after each.
    rising
        Share of the updates over which lr rises; then it falls linearly to 0.

    Examples
    --------
    >>> Warmup(epochs=2).share
    0.05
    """

    share: float = field(default=0.05, validator=some_share)
    epochs: int = field(default=4, validator=positive)
    rising: float = field(default=0.03, validator=[not_negative, less_than(1)])


@frozen(kw_only=True)
class Schedule:
    """The learning rates of a ``warmup``: a linear increase, then a linear decrease to (almost) 0.

    Examples
    --------
    >>> schedule = Schedule(lr=2e-5, warmup=Warmup(), updates=1000)
    >>> [
    ...     f"{schedule.average(epoch):.2e}" for epoch in range(4)
    ... ]  # what the LESS authors report, to two digits
    ['1.68e-05', '1.29e-05', '7.73e-06', '2.58e-06']
    """

    lr: float
    warmup: Warmup
    updates: int
    """Updates of one epoch."""

    def rate(self, update: int) -> float:
        total = self.warmup.epochs * self.updates
        rising = math.ceil(self.warmup.rising * total)
        if update < rising:
            return self.lr * (update + 1) / rising
        return self.lr * (total - update) / (total - rising)

    def average(self, epoch: int) -> float:
        return sum(self.rate(epoch * self.updates + i) for i in range(self.updates)) / self.updates
