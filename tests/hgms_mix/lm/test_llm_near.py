"""Near-duplicates: rows with a word changed are found, others are not, and estimates are near to
Jaccard's index.
"""

from __future__ import annotations

import random

import pytest
from support.helpers import rejects

from hgms_core import ConfigError
from hgms_mix.lm.formats import Message
from hgms_mix.lm.near_duplicates import near_copies, shingles
from hgms_mix.lm.sources import Example

pytest.importorskip("rensa", reason="rensa is not installed: pip install 'hgms[near]'")
WORDS = [f"word{number}" for number in range(400)]


def text(draw: random.Random, words: int = 60) -> list[str]:
    return [draw.choice(WORDS) for _ in range(words)]


def example(words: list[str], row: int) -> Example:
    return Example(
        (Message("user", " ".join(words[:10])), Message("assistant", " ".join(words[10:]))), row
    )


def jaccard(example: Example, other: Example) -> float:
    left = set(shingles(example))
    right = set(shingles(other))
    return len(left & right) / len(left | right)


def test_rows_with_a_word_changed_are_near_and_others_are_not() -> None:
    draw = random.Random(0)
    first = [text(draw) for _ in range(60)]
    # 3 of 58 runs: 55 / 61 in common
    changed = [[*words[:30], "other", *words[31:]] for words in first[:20]]
    halves = [[*words[:30], *text(draw, 30)] for words in first[20:40]]  # a third in common
    a = [example(words, row) for row, words in enumerate(first)]
    b = [
        example(words, row)
        for row, words in enumerate([*changed, *halves, *(text(draw) for _ in range(20))])
    ]
    (pair,) = near_copies({"a": a, "b": b, "c": [example(text(draw), 0)]})
    assert (pair.name, pair.other, pair.count, pair.size) == ("b", "a", 20, 60)
    for row, other, agreement in pair.pairs:
        assert row == other
        assert jaccard(b[row], a[other]) == pytest.approx(55 / 61)
        assert agreement == pytest.approx(55 / 61, abs=0.12)


def test_rows_of_few_words_and_thresholds() -> None:
    a = [Example((Message("user", "Hi"), Message("assistant", "Ho")), 3)]
    b = [Example((Message("assistant", "hi  HO"),), 5)]
    assert near_copies({"a": a, "b": b})[0].pairs == ((5, 3, 1.0),)
    with rejects("out-of-range", "threshold", of=ConfigError):
        near_copies({"a": a}, 0)
