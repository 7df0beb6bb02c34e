"""Rows in two sets, copies within one set, and near copies."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from support.source_files import source_of

from hgms_mix.lm.examples import Example
from hgms_mix.lm.formats import Message
from hgms_mix.lm.near_duplicates import near_copies, shingles
from hgms_mix.lm.overlaps import Overlap, overlap_warning, overlaps
from hgms_mix.lm.rows import Index, index_of, key_of, whole_of
from hgms_mix.lm.table import Report
from hgms_mix.lm.tokenizers import byte_tokenizer
from hgms_mix.lm.tokens import token_table


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
    prompts with other answers. Tables and indices overlap alike.
    """
    pytest.importorskip("transformers", reason="transformers is not installed")
    rows = [(f"{i} plus one", str(i + 1)) for i in range(40)]
    sets = {
        "whole": rows,
        "again": rows,
        "some": [*rows[:3], *((f"{i} twice", str(2 * i)) for i in range(20))],
        "copies": [("Say hi", "Hi")] * 60,
        "dots": [(prompt, ".") for prompt, _ in rows],
    }
    sources = {name: source_of(tmp_path / f"{name}.jsonl", entry) for name, entry in sets.items()}
    tables = {
        name: token_table("s", item, byte_tokenizer(), template="plain", max_length=64)
        for name, item in sources.items()
    }
    expected = (
        Overlap("train", "again", "train", "whole", 40, 40, (0, 1, 2, 3, 4)),
        Overlap("train", "some", "train", "whole", 3, 23, (0, 1, 2)),
        Overlap("train", "some", "train", "again", 3, 23, (0, 1, 2)),
        Overlap("train", "copies", "train", "copies", 59, 60, (1, 2, 3, 4, 5)),
    )
    assert overlaps(tables) == expected
    assert overlaps({name: index_of(name, item) for name, item in sources.items()}) == expected
    # one copy in 42 is what real sets hold
    assert overlaps({"few": examples("x", *map(str, range(40)), "x")}) == ()


def example(words: list[str], row: int) -> Example:
    user, assistant = " ".join(words[:10]), " ".join(words[10:])
    return Example((Message("user", user), Message("assistant", assistant)), row)


def test_rows_with_a_word_changed_are_near_and_others_are_not() -> None:
    pytest.importorskip("rensa", reason="rensa is not installed: pip install 'hgms[near]'")
    draw = random.Random(0)

    def text(words: int = 60) -> list[str]:
        return [f"word{draw.randrange(400)}" for _ in range(words)]

    first = [text() for _ in range(60)]
    second = [
        *([*words[:30], "other", *words[31:]] for words in first[:20]),  # 55 / 61 in common
        *([*words[:30], *text(30)] for words in first[20:40]),  # a third
        *(text() for _ in range(20)),
    ]
    a, b = ([example(words, row) for row, words in enumerate(rows)] for rows in (first, second))
    (pair,) = near_copies({"a": a, "b": b, "c": [example(text(), 0)]})
    assert (pair.name, pair.other, pair.count, pair.size) == ("b", "a", 20, 60)
    for row, other, agreement in pair.pairs:
        left, right = set(shingles(b[row])), set(shingles(a[other]))
        assert row == other
        assert len(left & right) / len(left | right) == pytest.approx(55 / 61)
        assert agreement == pytest.approx(55 / 61, abs=0.12)
    short = [Example((Message("user", "Hi"), Message("assistant", "Ho")), 3)]
    other = [Example((Message("assistant", "hi  HO"),), 5)]
    assert near_copies({"a": short, "b": other})[0].pairs == ((5, 3, 1.0),)
