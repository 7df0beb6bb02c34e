"""Token tables: what is kept, cut and dropped; gathering rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import rejects
from support.source_files import source_of
from support.token_tables import rows_of, table_of

import hgms_mix.lm.tokens
from hgms_core.errors import DataError
from hgms_mix.lm.table import TokenTable

pytest.importorskip("transformers", reason="transformers is not installed")

ROWS = [
    ("Q", "A"),
    ("What is it?", "It is a rather long answer, to be cut."),
    ("R", " "),
    ("A" * 70, "B"),
    ("Z", ""),
]


@pytest.mark.parametrize(
    ("too_long", "rows", "counts"), [("drop", [0], (2, 0)), ("truncate", [0, 1], (1, 1))]
)
def test_what_is_dropped_and_cut_is_counted(
    tmp_path: Path, too_long: str, rows: list[int], counts: tuple[int, int]
) -> None:
    table = table_of(source_of(tmp_path / "a.jsonl", ROWS), max_length=30, too_long=too_long)
    assert table.rows.tolist() == rows
    report = table.report
    assert (report.too_long, report.truncated) == counts
    assert (report.total, report.examples, report.blank, report.bad) == (5, 5, 2, 0)
    assert (report.shortest, report.longest, report.format) == (4, 73, "prompt-completion")
    assert rows_of(table)[0] == ([*b"Q\nA", 257], [False, False, True, True])


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.text("xyz", min_size=1, max_size=12), st.text("abc", max_size=12)),
        min_size=1,
        max_size=6,
    ),
    st.integers(2, 20),
    st.sampled_from(["drop", "truncate"]),
)
def test_no_row_is_ever_without_an_answer_or_too_long(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str]],
    max_length: int,
    too_long: str,
) -> None:
    source = source_of(tmp_path_factory.mktemp("rows") / "a.jsonl", rows)
    least = [len(q) + (1 if too_long == "truncate" else len(a) + 1) for q, a in rows]
    kept = [n for n, (_, answer) in enumerate(rows) if answer and least[n] + 1 <= max_length]
    if not kept:
        with rejects("no-rows", "s", "path", of=DataError):
            table_of(source, max_length=max_length, too_long=too_long)
        return
    table = table_of(source, max_length=max_length, too_long=too_long)
    assert table.rows.tolist() == kept
    assert rows_of(table) == [
        (
            [*question.encode(), 10, *answer.encode(), 257][:max_length],
            ([False] * (len(question) + 1) + [True] * (len(answer) + 1))[:max_length],
        )
        for question, answer in (rows[number] for number in kept)
    ]


def test_first_rows_that_are_all_too_long_are_warned_of_before_the_others_become_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hgms_mix.lm.tokens, "PROBED_LENGTHS", 3)
    monkeypatch.setattr(hgms_mix.lm.tokens, "compute_parts", lambda *arguments, **options: 1 / 0)
    hgms_mix.lm.tokens.warn.cache_clear()
    rows = [("Q" * 30, str(number)) for number in range(4)]
    for number, short in enumerate(([("Q", "A")], [])):  # one short row among the first ones
        source = source_of(tmp_path / f"{number}.jsonl", rows[:1] + short + rows)
        with pytest.raises(ZeroDivisionError):
            table_of(source, max_length=20)
        assert ("the first 3 rows" in caplog.text) == (not short)


@st.composite
def tables(draw: st.DrawFn) -> TokenTable:
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=8))
    total = sum(lengths)
    tokens = draw(st.lists(st.integers(0, 9), min_size=total, max_size=total))
    mask = draw(st.lists(st.booleans(), min_size=total, max_size=total))
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    rows = 10 * torch.arange(len(lengths))
    leaves = (torch.tensor(tokens, dtype=torch.int32), torch.tensor(mask), offsets, rows)
    return TokenTable("t", *leaves, "d", pad_id=draw(st.integers(10, 12)))


@settings(max_examples=40, deadline=None)
@given(st.data(), tables(), st.sampled_from([(-1,), (2, -1), (1, 2, -1), (-1, 1)]))
def test_gathered_rows_are_those_of_the_table_padded_to_the_longest(
    data: st.DataObject, table: TokenTable, shape: tuple[int, ...]
) -> None:
    numbers = 2 * data.draw(st.lists(st.integers(0, table.size - 1), min_size=1, max_size=6))
    index = torch.tensor(numbers).reshape(shape)
    tokens, mask = table.gather(index)
    rows = [rows_of(table)[number] for number in numbers]
    width = max(len(row) for row, _ in rows)
    assert (tokens.dtype, tokens.shape) == (torch.int64, (*index.shape, width))
    padded = [
        (row + [table.pad_id] * (width - len(row)), learned + [False] * (width - len(row)))
        for row, learned in rows
    ]
    assert tokens.reshape(-1, width).tolist() == [row for row, _ in padded]
    assert mask.reshape(-1, width).tolist() == [learned for _, learned in padded]
    taken = table.take(torch.tensor(numbers))
    assert rows_of(taken) == rows
    assert taken.rows.tolist() == [10 * number for number in numbers]
    assert len({taken.digest, table.digest, table.take(torch.tensor([*numbers, 0])).digest}) == 3
    with pytest.raises(IndexError):
        table.gather(torch.tensor([-1]))
