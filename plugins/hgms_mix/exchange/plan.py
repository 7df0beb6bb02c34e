"""The row and source for each place of a training with changing weights.

They depend only on the place and the starts of the mixtures. Training can therefore resume at any
place without further state.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

from hgms_core import Key

BLOCK = 1024


@frozen(eq=False)
class Stretch:
    """Places from ``start`` on with one mixture; ``before`` counts earlier rows by source."""

    start: int
    weights: Tensor
    before: Tensor


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

    Examples
    --------
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
        self._rows = functools.lru_cache(maxsize=4)(self._draw_rows)

    def begin(self, start: int, weights: Tensor) -> None:
        """Use this mixture from place ``start`` on; draws divide the weights by their sum."""
        before = torch.zeros(len(self.names), dtype=torch.int64)
        while self.stretches and self.stretches[-1].start >= start:
            self.stretches.pop()
        if self.stretches:
            last = self.stretches[-1]
            count = start - last.start
            source, _ = self._rows(last, _round_up(count))
            before = last.before + torch.bincount(source[:count], minlength=len(self.names))
        self.stretches.append(Stretch(start, weights, before))

    def row(self, place: int) -> tuple[str, int]:
        """Return the source at a place, and the number of the row."""
        stretch = self.stretches[
            bisect_right(self.stretches, place, key=lambda stretch: stretch.start) - 1
        ]
        at = place - stretch.start
        source, rank = self._rows(stretch, _round_up(at + 1))
        number = int(source[at])
        return self.names[number], self._epochs[number].row(int(rank[at]))

    def history(self) -> list[tuple[int, Tensor]]:
        return [(stretch.start, stretch.weights) for stretch in self.stretches]

    def replay(self, history: Sequence[tuple[int, Tensor]]) -> None:
        """Restore a history."""
        self.stretches.clear()
        for start, weights in history:
            self.begin(int(start), weights)

    def _draw_rows(self, stretch: Stretch, count: int) -> tuple[Tensor, Tensor]:
        """Return the source of each of the first places, and its index among the source's rows."""
        stop = stretch.start + count
        blocks = range(stretch.start // BLOCK, (stop - 1) // BLOCK + 1)
        keys = [self.key.fold("place", block) for block in blocks]
        drawn = torch.cat(
            [torch.rand(BLOCK, dtype=torch.float64, generator=key.generator()) for key in keys]
        )
        drawn = drawn[stretch.start - blocks[0] * BLOCK :][:count]
        edges = stretch.weights.cumsum(0)
        source = torch.searchsorted(edges / edges[-1], drawn, right=True)
        source = source.clamp(max=int(stretch.weights.nonzero().max()))
        rank = torch.empty_like(source)
        for number in range(len(self.names)):
            mine = source == number
            rank[mine] = stretch.before[number] + torch.arange(int(mine.sum()))
        return source, rank


def _round_up(count: int) -> int:
    """Round up to a number of rows that is drawn at a time: few sizes are drawn per stretch."""
    return BLOCK << ((count - 1) // BLOCK).bit_length()
