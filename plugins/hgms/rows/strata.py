"""Batches with equally many rows per group: the ``strata`` of a :class:`hgms_core.Data`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from attrs import field, frozen
from torch import Tensor

from hgms_core import Key


def _pairs(groups: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple(groups)


@frozen
class Strata:
    """The names and sizes of consecutive groups of rows, such as the sources of a mixture.

    A batch contains equally many rows per group, up to one. Each batch draws the groups that
    contribute one more row. The drawn rows of a group depend on its name, not on its position.
    Within one call, no row of a group is repeated before all its rows are drawn.

    >>> strata = Strata([("few", 2), ("many", 8)])
    >>> (strata.numbers(Key(0), batch_size=4, steps=5) < 2).sum(1)
    tensor([2, 2, 2, 2, 2])
    """

    groups: tuple[tuple[str, int], ...] = field(converter=_pairs)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def numbers(self, key: Key, batch_size: int, steps: int) -> Tensor:
        """Return row numbers, ``[steps, batch_size]``."""
        even, odd = divmod(batch_size, len(self.groups))
        # Sorted by name, so that the order of the groups does not change the drawn rows.
        names = sorted(name for name, _ in self.groups)
        generator = key.fold("odd").generator()
        extra = [
            torch.randperm(len(names), generator=generator)[:odd].tolist() if odd else []
            for _ in range(steps)
        ]
        chosen = [[names[i] for i in sorted(step)] for step in extra]
        own = {}
        first = 0
        for name, size in self.groups:
            counts = [even + (name in step) for step in chosen]
            needed = sum(counts)
            numbers = key.fold("stratum", name).indices(size, max(1, needed), 1)[0, :needed]
            own[name] = torch.split(first + numbers, counts)
            first += size
        batches = [
            [
                *(own[name][step][:even] for name, _ in self.groups),
                *(own[name][step][even:] for name in more),
            ]
            for step, more in enumerate(chosen)
        ]
        return torch.stack([torch.cat(parts) for parts in batches])
