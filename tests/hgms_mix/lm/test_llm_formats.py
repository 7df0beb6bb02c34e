"""Rows of every format: what is read, what is refused, and what is left out and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from support.helpers import rejects
from support.source_files import source_of, turns, words
from support.token_tables import read, read_examples

from hgms_core.errors import DataError
from hgms_mix.lm.formats import FORMATS
from hgms_mix.lm.tokenizers import load_tokenizer
from hgms_mix.lm.tokens import token_table

TURNS = [("user", "Q"), ("assistant", "A")]
EMPTY = [("user", "Q"), ("assistant", "")]
CONTEXT = [("user", "Q\nC"), ("assistant", "A")]
SYSTEM = [("system", "S"), *TURNS]
FROM = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
ANSWER = "1+1=<<1+1=2>>2\n#### 2"
ROWS: list[tuple[str, dict[str, Any], list[tuple[str, str]]]] = [
    ("alpaca", {"instruction": "Q", "input": "", "output": "A"}, TURNS),
    ("alpaca", {"instruction": "Q", "input": "C", "output": "A"}, CONTEXT),
    ("alpaca", {"instruction": "Q", "output": "A"}, TURNS),
    ("alpaca", {"instruction": "Q", "input": None, "response": "A"}, TURNS),
    # Dolly
    ("alpaca", {"instruction": "Q", "context": "C", "response": "A", "category": "qa"}, CONTEXT),
    ("alpaca", {"instruction": "Q", "context": "", "response": "A"}, TURNS),
    ("alpaca", {"instruction": "Q", "output": "A", "history": [], "system": "S"}, SYSTEM),
    ("sharegpt", {"conversations": FROM}, TURNS),
    ("sharegpt", {"items": [dict(reversed(turn.items())) for turn in FROM]}, TURNS),
    ("sharegpt", {"conversations": {"from": ["human", "gpt"], "value": ["Q", "A"]}}, TURNS),
    ("sharegpt", {"system": "S", "items": FROM}, SYSTEM),
    ("chat", {"messages": turns("Q", "A")}, TURNS),
    (
        "chat",
        {"messages": [{"role": "system", "content": "S"}, *turns("Q", "A", "Q", "A")]},
        [*SYSTEM, *TURNS],
    ),
    # columns of Parquet that are there, but empty
    (
        "chat",
        {"messages": turns("Q", "A", tool_calls=[], reasoning_content=None), "tools": "[]"},
        TURNS,
    ),
    (
        "prompt-completion",
        {"question": "Q", "answer": ANSWER},
        [("user", "Q"), ("assistant", ANSWER)],
    ),
    ("prompt-completion", {"problem": "Q", "solution": "A", "level": 5}, TURNS),
    ("prompt-completion", {"prompt": "Q", "completion": "A", "label": True}, TURNS),
    ("prompt-completion", {"question": "Q", "answer": "A"}, TURNS),
    ("prompt-completion", {"query": "Q", "response": "A"}, TURNS),
    ("prompt-completion", {"input": "Q", "output": "A"}, TURNS),
    ("prompt-completion", {"system_prompt": "S", "question": "Q", "response": "A"}, SYSTEM),
    ("prompt-completion", {"prompt": turns("Q"), "completion": turns("", "A")[1:]}, TURNS),
    # an answer of null is an empty one
    ("alpaca", {"instruction": "Q", "output": None}, EMPTY),
    ("prompt-completion", {"prompt": "Q", "completion": None}, EMPTY),
    ("chat", {"messages": turns("Q", None)}, EMPTY),
]


@pytest.mark.parametrize(("name", "row", "expected"), ROWS)
def test_every_format_is_detected_and_every_column_that_matters_is_used(
    tmp_path: Path, name: str, row: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    examples, report = read("s", source_of(tmp_path / "s.json", [row]))
    assert [words(example) for example in examples] == [expected]
    assert report.format == name


GOOD: dict[str, dict[str, Any]] = {
    "alpaca": {"instruction": "Q", "output": "A"},
    "sharegpt": {"items": FROM},
    "chat": {"messages": turns("Q", "A")},
    "prompt-completion": {"prompt": "Q", "completion": "A"},
}
BAD: list[tuple[str, Any]] = [
    # marked as bad
    ("chat", {"messages": turns("Q", "BAD"), "label": False}),
    ("prompt-completion", {"prompt": "Q", "completion": "BAD", "kto_tag": "False"}),
    ("prompt-completion", {"prompt": "Q", "completion": "BAD", "is_correct": False}),
    # columns and keys that are not read, though the answer may depend on them
    ("prompt-completion", {"prompt": "Q", "completion": "A", "context": "C"}),
    ("alpaca", {"instruction": "Q", "input": "I", "context": "C", "output": "A"}),
    ("prompt-completion", {"prompt": "Q", "completion": "A", "history": [["P", "O"]]}),
    ("prompt-completion", {"prompt": "Q", "input": "I", "completion": "A"}),
    ("chat", {"messages": turns("Q", "A"), "tools": [{"name": "t"}]}),
    ("chat", {"messages": turns("Q", "A"), "images": ["a.png"]}),
    ("chat", {"messages": turns("Q", "A", reasoning_content="R")}),
    ("chat", {"messages": turns("Q", "A", tool_calls=[{"id": 1}])}),
    ("chat", {"messages": turns("Q", "A", weight=0.5)}),
    ("alpaca", {"instruction": "Q", "output": "A", "history": [["P", "O"]]}),
    ("chat", {"system": "T", "messages": [{"role": "system", "content": "S"}, *turns("Q", "A")]}),
    ("chat", {"system": ["S"], "messages": turns("Q", "A")}),
    # missing, empty or of another type
    ("alpaca", {"instrution": "Q", "output": "A"}),
    ("alpaca", {"instruction": "Q", "Output": "A"}),
    ("alpaca", {"instruction": "  ", "output": "A"}),
    ("alpaca", {"instruction": "Q", "output": 7}),
    ("alpaca", {"instruction": "Q", "output": True}),
    ("alpaca", {"instruction": "Q", "input": ["x"], "output": "A"}),
    ("prompt-completion", {"question": "Q"}),
    ("prompt-completion", {}),
    ("prompt-completion", {"prompt": "Q", "chosen": "A"}),
    ("sharegpt", {"items": "text"}),
    ("sharegpt", {"items": []}),
    ("sharegpt", {"items": FROM[:1]}),
    ("sharegpt", {"items": FROM[1:]}),
    ("sharegpt", {"items": ["Q", "A"]}),
    ("sharegpt", {"items": [{"from": "alien", "value": "Q"}, FROM[1]]}),
    ("sharegpt", {"items": [{"from": "human", "value": 3}, FROM[1]]}),
    ("chat", {"messages": turns(" ", "A")}),
    ("chat", {"messages": "a text"}),
    ("chat", {"message": []}),
    # no row at all
    ("alpaca", '{"instruction": "x", '),
    ("alpaca", '["a"]'),
    ("alpaca", b'{"instruction": "caf\xe9", "output": "A"}'),
    ("alpaca", '{"instruction": "Q", "output": "\\ud83d"}'),
]


@pytest.mark.parametrize(("name", "row"), BAD, ids=[f"{name}-{row}"[:60] for name, row in BAD])
def test_a_bad_row_is_refused_with_its_line_or_left_out_and_counted(
    tmp_path: Path, name: str, row: Any
) -> None:
    good = GOOD[name]
    source = source_of(tmp_path / "s.jsonl", [good, row, good], format=name)
    with rejects("wrong-row", "s", "path", of=DataError) as caught:
        read_examples("s", source)
    assert "\nline 2: " in caught.value.message
    examples, report = read("s", evolve(source, max_bad_rows=1))
    assert [example.row for example in examples] == [0, 2]
    assert (report.total, report.bad) == (3, 1)


def test_nothing_is_learned_from_a_turn_with_the_weight_0(tmp_path: Path) -> None:
    """OpenAI's weight, axolotl's train and ms-swift's loss."""
    tokenizer = load_tokenizer("bytes")
    for mark in ({"weight": 0}, {"train": False}, {"loss": False}):
        wrong = [*turns("Q", "WRONG", **mark), *turns("R", "A", weight=1)]
        source = source_of(tmp_path / "s.jsonl", [{"messages": wrong}])
        (example,) = read_examples("s", source)
        assert [message.learned for message in example.messages] == [True, False, True, True]
        table = token_table("s", source, tokenizer, template="plain", max_length=64)
        assert bytes(table.tokens[table.mask][:-1].tolist()) == b"A"
    unlearned = {"messages": turns("Q", "A", weight=0)}
    assert read_examples("s", source_of(tmp_path / "t.jsonl", [unlearned]))[0].blank


def test_advice_for_rows_of_no_known_format_never_renames_a_column_to_itself(
    tmp_path: Path,
) -> None:
    for row, hint in (
        ({"prompt": "Q", "chosen": "A", "rejected": "B"}, "fields = { prompt = "),
        ({"text": "A document."}, 'format = "text"'),
        ({"question": "Q", "solution": "A"}, "fields = { "),
    ):
        with rejects("wrong-format", "s", "path", of=DataError) as caught:
            read_examples("s", source_of(tmp_path / "s.jsonl", [row]))
        assert hint in (caught.value.hint or "")
        assert "rename" not in (caught.value.hint or "")


def test_the_input_of_an_alpaca_row_can_be_told_from_its_instruction() -> None:
    user, _ = FORMATS["alpaca"].read({"instruction": "Add.", "input": "1, 2", "output": "3"})
    assert (user.text, user.instruction, user.context) == ("Add.\n1, 2", "Add.", "1, 2")


def test_a_column_of_another_name_is_read_and_one_is_ignored_on_purpose(tmp_path: Path) -> None:
    """A row without such a column is a bad one."""
    rows = [{"frage": "Q", "antwort": "A", "context": "C"}, {"frage": "Q", "answer": "A"}]
    fields = {"prompt": "frage", "completion": "antwort", "ignored": "context"}
    source = source_of(tmp_path / "own.jsonl", rows, fields=fields, max_bad_rows=1)
    examples, report = read("own", source)
    assert [words(example) for example in examples] == [TURNS]
    assert (report.format, report.bad) == ("prompt-completion", 1)


def test_own_columns_and_a_completion_replace_every_answer_and_nothing_else(tmp_path: Path) -> None:
    row = {"prompt": "Q", "completion": "A", "better": "B"}
    source = source_of(tmp_path / "own.jsonl", [row])
    options = {"template": "plain", "max_length": 32, "cache_dir": tmp_path / "cache"}
    tables = [
        token_table("own", evolve(source, fields=fields), load_tokenizer("bytes"), **options)
        for fields in (None, {"completion": "better"}, None)
    ]
    assert [bytes(table.row(0)[0][:-1].tolist()) for table in tables] == [b"Q\nA", b"Q\nB", b"Q\nA"]
    row = {"messages": turns("Q", "A", "Q2", "A2")}
    (example,) = read_examples("s", source_of(tmp_path / "a.jsonl", [row], completion="."))
    assert words(example) == [("user", "Q"), ("assistant", "."), ("user", "Q2"), ("assistant", ".")]
