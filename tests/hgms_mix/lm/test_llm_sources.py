"""Which rows of a file are a source, how bad ones are counted, and real sets under HGMS_DATA."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from support.helpers import rejects
from support.source_files import source_of
from support.token_tables import read, read_examples

from hgms_core.errors import DataError
from hgms_mix.lm.rows import index_of
from hgms_mix.lm.sources import Source


def rows_of(tmp_path: Path, **choice: Any) -> list[int]:
    """Which of 20 rows are chosen."""
    source = source_of(tmp_path / "n.jsonl", [(f"Q{i}", f"A{i}") for i in range(20)], **choice)
    return [example.row for example in read_examples("s", source)]


def test_skip_and_rows_take_a_stretch_of_the_file_or_of_its_shuffled_order(tmp_path: Path) -> None:
    assert rows_of(tmp_path, skip=3, rows=4) == [3, 4, 5, 6]
    assert rows_of(tmp_path, skip=18) == [18, 19]
    whole = rows_of(tmp_path, shuffle_seed=7)
    assert sorted(whole) == list(range(20)) != whole
    assert whole != rows_of(tmp_path, shuffle_seed=8)
    parts = rows_of(tmp_path, shuffle_seed=7, rows=8), rows_of(tmp_path, shuffle_seed=7, skip=8)
    assert parts[0] + parts[1] == whole


def test_bad_rows_are_counted_up_to_the_limit(tmp_path: Path) -> None:
    """The format is told from the first whole rows, however late they come, and no limit makes a
    source of bad rows alone.
    """
    good = {"instruction": "Q", "output": "A"}
    rows = ["{"] * 300 + [good] * 100 + [{"text": "t"}] * 5
    source = source_of(tmp_path / "a.jsonl", rows, max_bad_rows=305)
    examples, report = read("s", source)
    assert (report.format, report.total, report.bad, len(examples)) == ("alpaca", 405, 305, 100)
    assert examples[0].row == 300
    misnamed = source_of(tmp_path / "b.jsonl", [good], format="sharegpt", max_bad_rows=999)
    with rejects("wrong-row", "s", "path", of=DataError) as caught:
        index_of("s", misnamed)
    assert 'format = "auto"' in str(caught.value.hint)
    for bad in (evolve(source, max_bad_rows=0), evolve(source, max_bad_rows=304), misnamed):
        with rejects("wrong-row", "s", "path", of=DataError):
            index_of("s", bad)


REAL = [
    ("gsm8k/test", "prompt-completion", 1319, 0),
    ("math/math500", "prompt-completion", 500, 0),
    ("scalebio_math_valtest/test", "sharegpt", 280, 0),
    ("code_alpaca/code_alpaca_2000", "alpaca", 2000, 2),
]
MORE = [
    ("alpaca/alpaca_52002", "alpaca", 52002, 28),
    ("alpaca_gpt4_en/alpaca_gpt4_en_6000", "alpaca", 6000, 0),
    ("alpaca_zh/alpaca_zh_6000", "alpaca", 6000, 1),
    ("dart_math_uniform/dart_math_uniform_2000", "sharegpt", 2000, 0),
    ("gpt4_llm_cleaned/gpt4_llm_cleaned_2000", "sharegpt", 2000, 0),
    ("gpteacher_general_instruct/gpteacher_general_instruct_2000", "sharegpt", 2000, 0),
    ("gpteacher_roleplay/gpteacher_roleplay_1923", "alpaca", 1923, 0),
    ("gsm8k/train", "prompt-completion", 7473, 0),
    ("math/train", "prompt-completion", 7500, 0),
    ("math/test", "prompt-completion", 5000, 0),
    ("mathinstruct/mathinstruct_2000", "sharegpt", 2000, 0),
    ("orca_math/orca_math_2000", "sharegpt", 2000, 0),
    ("scalebio_data_tiny/train_alpaca", "alpaca", 9000, 7),
    ("scalebio_data_tiny/train_gpt4_alpaca", "alpaca", 1000, 0),
    ("scalebio_data_tiny/val", "alpaca", 1000, 0),
    ("scalebio_data_tiny/test", "alpaca", 1000, 0),
    ("scalebio_math_valtest/val", "sharegpt", 1400, 0),
]


@pytest.mark.skipif("HGMS_DATA" not in os.environ, reason="HGMS_DATA is not set: no real rows")
@pytest.mark.parametrize(
    ("file", "form", "rows", "blank"),
    [*REAL, *(pytest.param(*entry, marks=pytest.mark.extended) for entry in MORE)],
)
def test_every_real_set_is_read_whole(file: str, form: str, rows: int, blank: int) -> None:
    examples, report = read("real", Source(path=f"$HGMS_DATA/{file}.jsonl.gz"))
    assert (report.format, report.total, report.bad, len(examples)) == (form, rows, 0, rows)
    assert sum(example.blank for example in examples) == blank
    assert all(example.messages[-1].role == "assistant" and example.key for example in examples)
    assert [example.row for example in examples] == list(range(rows))
