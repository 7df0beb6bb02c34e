"""Rows in two sets."""

from __future__ import annotations

import numpy as np

from hgms.store import short_number
from hgms_mix.lm.examples import Example
from hgms_mix.lm.formats import Message
from hgms_mix.lm.overlaps import overlap_warning
from hgms_mix.lm.rows import Index
from hgms_mix.lm.table import Report


def examples(*prompts: str) -> Index:
    """Rows with these prompts and one answer."""
    rows = [
        Example((Message("user", prompt), Message("assistant", "a")), row)
        for row, prompt in enumerate(prompts)
    ]
    keys = np.array([short_number(row.key.encode()) for row in rows])
    return Index(np.arange(len(rows)), keys, Report())


def test_overlaps_are_counted_between_the_parts_and_told() -> None:
    result = overlap_warning(
        {"clean": examples("one", "Two  words", "three"), "other": examples("four")},
        {"val": examples("two\nWORDS", "five", "five")},
        {"test": examples("FIVE", "four", "six", "one "), "far": examples("seven")},
    )
    assert result.splitlines()[1:-1] == [
        "  validation 'val' and train 'clean': 1 of 3 (33.3%); rows 0 of 'val'",
        "  test 'test' and train 'clean': 1 of 4 (25.0%); rows 3 of 'test'",
        "  test 'test' and train 'other': 1 of 4 (25.0%); rows 1 of 'test'",
        "  test 'test' and validation 'val': 1 of 4 (25.0%); rows 0 of 'test'",
    ]
    many = examples(*map(str, range(7)))
    assert "7 of 7 (100.0%); rows 0, 1, 2, 3, 4, … of 'v'" in overlap_warning(
        {"s": many}, {"v": many}
    )
    assert overlap_warning({"s": many}, {"v": examples("other")}) == ""
