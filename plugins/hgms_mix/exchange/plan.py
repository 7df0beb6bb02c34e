"""The row and source for each place of a training with changing weights.

They depend only on the place and the starts of the mixtures. Training can therefore resume at any
place without further state.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import torch
from attrs import define, field
from torch import Tensor

from hgms_core import Key

BLOCK = 1024


@define(eq=False)
class Stretch:
    """Places from ``start`` on with one mixture.

    ``before`` counts the earlier rows of each source. ``source`` and ``rank`` are computed up to
    the largest requested place. For each place they are its source and the index among the draws of
    that source.
    """

    start: int
    weights: Tensor
    before: Tensor
    source: Tensor = field(factory=lambda: torch.zeros(0, dtype=torch.int64))
    rank: Tensor = field(factory=lambda: torch.zeros(0, dtype=torch.int64))


class Epochs:
    """Row 0, 1, 2, … of a source, in shuffled epochs.

    All rows come in one shuffled order, then all in another. No row repeats before all rows came
    once.
    """

    def __init__(self, size: int, key: Key) -> None:
        self.size = size
        self.key = key
        self._order = functools.lru_cache(maxsize=4)(self._shuffle)

    def row(self, number: int) -> int:
        epoch, position = divmod(number, self.size)
        return int(self._order(epoch)[position])

    def rows(self, first: int, count: int) -> list[int]:
        return [self.row(number) for number in range(first, first + count)]

    def _shuffle(self, epoch: int) -> Tensor:
        return torch.randperm(self.size, generator=self.key.fold(epoch).generator())


class Plan:
    """Place 0, 1, 2, … of a training: a source drawn by the current mixture, and its next row.

    The random numbers depend only on the key and the place. A source's rows come in
    :class:`Epochs`.

    >>> plan = Plan({"a": 3, "b": 5}, Key(0))
    >>> plan.begin(0, torch.tensor([1.0, 0.0], dtype=torch.float64))
    >>> sorted(plan.row(place) for place in range(3))
    [('a', 0), ('a', 1), ('a', 2)]
    >>> plan.begin(3, torch.tensor([0.0, 1.0], dtype=torch.float64))
    >>> plan.row(3)[0], plan.row(2)[0]
    ('b', 'a')
    """

    def __init__(self, sizes: Mapping[str, int], key: Key) -> None:
        self.names, self.sizes, self.key = tuple(sizes), tuple(sizes.values()), key
        self.stretches: list[Stretch] = []
        self._epochs = [Epochs(size, key.fold("rows", name)) for name, size in sizes.items()]

    def begin(self, start: int, weights: Tensor) -> None:
        """Use this mixture from place ``start`` on."""
        weights = (weights / weights.sum()).to(torch.float64)
        before = torch.zeros(len(self.names), dtype=torch.int64)
        while self.stretches and self.stretches[-1].start >= start:
            self.stretches.pop()
        if self.stretches:
            last = self.stretches[-1]
            self._extend(last, start - last.start)
            last.source, last.rank = (
                last.source[: start - last.start].clone(),
                last.rank[: start - last.start].clone(),
            )
            before = last.before + torch.bincount(last.source, minlength=len(self.names))
            for earlier in self.stretches[-2:-1]:
                # Recomputed on request.
                earlier.source = earlier.rank = torch.zeros(0, dtype=torch.int64)
        self.stretches.append(Stretch(start, weights, before))

    def row(self, place: int) -> tuple[str, int]:
        """Return the source at a place, and the number of the row."""
        stretch = self.stretches[
            bisect_right(self.stretches, place, key=lambda stretch: stretch.start) - 1
        ]
        at = place - stretch.start
        self._extend(stretch, at + 1)
        number = int(stretch.source[at])
        return self.names[number], self._epochs[number].row(int(stretch.rank[at]))

    def history(self) -> list[tuple[int, Tensor]]:
        return [(stretch.start, stretch.weights) for stretch in self.stretches]

    def replay(self, history: Sequence[tuple[int, Tensor]]) -> None:
        self.stretches.clear()
        for start, weights in history:
            self.begin(int(start), weights)

    def _extend(self, stretch: Stretch, count: int) -> None:
        if count <= len(stretch.source):
            return
        stop = stretch.start + max(count, 2 * len(stretch.source), BLOCK)
        blocks = range(stretch.start // BLOCK, (stop - 1) // BLOCK + 1)
        drawn = torch.cat(
            [
                torch.rand(
                    BLOCK, dtype=torch.float64, generator=self.key.fold("place", block).generator()
                )
                for block in blocks
            ]
        )
        drawn = drawn[stretch.start - blocks[0] * BLOCK :][: stop - stretch.start]
        edges = stretch.weights.cumsum(0)
        source = torch.searchsorted(edges / edges[-1], drawn, right=True)
        stretch.source = source.clamp(max=int(stretch.weights.nonzero().max()))
        stretch.rank = torch.empty_like(stretch.source)
        for number in range(len(self.names)):
            mine = stretch.source == number
            stretch.rank[mine] = stretch.before[number] + torch.arange(int(mine.sum()))
