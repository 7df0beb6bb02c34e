"""Rows in two sets, copies within one set, and near copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.source_files import source_of

from hgms_mix.lm.examples import Example
from hgms_mix.lm.formats import Message
from hgms_mix.lm.overlaps import Overlap, overlap_warning, overlaps
from hgms_mix.lm.rows import Index, index_of, key_of, whole_of
from hgms_mix.lm.table import Report


def examples(*prompts: str) -> Index:
    """Rows with these prompts and one answer."""
    rows = [
        Example((Message("user", prompt), Message("assistant", "a")), row)
        for row, prompt in enumerate(prompts)
    ]
    keys = np.array([key_of(row.key) for row in rows])
    whole = np.array([whole_of(row) for row in rows])
    return Index(np.arange(len(rows)), keys, whole, Report())


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


def test_rows_that_stand_in_two_sources_or_twice_in_one_are_told(tmp_path: Path) -> None:
    """One file as two sources; some rows of it as a third; sixty copies of one row; the same
    prompts with other answers.
    """
    rows = [(f"{i} plus one", str(i + 1)) for i in range(40)]
    sets = {
        "whole": rows,
        "again": rows,
        "some": [*rows[:3], *((f"{i} twice", str(2 * i)) for i in range(20))],
        "copies": [("Say hi", "Hi")] * 60,
        "dots": [(prompt, ".") for prompt, _ in rows],
    }
    sources = {name: source_of(tmp_path / f"{name}.jsonl", entry) for name, entry in sets.items()}
    expected = (
        Overlap("train", "again", "train", "whole", 40, 40, (0, 1, 2, 3, 4)),
        Overlap("train", "some", "train", "whole", 3, 23, (0, 1, 2)),
        Overlap("train", "some", "train", "again", 3, 23, (0, 1, 2)),
        Overlap("train", "copies", "train", "copies", 59, 60, (1, 2, 3, 4, 5)),
    )
    assert overlaps({name: index_of(name, item) for name, item in sources.items()}) == expected
    # one copy in 42 is what real sets hold
    assert overlaps({"few": examples("x", *map(str, range(40)), "x")}) == ()
