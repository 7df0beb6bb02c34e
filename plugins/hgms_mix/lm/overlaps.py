"""Rows that two sets share: a model must not be trained or tuned on its evaluation data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
from attrs import frozen

from hgms_mix.lm.rows import Index

SHOWN = 5


@final
@frozen
class Overlap:
    """``count`` of the ``size`` rows of ``part`` set ``name`` match rows of ``other_part`` set
    ``other``.

    Two rows match if their prompts are equal. ``rows`` are the numbers of the first few.
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
    every training source, and those of every test set with every validation set. Only pairs with
    matches are returned.

    Notes
    -----
    Cost: a sort of every set, and one look-up per row and pair of sets; 64-bit numbers a few times
    over in memory.

    Examples
    --------
    >>> from hgms_mix.lm.table import Report
    >>> def index(*prompts):
    ...     return Index(np.arange(len(prompts)), np.array(prompts), Report())
    >>> shared = overlaps({"s": index(11)}, {"v": index(11, 22)})
    >>> [(overlap.name, overlap.other, overlap.count, overlap.size) for overlap in shared]
    [('v', 's', 1, 2)]
    """
    parts = {"train": train, "validation": validation or {}, "test": test or {}}
    overlapping: list[Overlap] = []
    for part, other_part in (("validation", "train"), ("test", "train"), ("test", "validation")):
        for name, index in parts[part].items():
            for other, earlier in parts[other_part].items():
                rows = index.rows[np.isin(index.keys, earlier.keys)]
                if len(rows):
                    some = tuple(rows[:SHOWN].tolist())
                    counts = len(rows), index.size
                    overlapping.append(Overlap(part, name, other_part, other, *counts, some))
    return tuple(overlapping)


def overlap_warning(overlapping: Sequence[Overlap]) -> str:
    """Return the message for the user.

    It has one line per pair of sets, and advice. It is empty if no rows overlap.
    """
    if not overlapping:
        return ""
    return "\n".join(
        [
            "prompts that are in two sets (exact matches; case and white space do not count):",
            *map(str, overlapping),
            "  scores on such rows are too good for a model that was trained on them: remove the "
            "rows from one of the two sets",
        ]
    )
