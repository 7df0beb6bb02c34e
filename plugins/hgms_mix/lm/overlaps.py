"""Rows that two sets share.

A model must not be trained or tuned on its evaluation data. A row in two sources, or several times
in one, has a multiple weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
from attrs import frozen

from hgms_mix.lm.rows import Index

SHOWN = 5
COPIES = 0.05
"""The smallest share of copies in a source that is reported: real sets contain some."""


@final
@frozen
class Overlap:
    """``count`` of the ``size`` rows of ``part`` set ``name`` match rows of ``other_part`` set
    ``other``.

    Two rows match if their prompts are equal. ``rows`` are the numbers of the first few. For two
    training sources, the whole rows (prompt and answer) must be equal. If ``name`` is ``other``,
    the rows are copies of an earlier row.
    """

    part: str
    name: str
    other_part: str
    other: str
    count: int
    size: int
    rows: tuple[int, ...]

    def __str__(self) -> str:
        some = ", ".join(map(str, self.rows)) + (", …" if self.count > len(self.rows) else "")
        share = f"{self.count} of {self.size} ({self.count / self.size:.1%})"
        if (self.part, self.name) == (self.other_part, self.other):
            return f"  {self.part} {self.name!r}: {share} are copies of an earlier row; rows {some}"
        return (
            f"  {self.part} {self.name!r} and {self.other_part} {self.other!r}: {share}; rows "
            f"{some} of {self.name!r}"
        )


def overlaps(
    train: Mapping[str, Index],
    validation: Mapping[str, Index] | None = None,
    test: Mapping[str, Index] | None = None,
) -> tuple[Overlap, ...]:
    """Find exact matches between sets.

    Prompts (case folded, white space collapsed) of every validation and test set are compared with
    every training source, and those of every test set with every validation set. Whole rows of
    every training source are compared with the sources before it and (from a share of 5 % on) with
    itself. Only pairs with matches are returned.

    Notes
    -----
    Cost: a sort of every set, and one look-up per row and pair of sets; 64-bit numbers a few times
    over in memory.

    Examples
    --------
    >>> from hgms_mix.lm.table import Report
    >>> def index(*prompts):  # all with the same answer
    ...     numbers = np.array(prompts)
    ...     return Index(np.arange(len(prompts)), numbers, numbers, Report())
    >>> shared = overlaps({"s": index(11)}, {"v": index(11, 22)})
    >>> [(overlap.name, overlap.other, overlap.count, overlap.size) for overlap in shared]
    [('v', 's', 1, 2)]
    >>> copies = overlaps({"s": index(33, 44), "t": index(55, 55, 44)})
    >>> [(pair.name, pair.other, pair.count) for pair in copies]
    [('t', 's', 1), ('t', 't', 1)]
    """
    parts = {"train": train, "validation": validation or {}, "test": test or {}}
    known = {
        part: {name: np.unique(index.keys) for name, index in sets.items()}
        for part, sets in parts.items()
    }
    overlapping: list[Overlap] = []

    def add(part: str, name: str, other_part: str, other: str, rows: np.ndarray, size: int) -> None:
        if len(rows):
            overlapping.append(
                Overlap(
                    part, name, other_part, other, len(rows), size, tuple(rows[:SHOWN].tolist())
                )
            )

    for part, other_part in (("validation", "train"), ("test", "train"), ("test", "validation")):
        for name, index in parts[part].items():
            for other, having in known[other_part].items():
                rows = index.rows[_is_in(index.keys, having)]
                add(part, name, other_part, other, rows, index.size)
    before: dict[str, np.ndarray] = {}
    for name, index in train.items():
        for other, earlier in before.items():
            rows = index.rows[_is_in(index.whole, earlier)]
            add("train", name, "train", other, rows, index.size)
        before[name], first = np.unique(index.whole, return_index=True)
        if index.size - len(first) >= max(1, COPIES * index.size):
            add("train", name, "train", name, np.delete(index.rows, first), index.size)
    return tuple(overlapping)


def _is_in(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return which values are in ``known``, which is ascending."""
    if not len(known):
        return np.zeros(len(values), np.bool_)
    is_there: np.ndarray = (
        known[np.minimum(np.searchsorted(known, values), len(known) - 1)] == values
    )
    return is_there


def overlap_warning(overlapping: Sequence[Overlap]) -> str:
    """Return the message for the user.

    It has one line per pair of sets, and advice. It is empty if no rows overlap.
    """
    lines = []
    if judged := [str(overlap) for overlap in overlapping if overlap.part != "train"]:
        lines += [
            "prompts that are in two sets (exact matches; case and white space do not count):",
            *judged,
        ]
        lines.append(
            "  scores on such rows are too good for a model that was trained on them: remove the "
            "rows from one of the two sets"
        )
    if copied := [str(overlap) for overlap in overlapping if overlap.part == "train"]:
        lines += [
            "rows that are in two sources, or several times in one (equal prompt and answer):",
            *copied,
        ]
        lines.append(
            "  such rows have a multiple weight, and the weights of two sources that share them "
            "are hard to interpret"
        )
    return "\n".join(lines)
