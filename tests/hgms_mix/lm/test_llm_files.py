"""Files of every kind: one set of rows reads the same from each, and damage is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import rejects
from support.source_files import array, lines, parquet, source_of, words, zstandard
from support.token_tables import read, read_examples

from hgms_core import HgmsError
from hgms_core.errors import DataError
from hgms_mix.lm import files
from hgms_mix.lm.examples import content
from hgms_mix.lm.models import BaseModel
from hgms_mix.lm.sources import Source
from hgms_mix.lm.tokenizers import load_tokenizer

ROWS = [
    {"instruction": "a, b", "input": "", "output": 'say "x"'},
    {"instruction": "two\nlines", "input": "1, 2", "output": "007"},
    {"instruction": "ü", "input": "", "output": "1.50"},
]
PAIRS = [("a, b", 'say "x"'), ("two\nlines\n1, 2", "007"), ("ü", "1.50")]
KINDS: list[tuple[str, Callable[..., Path]]] = [
    *((name, lines) for name in ("a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz")),
    *((name, array) for name in ("a.jsonl", "a.json", "a.json.gz")),
    *((name, parquet) for name in ("a.parquet", "a.parquet.gz")),
    ("a.jsonl.zst", zstandard),
]


@pytest.mark.parametrize(("name", "write"), KINDS)
def test_one_set_of_rows_reads_the_same_from_every_kind_of_file(
    tmp_path: Path, name: str, write: Callable[..., Path]
) -> None:
    path = write(tmp_path / name, ROWS)
    examples, report = read("s", Source(path=str(path)))
    assert [example.row for example in examples] == [0, 1, 2]
    assert [tuple(text for _, text in words(example)) for example in examples] == PAIRS
    assert (report.format, report.total, report.bad) == ("alpaca", 3, 0)


def with_blank_lines(path: Path, rows: list[Any]) -> Path:
    """And a byte order mark."""
    first, second, bad, last = map(json.dumps, rows)
    text = f"{first}\n\n{second}\r\n  \n{bad}\n{last}"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "write", "told"),
    [
        ("a.jsonl", with_blank_lines, "\nline 5: "),
        ("a.json", array, "\nrow 2: "),
        ("a.parquet", parquet, "\nrow 2: "),
    ],
)
def test_a_bad_row_is_told_by_its_line_or_by_the_number_that_its_example_would_have(
    tmp_path: Path, name: str, write: Callable[..., Path], told: str
) -> None:
    rows = [*ROWS[:2], {"instruction": None, "input": "", "output": "A"}, ROWS[2]]
    source = Source(path=str(write(tmp_path / name, rows)))
    with rejects("wrong-row", "s", "path", of=DataError) as caught:
        read_examples("s", source)
    assert told in caught.value.message
    examples = read_examples("s", evolve(source, max_bad_rows=1))
    assert [example.row for example in examples] == [0, 1, 3]


def test_raw_text_is_learned_from_its_beginning(tmp_path: Path) -> None:
    expected = ["Roses are red.", "Violets are blue."]
    path = lines(tmp_path / "poems.jsonl", [{"text": text} for text in expected])
    examples = read_examples("s", Source(path=str(path), format="text"))
    assert [words(item) for item in examples] == [[("assistant", text)] for text in expected]
    assert [item.key for item in examples] == [text.lower() for text in expected]


def test_folders_and_patterns_are_their_files_in_order(tmp_path: Path) -> None:
    """Rows number on from file to file, and the digest is of the contents in that order, not of
    names.
    """
    folder = tmp_path / "set"
    folder.mkdir()
    for name, first in {"b.jsonl": 10, "a.jsonl.gz": 0, "c.json": 20, "README.md": 30}.items():
        source_of(folder / name, [(f"p{i}", str(i)) for i in range(first, first + 3)])
    patterns = (folder, tmp_path / "*" / "*.json*", tmp_path / "**" / "*.json*")
    same = [Source(path=str(pattern)) for pattern in patterns]
    texts = [str(tens + i) for tens in (0, 10, 20) for i in range(3)]
    for source in same:
        found = [(item.messages[-1].text, item.row) for item in read_examples("s", source)]
        assert found == list(zip(texts, range(9), strict=True))
    some = Source(path=str(folder / "[bc].json*"))
    assert len(read_examples("s", some)) == 6
    assert content("s", some) != content("s", same[0]) == content("s", same[1])


@pytest.mark.parametrize("path", ["$OPENAI_API_KEY", "${OPENAI_API_KEY}.jsonl"])
@pytest.mark.parametrize(
    "call",
    [
        lambda path: read_examples("s", Source(path=path)),
        lambda path: load_tokenizer(f"./{path}/x"),
        lambda path: BaseModel(path=f"./{path}/x", tokenizer="bytes").load(torch.device("cpu")),
    ],
)
def test_messages_show_a_path_as_it_is_written(
    path: str, call: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable's value may be nobody else's business: messages are printed, and kept in
    summaries.
    """
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with pytest.raises(HgmsError) as caught:
        call(path)
    assert "sk-secret" not in repr(caught.value.as_dict())


# -- damage
# --------------------------------------------------------------------------------------------------


def cut_off(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


TEXT = "\n".join(json.dumps(row) for row in ROWS)
REFUSED: list[tuple[str, str, str | Callable[[Path], object]]] = [
    ("wrong-format", "a.json", '[{"prompt": "Q",\n "completion": }]'),
    ("wrong-format", "a.json", '[{"prompt": "Q"}'),
    ("wrong-format", "a.json", '{"nothing": 1}'),
    ("wrong-format", "a.jsonl", '{"promptt": "Q", "text": "A"}'),
    ("wrong-row", "a.jsonl", "{\nnonsense"),
    ("wrong-format", "a.docx", "x"),
    *(("no-rows", "a.json", text) for text in ("", "\n \n", "[]")),
    *(("wrong-format", "a.json", text * 10_000) for text in ("[", '[{"a":')),
    ("wrong-format", "a.csv", "prompt,completion\na,b\n"),
    ("wrong-row", "a.jsonl", '{"a":' * 10_000 + "\n" + TEXT),
    # other encodings than UTF-8
    ("wrong-format", "a.json", lambda path: path.write_bytes(b'[{"prompt": "\xff"}]')),
    ("wrong-row", "a.jsonl", lambda path: path.write_bytes(TEXT.encode() + b"\n\xff\n")),
    ("wrong-row", "a.jsonl", lambda path: path.write_text(TEXT, "utf-16")),
    ("wrong-row", "a.json", lambda path: path.write_text(TEXT, "utf-16-le")),
    ("wrong-row", "a.jsonl", lambda path: path.write_text(TEXT, "utf-16-be")),
    ("wrong-row", "a.jsonl", lambda path: path.write_text(TEXT, "utf-32")),
    # files that end too early
    *(
        ("damaged-file", "a.jsonl.gz", lambda path, keep=keep: cut_off(lines(path, ROWS), keep))
        for keep in (4, 40, -6)
    ),
    ("damaged-file", "a.parquet", lambda path: cut_off(parquet(path, ROWS), -20)),
    ("unreadable-file", "a.jsonl.zst", lambda path: cut_off(zstandard(path, ROWS), -30)),
]


@pytest.mark.parametrize(("code", "name", "written"), REFUSED)
def test_a_file_that_is_no_whole_table_of_rows_is_refused(
    tmp_path: Path, code: str, name: str, written: Any
) -> None:
    """Also where bad rows are allowed."""
    write = written if callable(written) else lambda path: path.write_text(written)
    write(tmp_path / name)
    allowed = 0 if code == "wrong-row" else 99
    with rejects(code, "s", "path", of=DataError):
        read_examples("s", Source(path=str(tmp_path / name), max_bad_rows=allowed))


def test_a_missing_file_is_answered_with_the_nearest(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl.gz", ROWS)
    with rejects("missing-file", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=str(tmp_path / "trian.jsonl.gz")))
    assert caught.value.did_you_mean == ("train.jsonl.gz",)


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("nowhere/a.jsonl", ()),
        ("empty", ()),
        ("*.docx", ()),
        ("*.zip", ()),
        ("a.jsonk", ("a.jsonl",)),
    ],
)
def test_a_path_at_which_no_rows_are_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, near: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "b.docx").write_text("x")
    lines(tmp_path / "a.jsonl", ROWS)
    with rejects("missing-file", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=path))
    assert caught.value.did_you_mean == near


def test_blank_lines_and_bad_rows_between_others_are_left_out(tmp_path: Path) -> None:
    """Of a source whose columns have names of their own."""
    deep = '{"f":' * 100_000
    rows = ['{"frage": "Q", "antwort": "A"}', "{", deep, '{"frage": "R", "antwort": "B"}']
    named = {"prompt": "frage", "completion": "antwort"}
    own = Source(path=str(lines(tmp_path / "a.jsonl", rows)), fields=named, max_bad_rows=2)
    examples, report = read("s", own)
    assert [words(item)[-1][1] for item in examples] == ["A", "B"]
    assert (report.total, report.bad) == (4, 2)


def test_the_rows_of_an_array_are_not_formatted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows(list[Any]):
        def __repr__(self) -> str:
            raise AssertionError("the text of all rows may be larger than the memory")

    monkeypatch.setattr(files, "_load_json", lambda data: Rows([{"prompt": "a"}]))
    assert list(files._array("rows.json", (), b"")) == [("row 0", {"prompt": "a"})]
