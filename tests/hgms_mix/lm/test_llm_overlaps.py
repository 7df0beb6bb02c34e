"""Rows in two sets."""

from __future__ import annotations

import numpy as np

from hgms_mix.lm.examples import Example
from hgms_mix.lm.formats import Message
from hgms_mix.lm.overlaps import Overlap, overlap_warning, overlaps
from hgms_mix.lm.rows import Index, key_of
from hgms_mix.lm.table import Report


def examples(*prompts: str) -> Index:
    """Rows with these prompts and one answer."""
    rows = [
        Example((Message("user", prompt), Message("assistant", "a")), row)
        for row, prompt in enumerate(prompts)
    ]
    keys = np.array([key_of(row.key) for row in rows])
    return Index(np.arange(len(rows)), keys, Report())


def test_overlaps_are_counted_between_the_parts_and_told() -> None:
    result = overlaps(
        {"clean": examples("one", "Two  words", "three"), "other": examples("four")},
        {"val": examples("two\nWORDS", "five", "five")},
        {"test": examples("FIVE", "four", "six", "one "), "far": examples("seven")},
    )
    assert result == (
        Overlap("validation", "val", "train", "clean", 1, 3, (0,)),
        Overlap("test", "test", "train", "clean", 1, 4, (3,)),
        Overlap("test", "test", "train", "other", 1, 4, (1,)),
        Overlap("test", "test", "validation", "val", 1, 4, (0,)),
    )
    assert "1 of 3 (33.3%); rows 0 of 'val'" in overlap_warning(result)
