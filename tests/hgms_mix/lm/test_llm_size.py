"""Sources at size: read row by row, in parts, and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from support import token_tables
from support.helpers import rejects
from support.source_files import source_of
from support.token_tables import Counting, read_examples, rows_of, same

import hgms_mix.lm.parts
import hgms_mix.lm.tokens
from hgms_core import Key
from hgms_core.errors import DataError
from hgms_mix.lm.parts import compute_parts
from hgms_mix.lm.rows import index_of
from hgms_mix.lm.sources import Source
from hgms_mix.lm.table import TokenTable
from hgms_mix.lm.tokenizers import byte_tokenizer
from hgms_mix.lm.tokens import drawn_table

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """95 rows, some too long, blank or bad, in parts of ten."""
    monkeypatch.setattr(hgms_mix.lm.parts, "ROWS", 10)
    answers = [
        " " if row % 20 == 3 else "long " * 20 if row % 11 == 5 else f"answer {row}"
        for row in range(95)
    ]
    rows: list[Any] = [(f"Row {row}?", answer) for row, answer in enumerate(answers)]
    rows[42] = "{oops"
    return source_of(tmp_path / "rows.jsonl", rows, max_bad_rows=1)


def table_of(source: Source, cache: Path | None = None, **options: Any) -> TokenTable:
    return token_tables.table_of(source, max_length=40, cache_dir=cache, **options)


@pytest.mark.parametrize(
    "choice", [{"skip": 7, "rows": 61}, {"shuffle_seed": 3, "rows": 40}], ids=str
)
def test_parts_on_disk_make_the_table_and_the_index_that_memory_makes(
    source: Source, tmp_path: Path, choice: dict[str, int]
) -> None:
    source = evolve(source, **choice)
    answered = [example for example in read_examples("s", source) if not example.blank]
    texts = {
        example.row: "\n".join(message.text for message in example.messages) for example in answered
    }
    whole = {row: text for row, text in texts.items() if len(text) < 40}
    cache = tmp_path / "cache"
    for _ in ("created", "loaded"):
        index = index_of("s", source, cache)
        assert index.rows.tolist() == list(texts)
        report = index.report
        assert (report.total, report.bad, report.examples) == (95, 1, choice["rows"])
        assert report.blank == choice["rows"] - len(texts)
        table = table_of(source, cache)
        written = [bytes(table.row(row)[0][:-1].tolist()).decode() for row in range(table.size)]
        assert list(zip(table.rows.tolist(), written, strict=True)) == list(whole.items())
        assert (table.report.looked, table.report.too_long) == (len(texts), len(texts) - len(whole))
    assert same(table_of(source), table)
    left = {path.suffix for path in (tmp_path / "cache").glob("*/*")}
    assert left == {".bin", ".json"}


def test_a_pick_is_tokenised_alone_and_twice_where_it_is_picked_twice(
    source: Source, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    pick = torch.from_numpy(index_of("s", source).rows[[30, 2, 2, 55]])
    table = table_of(source, cache, pick=pick)
    assert table.rows.tolist() == pick.tolist()
    assert table.report.looked == 3
    assert table.digest != table_of(source, cache, pick=pick.flip(0)).digest
    whole = table_of(source)
    assert rows_of(table) == [rows_of(whole)[whole.places[row]] for row in pick.tolist()]


@pytest.mark.parametrize(
    ("count", "choice"), [(1, {}), (30, {"shuffle_seed": 3, "rows": 80}), (500, {})]
)
def test_rows_are_drawn_before_they_become_tokens(
    source: Source, tmp_path: Path, count: int, choice: dict[str, int]
) -> None:
    """Those that pass, in the order of a permutation of the rows that have an answer."""
    source = evolve(source, **choice)
    whole = table_of(source)
    index = index_of("s", source)
    order = torch.randperm(index.size, generator=Key(7).generator())
    passing = [number for number in index.rows[order].tolist() if number in whole.places]
    options = {"template": "plain", "max_length": 40, "cache_dir": tmp_path / "cache"}
    table = drawn_table("s", source, byte_tokenizer(), count=count, key=Key(7), **options)
    places = sorted(whole.places[number] for number in passing[:count])
    assert table.rows.tolist() == whole.rows[places].tolist()
    assert rows_of(table) == [rows_of(whole)[place] for place in places]
    assert table.report.looked <= 1.3 * count + 16


def test_where_no_drawn_row_passes_more_are_drawn(tmp_path: Path) -> None:
    rows = [("p", "long " * 20 if row else "a") for row in range(60)]
    source = source_of(tmp_path / "rows.jsonl", rows)
    options: dict[str, Any] = {"template": "plain", "count": 2, "key": Key(0)}
    table = drawn_table("s", source, byte_tokenizer(), max_length=40, **options)
    assert table.rows.tolist() == [0]
    with rejects("no-rows", "s", "path", of=DataError):
        drawn_table("s", source, byte_tokenizer(), max_length=3, **options)


def test_parts_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hgms_mix.lm.parts, "ROWS", 10)
    counts: list[int] = []
    arrays, parts = compute_parts(range(65), Counting({}), {"square": "int64"}, counts.append)
    assert arrays["square"].tolist() == [n**2 for n in range(65)]
    assert [part["first"] for part in parts] == list(range(0, 65, 10))
    assert counts == [*[10] * 6, 5]
    with rejects("no-rows", "it", of=DataError):
        wrong = Counting({55: DataError("no-rows", "of it", place=("it",))})
        compute_parts(range(65), wrong, {"square": "int64"})
