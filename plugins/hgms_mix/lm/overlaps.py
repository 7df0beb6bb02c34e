"""Rows that two sets share: a model must not be trained or tuned on its evaluation data."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hgms_mix.lm.rows import Index

SHOWN = 5


def overlap_warning(
    train: Mapping[str, Index],
    validation: Mapping[str, Index] | None = None,
    test: Mapping[str, Index] | None = None,
) -> str:
    """Return the message about exact matches between sets; empty without a match.

    Prompts (case folded, white space collapsed) of validation sets are compared with every training
    source, and prompts of test sets with every training source and validation set. The message has
    one line per pair of sets with matches, with the numbers of the first few rows, and advice.

    Notes
    -----
    Cost: a sort of every set, and one look-up per row and pair of sets; 64-bit numbers a few times
    over in memory.

    Examples
    --------
    >>> from hgms_mix.lm.table import Report
    >>> def index(*prompts):
    ...     return Index(np.arange(len(prompts)), np.array(prompts), Report())
    >>> print(overlap_warning({"s": index(11)}, {"v": index(11, 22)}))  # doctest: +ELLIPSIS
    prompts that are in two sets (exact matches; case and white space do not count):
      validation 'v' and train 's': 1 of 2 (50.0%); rows 0 of 'v'
      scores on such rows are too good for a model ...
    """
    parts = {"train": train, "validation": validation or {}, "test": test or {}}
    lines = []
    for part, other_part in (("validation", "train"), ("test", "train"), ("test", "validation")):
        for name, index in parts[part].items():
            for other, earlier in parts[other_part].items():
                rows = index.rows[np.isin(index.keys, earlier.keys)].tolist()
                some = ", ".join(map(str, rows[:SHOWN])) + (", …" if len(rows) > SHOWN else "")
                if rows:
                    lines.append(
                        f"  {part} {name!r} and {other_part} {other!r}: {len(rows)} of "
                        f"{index.size} ({len(rows) / index.size:.1%}); rows {some} of {name!r}"
                    )
    head = "prompts that are in two sets (exact matches; case and white space do not count):"
    advice = (
        "  scores on such rows are too good for a model that was trained on them: remove the rows "
        "from one of the two sets"
    )
    return "\n".join([head, *lines, advice]) if lines else ""
