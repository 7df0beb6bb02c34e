"""Rows of every format, file and fault, and the real sets under HGMS_DATA."""

from __future__ import annotations

import gzip
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import rejects

from hgms_core import ConfigError, DataError, HgmsError, MissingExtra
from hgms_mix.lm import files
from hgms_mix.lm.formats import FORMATS, BadRow, Message, detect
from hgms_mix.lm.models import BaseModel
from hgms_mix.lm.sources import Example, Source, check_names, content, read, read_examples
from hgms_mix.lm.tokenizers import load_tokenizer
from hgms_mix.lm.tokens import token_table

real = pytest.mark.skipif(
    "HGMS_DATA" not in os.environ, reason="HGMS_DATA is not set: no real rows to read"
)

ALPACA = [
    {"instruction": "Add them.", "input": "1, 2", "output": "3"},
    {"instruction": "Say hi.", "input": "", "output": "Hi."},
    {"instruction": "Name a colour.", "input": None, "output": "Red."},
]
REVISION = "77f3279092a1c1579b2250db8eafed0ad422088c"


def lines(path: Path, rows: list[Any]) -> Path:
    text = "".join(
        (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n"
        for row in rows
    )
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def words(example: Example) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in example.messages]


# -- formats
# --------------------------------------------------------------------------------------------------

TURNS = [("user", "Q"), ("assistant", "A")]
ROWS = [
    ("alpaca", {"instruction": "Q", "input": "", "output": "A"}, TURNS),
    (
        "alpaca",
        {"instruction": "Q", "input": "I", "output": "A"},
        [("user", "Q\nI"), ("assistant", "A")],
    ),
    ("alpaca", {"instruction": "Q", "output": "A"}, TURNS),
    ("alpaca", {"instruction": "Q", "input": "", "response": "A"}, TURNS),
    (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        TURNS,
    ),
    (
        "sharegpt",
        {"items": [{"value": "Q", "from": "human"}, {"value": "A", "from": "gpt"}]},
        TURNS,
    ),
    ("sharegpt", {"conversations": {"from": ["human", "gpt"], "value": ["Q", "A"]}}, TURNS),
    (
        "sharegpt",
        {"system": "S", "items": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        [("system", "S"), *TURNS],
    ),
    (
        "chat",
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        TURNS,
    ),
    (
        "chat",
        {
            "messages": [
                {"role": role, "content": text}
                for role, text in [("system", "S"), *TURNS, *TURNS, ("user", "unanswered")]
            ]
        },
        [("system", "S"), *TURNS, *TURNS],
    ),
    (
        "gsm8k",
        {"question": "Q", "answer": "1+1=<<1+1=2>>2\n#### 2"},
        [("user", "Q"), ("assistant", "1+1=<<1+1=2>>2\n#### 2")],
    ),
    ("math", {"problem": "Q", "solution": "A", "level": 5}, TURNS),
    ("prompt-completion", {"prompt": "Q", "completion": "A"}, TURNS),
    ("prompt-completion", {"question": "Q", "answer": "A"}, TURNS),
    ("prompt-completion", {"query": "Q", "response": "A"}, TURNS),
    ("prompt-completion", {"input": "Q", "output": "A"}, TURNS),
    (
        "prompt-completion",
        {"system_prompt": "S", "question": "Q", "response": "A"},
        [("system", "S"), *TURNS],
    ),
    (
        "prompt-completion",
        {
            "prompt": [{"role": "user", "content": "Q"}],
            "completion": [{"role": "assistant", "content": "A"}],
        },
        TURNS,
    ),
]


@pytest.mark.parametrize(("name", "row", "expected"), ROWS)
def test_every_format_is_detected_and_read(
    name: str, row: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    result = detect([row])
    assert result is not None
    assert result.name == name
    assert [(message.role, message.text) for message in FORMATS[name].read(row)] == expected


def turns(*texts: str, **last: Any) -> list[dict[str, Any]]:
    """Turns of user and assistant, with further keys of the last one."""
    listed = [
        {"role": "assistant" if number % 2 else "user", "content": text}
        for number, text in enumerate(texts)
    ]
    return [*listed[:-1], {**listed[-1], **last}]


USED = [
    # Dolly
    (
        {"instruction": "Q", "context": "C", "response": "A", "category": "qa"},
        [("user", "Q\nC"), ("assistant", "A")],
    ),
    ({"instruction": "Q", "context": "", "response": "A"}, TURNS),
    # LLaMA-Factory
    (
        {"instruction": "Q", "input": "", "output": "A", "history": [["P", "O"]], "system": "S"},
        [("system", "S"), ("user", "P"), ("assistant", "O"), *TURNS],
    ),
    ({"instruction": "Q", "output": "A", "history": []}, TURNS),
    # an answer of null is an empty one
    ({"instruction": "Q", "output": None}, [("user", "Q"), ("assistant", "")]),
    ({"prompt": "Q", "completion": None}, [("user", "Q"), ("assistant", "")]),
    (
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": None}]},
        [("user", "Q"), ("assistant", "")],
    ),
    # columns of Parquet that are there, but empty
    ({"messages": turns("Q", "A", tool_calls=[], reasoning_content=None), "tools": "[]"}, TURNS),
    ({"prompt": "Q", "completion": "A", "label": True}, TURNS),
]


@pytest.mark.parametrize(("row", "expected"), USED)
def test_columns_that_an_answer_depends_on_are_used(
    tmp_path: Path, row: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    (example,) = read_examples("s", Source(path=str(lines(tmp_path / "s.jsonl", [row]))))
    assert words(example) == expected
    assert not example.unread


REFUSED = [
    # KTO: an answer that is marked as bad
    ({"messages": turns("Q", "BAD"), "label": False}, "'label' is false"),
    ({"prompt": "Q", "completion": "BAD", "kto_tag": "False"}, "'kto_tag' is false"),
    ({"prompt": "Q", "completion": "BAD", "is_correct": False}, "'is_correct' is false"),
    ({"question": "Q", "answer": "A", "context": "C"}, "'context' is not read"),
    ({"instruction": "Q", "input": "I", "context": "C", "output": "A"}, "'context' is not read"),
    ({"prompt": "Q", "completion": "A", "history": [["P", "O"]]}, "'history' is not read"),
    ({"prompt": "Q", "input": "I", "completion": "A"}, "'input' is not read"),
    ({"messages": turns("Q", "A"), "tools": [{"name": "t"}]}, "'tools' is not read"),
    ({"messages": turns("Q", "A"), "images": ["a.png"]}, "'images' is not read"),
    ({"messages": turns("Q", "A", reasoning_content="R")}, "turn 2 has 'reasoning_content'"),
    ({"messages": turns("Q", "A", tool_calls=[{"id": 1}])}, "turn 2 has 'tool_calls'"),
    ({"messages": turns("Q", "A", weight=0.5)}, "weight=0.5 of turn 2 is neither 0 nor 1"),
    ({"instruction": "Q", "output": "A", "history": ["P"]}, "pair 1 of 'history' is not"),
    (
        {"system": "T", "messages": [{"role": "system", "content": "S"}, *turns("Q", "A")]},
        "the row and the turns of 'messages' have different system prompts",
    ),
    ({"system": ["S"], "messages": turns("Q", "A")}, "the system prompt is a list, not text"),
]


@pytest.mark.parametrize(("row", "why"), REFUSED)
def test_a_row_whose_meaning_a_column_changes_is_refused_or_left_out_and_counted(
    tmp_path: Path, row: dict[str, Any], why: str
) -> None:
    good = {"prompt": "Q", "completion": "A"} if "messages" not in row else None
    good = {"messages": turns("Q", "A")} if good is None else good
    if "instruction" in row:
        good = {"instruction": "Q", "output": "A"}
    if "question" in row:
        good = {"question": "Q", "answer": "A"}
    path = str(lines(tmp_path / "s.jsonl", [good, row, good]))
    with rejects("wrong-row", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=path))
    assert f"line 2: {why}" in caught.value.message
    examples, report = read("s", Source(path=path, max_bad_rows=1))
    assert [words(example) for example in examples] == [TURNS, TURNS]
    assert report.bad == 1


def test_nothing_is_learned_from_a_turn_with_the_weight_0(tmp_path: Path) -> None:
    """OpenAI's weight, axolotl's train and ms-swift's loss."""
    for mark in ({"weight": 0}, {"train": False}, {"loss": False}):
        wrong = [*turns("Q", "WRONG", **mark), *turns("R", "A", weight=1)]
        path = str(lines(tmp_path / "s.jsonl", [{"messages": wrong}]))
        (example,) = read_examples("s", Source(path=path))
        assert [message.learned for message in example.messages] == [True, False, True, True]
        table = token_table(
            "s", Source(path=path), load_tokenizer("bytes"), template="plain", max_length=64
        )
        assert bytes(table.tokens[table.mask][:-1].tolist()) == b"A"
        assert b"WRONG" in bytes(token % 256 for token in table.tokens.tolist())
    unlearned = {"messages": turns("Q", "A", weight=0)}
    (example,) = read_examples("s", Source(path=str(lines(tmp_path / "t.jsonl", [unlearned]))))
    assert example.blank


def test_columns_that_are_not_read_are_named_once(tmp_path: Path) -> None:
    rows = [
        {"messages": turns("Q", "A", mood="good"), "id": 1, "chosen": "x"},
        {"messages": [*turns("Q", "A"), {"role": "user", "content": "R"}], "grade": 1, "note": ""},
    ]
    _, report = read("s", Source(path=str(lines(tmp_path / "s.jsonl", rows))))
    assert report.unread == (
        "chosen",
        "grade",
        "messages[].mood",
        "turns of messages after the last answer",
    )


def test_a_column_can_be_ignored_on_purpose(tmp_path: Path) -> None:
    path = str(lines(tmp_path / "s.jsonl", [{"question": "Q", "answer": "A", "context": "C"}]))
    source = Source(path=path, fields={"ignored": "context"})
    assert [words(example) for example in read_examples("s", source)] == [TURNS]
    assert not read("s", source)[1].unread
    fields = {"instruction": "question", "input": "context", "output": "answer"}
    (example,) = read_examples("s", Source(path=path, fields=fields))
    assert words(example)[0] == ("user", "Q\nC")


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"prompt": "Q", "chosen": "A", "rejected": "B"}, 'fields = { completion = "chosen" }'),
        ({"text": "A document."}, 'format = "text"'),
        ({"question": "Q", "solution": "A"}, "set fields = "),
    ],
)
def test_advice_for_rows_of_no_known_format_never_renames_a_column_to_itself(
    tmp_path: Path, row: dict[str, Any], hint: str
) -> None:
    path = str(lines(tmp_path / "s.jsonl", [row]))
    with rejects("wrong-format", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=path))
    assert hint in (caught.value.hint or "")
    assert "rename" not in (caught.value.hint or "")


BAD = [
    ("alpaca", {"instrution": "Q", "output": "A"}, "'instrution'?); it has: instrution, output"),
    (
        "alpaca",
        {"instruction": "Q", "Output": "A"},
        "no 'output' or 'response' (did you misspell it as 'Output'?)",
    ),
    ("alpaca", {"instruction": "  ", "output": "A"}, "'instruction' is empty"),
    ("chat", {"messages": "a text"}, "'messages' is a str, not a list of turns"),
    ("prompt-completion", {"prompt": "Q", "chosen": "A"}, "no 'completion' or 'response'; it has"),
    ("alpaca", {"instruction": "Q", "output": 7}, "'output' is an int, not text"),
    ("alpaca", {"instruction": "Q", "output": True}, "'output' is a bool, not text"),
    ("alpaca", {"instruction": "Q", "input": ["x"], "output": "A"}, "'input' is a list, not text"),
    ("gsm8k", {"question": "Q", "answer": "2"}, "no '#### ' line"),
    ("gsm8k", {"question": "Q"}, "no 'answer'"),
    ("math", {}, "no 'problem'; it has: (none)"),
    ("prompt-completion", {"promt": "Q"}, "'promt'?"),
    ("sharegpt", {"items": "text"}, "'items' is a str, not a list of turns"),
    ("sharegpt", {"items": []}, "'items' has no answer"),
    ("sharegpt", {"items": [{"from": "human", "value": "Q"}]}, "'items' has no answer"),
    ("sharegpt", {"items": [{"from": "gpt", "value": "A"}]}, "'items' begins with an answer"),
    ("sharegpt", {"items": ["Q", "A"]}, "turn 1 is a str, not an object"),
    (
        "sharegpt",
        {"items": [{"from": "alien", "value": "Q"}]},
        "turn 1 has the role 'alien'; available: system, user, human",
    ),
    (
        "sharegpt",
        {"items": [{"from": "human", "value": 3}]},
        "the text of turn 1 is an int, not text",
    ),
    (
        "chat",
        {"messages": [{"role": "user", "content": " "}, {"role": "assistant", "content": "A"}]},
        "the text of turn 1 is empty",
    ),
    ("chat", {"message": []}, "'message'?"),
]


@pytest.mark.parametrize(("name", "row", "why"), BAD)
def test_a_bad_row_says_what_is_wrong_with_it(name: str, row: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRow) as caught:
        FORMATS[name].read(row)
    assert why in str(caught.value)


def test_the_input_of_an_alpaca_row_can_be_told_from_its_instruction() -> None:
    user, _ = FORMATS["alpaca"].read(ALPACA[0])
    assert (user.text, user.instruction, user.context) == ("Add them.\n1, 2", "Add them.", "1, 2")
    assert Message("user", "alone").instruction == "alone"


# -- files
# --------------------------------------------------------------------------------------------------


def array(path: Path, rows: list[Any]) -> Path:
    data = json.dumps(rows, indent=1).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def parquet(path: Path, rows: list[Any]) -> Path:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    plain = path.with_suffix("") if path.suffix == ".gz" else path
    pq.write_table(pa.Table.from_pylist(rows), plain)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(plain.read_bytes()))
    return path


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lines, "a.jsonl"),
        (lines, "a.json"),
        (array, "a.json"),
        (array, "a.jsonl"),
        (parquet, "a.parquet"),
    ],
)
def test_one_set_of_rows_reads_the_same_from_every_kind_of_file(
    tmp_path: Path, write: Callable[[Path, list[Any]], Path], name: str, ending: str
) -> None:
    path = write(tmp_path / (name + ending), ALPACA)
    examples, report = read("s", Source(path=str(path)))
    assert [example.row for example in examples] == [0, 1, 2]
    assert [words(example)[0][1] for example in examples] == [
        "Add them.\n1, 2",
        "Say hi.",
        "Name a colour.",
    ]
    assert (report.format, report.total, report.bad) == ("alpaca", 3, 0)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("key", ["data", "items", "instances", "rows"])
def test_rows_in_an_object_around_them_are_found(
    tmp_path: Path, key: str, indent: int | None
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"type": "text2text", key: ALPACA}, indent=indent))
    assert len(read_examples("s", Source(path=str(path)))) == 3


def test_one_row_whose_turns_are_items_is_a_row_and_not_a_wrapper(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.json",
        [{"items": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}],
    )
    assert [words(example) for example in read_examples("s", Source(path=str(path)))] == [TURNS]


def test_blank_lines_and_a_byte_order_mark_are_skipped_and_lines_still_counted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.jsonl"
    rows = [json.dumps(row) for row in ALPACA]
    path.write_bytes(b"\xef\xbb\xbf" + f"{rows[0]}\n\n{rows[1]}\r\n  \n{{oops\n{rows[2]}".encode())
    assert [example.row for example in read("s", Source(path=str(path), max_bad_rows=1))[0]] == [
        0,
        1,
        3,
    ]
    with rejects("wrong-row", "s", "path", of=DataError) as caught:
        read("s", Source(path=str(path)))
    assert "\nline 5: " in caught.value.message


def test_variables_and_the_home_folder_are_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines(tmp_path / "a.jsonl", ALPACA)
    monkeypatch.setenv("HGMS_TEST_ROOT", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("$HGMS_TEST_ROOT/a.jsonl", "${HGMS_TEST_ROOT}/a.jsonl", "~/a.jsonl"):
        assert len(read_examples("s", Source(path=path))) == 3
    with rejects("missing-variable", "s", "path", of=ConfigError) as caught:
        read_examples("s", Source(path="$HGMS_TEST_ROT/a.jsonl"))
    assert "HGMS_TEST_ROT " in caught.value.message
    assert caught.value.did_you_mean == ("$HGMS_TEST_ROOT",)


def test_content_is_of_the_file_and_not_of_its_name(tmp_path: Path) -> None:
    first = lines(tmp_path / "a.jsonl", ALPACA)
    second = lines(tmp_path / "b.jsonl", ALPACA)
    third = lines(tmp_path / "c.jsonl", ALPACA[:2])
    item, two, three = (content("s", Source(path=str(path))) for path in (first, second, third))
    assert item == two != three
    assert content("s", Source(hub="a/b", revision=REVISION)) == f"hub:a/b@{REVISION} train"


# -- which rows
# --------------------------------------------------------------------------------------------------


def numbered(tmp_path: Path, count: int = 20) -> str:
    return str(
        lines(
            tmp_path / "n.jsonl", [{"prompt": f"Q{i}", "completion": f"A{i}"} for i in range(count)]
        )
    )


def test_skip_and_rows_take_a_stretch_of_the_file(tmp_path: Path) -> None:
    path = numbered(tmp_path)
    assert [e.row for e in read_examples("s", Source(path=path, skip=3, rows=4))] == [3, 4, 5, 6]
    assert [e.row for e in read_examples("s", Source(path=path, skip=18))] == [18, 19]


def test_a_shuffled_choice_is_seeded_and_disjoint_from_what_is_skipped(tmp_path: Path) -> None:
    path = numbered(tmp_path)

    def rows(**choice: int) -> list[int]:
        source = Source(path=path, **choice)  # type: ignore[arg-type]
        return [e.row for e in read_examples("s", source)]

    whole = rows(shuffle_seed=7)
    assert sorted(whole) == list(range(20))
    assert whole != list(range(20))
    assert whole == rows(shuffle_seed=7)
    assert whole != rows(shuffle_seed=8)
    assert rows(shuffle_seed=7, rows=8) + rows(shuffle_seed=7, skip=8) == whole


def test_completion_replaces_every_answer_and_nothing_else(tmp_path: Path) -> None:
    turns = [
        {"role": role, "content": text}
        for role, text in [*TURNS, ("user", "Q2"), ("assistant", "A2")]
    ]
    path = lines(tmp_path / "a.jsonl", [{"messages": turns}])
    (example,) = read_examples("s", Source(path=str(path), completion="."))
    assert words(example) == [("user", "Q"), ("assistant", "."), ("user", "Q2"), ("assistant", ".")]


@pytest.mark.parametrize(
    ("choice", "option", "most"),
    [
        ({"rows": 21}, "rows", 20),
        ({"rows": 10, "skip": 11}, "rows", 9),
        ({"skip": 20}, "skip", 19),
        ({"skip": 30, "rows": 2}, "skip", 19),
    ],
)
def test_a_source_shorter_than_asked_says_how_much_there_is(
    tmp_path: Path, choice: dict[str, int], option: str, most: int
) -> None:
    with rejects("too-few-rows", "s", option, of=DataError) as caught:
        read_examples("s", Source(path=numbered(tmp_path), **choice))  # type: ignore[arg-type]
    assert f"{option}={choice[option]}" in caught.value.message
    assert " has 20 " in caught.value.message
    assert f"{option} = {most} " in (caught.value.hint or "")


# -- bad input
# --------------------------------------------------------------------------------------------------


def test_bad_rows_are_counted_and_the_first_few_listed(tmp_path: Path) -> None:
    rows: list[Any] = [
        *ALPACA,
        '{"instruction": "x", ',
        {"instruction": "Q", "ouput": "A"},
        '["a"]',
        *[{"text": "t"}] * 5,
    ]
    path = lines(tmp_path / "a.jsonl", rows)
    with rejects("wrong-row", "noisy", "path", of=DataError) as caught:
        read_examples("noisy", Source(path=str(path)))
    text = str(caught.value)
    for part in (
        f"8 of 11 rows of {path} cannot be read as 'alpaca', but max_bad_rows=0 (noisy.path)\n"
        "  alpaca: instruction, input (may be empty or absent), output (or response)\n",
        "line 4: malformed JSON: Expecting property name enclosed in double quotes at column ",
        (
            "line 5: no 'output' or 'response' (did you misspell it as 'ouput'?); it has: "
            "instruction, ouput"
        ),
        "line 6: it is a list, not an object",
        "line 8: no 'instruction'; it has: text",
        "… and 3 more",
        "correct these rows, or skip them with max_bad_rows = 8 or more",
    ):
        assert part in text
    assert "line 9" not in text
    with rejects("wrong-row", "noisy", "path", of=DataError) as caught:
        read_examples("noisy", Source(path=str(path), max_bad_rows=7))
    assert "max_bad_rows=7" in caught.value.message
    examples, report = read("noisy", Source(path=str(path), max_bad_rows=8))
    assert (len(examples), report.total, report.bad) == (3, 11, 8)


def test_a_line_that_is_not_utf8_is_one_bad_row(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", ALPACA)
    path.write_bytes(path.read_bytes() + b'{"instruction": "caf\xe9", "output": "A"}\n')
    with rejects("wrong-row", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=str(path)))
    assert caught.value.message.startswith("1 of 4 ")
    assert "\nline 4: it is not UTF-8 (byte " in caught.value.message


def test_half_a_surrogate_pair_is_one_bad_row(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [*ALPACA, '{"instruction": "Q", "output": "\\ud83d"}'])
    with rejects("wrong-row", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=str(path)))
    assert "\nline 4: half a surrogate pair ('\\ud83d')" in caught.value.message


def test_the_wrong_format_named_points_to_the_right_one(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", ALPACA)
    with rejects("wrong-row", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=str(path), format="sharegpt", max_bad_rows=99))
    assert (caught.value.hint or "").startswith('set format = "alpaca"')


def test_no_good_row_is_an_error_whatever_the_limit(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", ["{", "nonsense"])
    with rejects("wrong-row", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=str(path), max_bad_rows=99))
    first, *rows = caught.value.message.splitlines()
    assert "the 2 rows" in first
    assert [row.partition(":")[0] for row in rows] == ["line 1", "line 2"]


def test_a_bad_row_of_an_array_or_table_has_the_number_that_its_example_would_have(
    tmp_path: Path,
) -> None:
    rows = [*ALPACA[:2], {"instruction": None, "input": "", "output": "A"}, ALPACA[2]]
    for path in (array(tmp_path / "a.json", rows), parquet(tmp_path / "a.parquet", rows)):
        with rejects("wrong-row", "s", "path", of=DataError) as caught:
            read_examples("s", Source(path=str(path)))
        assert caught.value.message.startswith("1 of 4 ")
        assert caught.value.message.endswith("\nrow 2: 'instruction' is null, not text")
        assert [
            example.row for example in read_examples("s", Source(path=str(path), max_bad_rows=1))
        ] == [0, 1, 3]


def test_the_format_is_told_from_the_first_whole_rows_however_late_they_come(
    tmp_path: Path,
) -> None:
    path = lines(tmp_path / "a.jsonl", ["{"] * 300 + ALPACA * 100)
    examples, report = read("s", Source(path=str(path), max_bad_rows=300))
    assert (report.format, report.total, report.bad, len(examples)) == ("alpaca", 600, 300, 300)
    assert examples[0].row == 300


def test_rows_of_no_known_format_list_their_fields_and_the_formats(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"promptt": "Q", "text": "A"}])
    with rejects("wrong-format", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=str(path)))
    assert "promptt, text" in caught.value.message
    assert "'promptt' to 'prompt'\n" in (caught.value.hint or "")
    assert "gsm8k: question" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "code", "part"),
    [
        (
            '[{"prompt": "Q",\n "completion": }]',
            "wrong-format",
            "line 2, column 16 of {path} is malformed JSON: Expecting value",
        ),
        ('[{"prompt": "Q"}', "wrong-format", "line 1, column 17 of {path}"),
        ('{"nothing": 1}', "wrong-format", ": its fields are nothing"),
        ("", "no-rows", "{path}"),
        ("\n \n", "no-rows", "{path}"),
        ("[]", "no-rows", "{path}"),
        ('{"data": []}', "no-rows", "{path}"),
    ],
)
def test_a_json_file_without_rows_says_why(tmp_path: Path, text: str, code: str, part: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with rejects(code, "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=str(path)))
    assert part.format(path=path) in caught.value.message


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl.gz", ALPACA)
    with rejects("missing-file", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=str(tmp_path / "trian.jsonl.gz")))
    assert caught.value.did_you_mean == ("train.jsonl.gz",)
    assert (caught.value.hint or "").endswith(": train.jsonl.gz")
    (tmp_path / "empty").mkdir()
    with rejects("missing-file", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=str(tmp_path / "empty")))
    assert "the folder " in caught.value.message
    assert (caught.value.hint or "").endswith(": (none)")
    with rejects("missing-file", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=str(tmp_path / "none" / "a.jsonl")))
    assert "its folder cannot be read" in caught.value.message
    (tmp_path / "a.docx").write_text("x")
    with rejects("wrong-format", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=str(tmp_path / "a.docx")))
    assert "a.docx" in caught.value.message
    assert ": .json, .jsonl," in (caught.value.hint or "")


@pytest.mark.parametrize("head", [b"", b'{"prompt": "'])
def test_a_compressed_line_that_fills_the_memory_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", 1 << 16)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(head + b"x" * (1 << 20)))
    with rejects("too-large", "s", "path", of=DataError):
        read_examples("s", Source(path=str(path)))


@pytest.mark.parametrize("keep", [4, 40, -6])
def test_a_truncated_gzip_file_is_named(tmp_path: Path, keep: int) -> None:
    path = lines(tmp_path / "a.jsonl.gz", ALPACA)
    path.write_bytes(path.read_bytes()[:keep])
    with rejects("damaged-file", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=str(path)))
    assert "a.jsonl.gz" in caught.value.message


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", ALPACA)
    path.write_bytes(path.read_bytes()[:-20])
    with rejects("damaged-file", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=str(path)))
    assert "a.parquet" in caught.value.message


def test_parquet_without_pyarrow_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet(tmp_path / "a.parquet", ALPACA)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with rejects("missing-package", "s", "path", of=MissingExtra) as caught:
        read_examples("s", Source(path=str(path)))
    assert caught.value.install == "pip install 'hgms[llm]'"


@pytest.mark.parametrize(
    ("fields", "code", "option"),
    [
        ({}, "missing-option", "path"),
        ({"path": "a.jsonl", "hub": "a/b", "revision": REVISION}, "conflicting-options", "path"),
        ({"hub": "a/b"}, "missing-option", "revision"),
        ({"hub": "a/b", "revision": "main"}, "wrong-value", "revision"),
        ({"path": "a.jsonl", "split": "train"}, "conflicting-options", "split"),
        ({"path": "a.jsonl", "format": "alpacca"}, "unknown-format", "format"),
        ({"path": "a.jsonl", "rows": 0}, "out-of-range", "rows"),
        ({"path": "a.jsonl", "skip": -1}, "out-of-range", "skip"),
        ({"path": "a.jsonl", "max_bad_rows": -1}, "out-of-range", "max_bad_rows"),
        ({"path": ""}, "wrong-length", "path"),
    ],
)
def test_fields_that_make_no_source_are_refused(
    fields: dict[str, Any], code: str, option: str
) -> None:
    with rejects(code, option, of=ConfigError):
        Source(**fields)


def test_a_misspelt_format_is_answered_with_the_nearest() -> None:
    with rejects("unknown-format", "format") as caught:
        Source(path="a.jsonl", format="alpacca")
    assert caught.value.did_you_mean == ("alpaca",)


@pytest.mark.parametrize(
    ("names", "code", "part"),
    [
        (["clean", "Clean"], "duplicate-name", "'clean' and 'Clean'"),
        (["a", "b", "a"], "duplicate-name", "'a'"),
        (["a", " "], "wrong-value", "' '"),
        (["a", "gsm8k/test"], "wrong-value", "'gsm8k/test' of a source contains '/'"),
        (["a", "c:\\test"], "wrong-value", r"'\\'"),
        (["a", "two\nlines"], "wrong-value", r"'two\nlines' of a source contains '\n'"),
        (["a", "ä" * 100], "wrong-length", " 200 bytes"),
    ],
)
def test_names_that_can_be_mixed_up_are_refused(names: list[str], code: str, part: str) -> None:
    with rejects(code, "sources", of=ConfigError) as caught:
        check_names(iter(names), place=("sources",))
    assert part in caught.value.message
    check_names(["a", "b"])


def test_folders_and_patterns_are_their_files_in_order(tmp_path: Path) -> None:
    """Rows number on from file to file, and the digest is of the contents in that order, not of
    names.
    """
    (tmp_path / "set").mkdir()
    for name, first in {"b.jsonl": 10, "a.jsonl.gz": 0, "c.json": 20}.items():
        lines(
            tmp_path / "set" / name,
            [{"prompt": f"p{i}", "completion": str(i)} for i in range(first, first + 3)],
        )
    (tmp_path / "set" / "README.md").write_text("notes")
    whole = Source(path=str(tmp_path / "set"))
    pattern = Source(path=str(tmp_path / "*" / "*.json*"))
    for item in (whole, pattern, Source(path=str(tmp_path / "**" / "*.json*"))):
        examples = read_examples("s", item)
        assert [example.messages[-1].text for example in examples] == [
            "0",
            "1",
            "2",
            "10",
            "11",
            "12",
            "20",
            "21",
            "22",
        ]
        assert [example.row for example in examples] == list(range(9))
        assert content("s", item) == content("s", whole)
    some = Source(path=str(tmp_path / "set" / "[bc].json*"))
    assert len(read_examples("s", some)) == 6
    assert content("s", some) != content("s", whole)
    (tmp_path / "set" / "b.jsonl").write_text('{"prompt": "p", "completion": "c"}\n{oops\n')
    with rejects("wrong-row", "s", "path", of=DataError) as caught:
        read_examples("s", whole)
    assert "\nb.jsonl, line 2: " in caught.value.message
    with rejects("missing-file", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=str(tmp_path / "set" / "*.md")))
    assert caught.value.message.endswith(": README.md")
    with rejects("missing-file", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=str(tmp_path / "none" / "*.jsonl")))
    assert "*.jsonl matches no file" in caught.value.message


def test_tables_of_text_give_the_rows_of_the_same_json(tmp_path: Path) -> None:
    """What the standard library wrote, with commas, quotes and line breaks inside; numbers stay
    the text that they are.
    """
    import csv

    pairs = [("a, b", 'say "x"'), ("two\nlines", "007"), ("ü", "1.50")]
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in pairs]
    lines(tmp_path / "rows.jsonl", rows)
    expected = [
        item.messages for item in read_examples("s", Source(path=str(tmp_path / "rows.jsonl")))
    ]
    for name, delimiter, encoding in (
        ("t.csv", ",", "utf-8-sig"),
        ("t.tsv", "\t", "utf-8"),
        ("U.CSV", ",", "utf-8"),
    ):
        with (tmp_path / name).open("w", newline="", encoding=encoding) as stream:
            writer = csv.DictWriter(stream, ["prompt", "completion"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
        assert [
            item.messages for item in read_examples("s", Source(path=str(tmp_path / name)))
        ] == expected
    (tmp_path / "t.csv").write_text("prompt,completion\na,b\nc,d,e\n")
    with rejects("wrong-row", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=str(tmp_path / "t.csv")))
    assert "\nline 3: it has 3 fields, but the first line has 2" in caught.value.message
    (tmp_path / "t.csv").write_text('prompt,completion\n"a,b\n')
    with rejects("wrong-format", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=str(tmp_path / "t.csv")))
    assert "t.csv is malformed CSV" in caught.value.message


def test_zstandard_files_are_read(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'hgms[llm]'")
    lines(tmp_path / "rows.jsonl", ALPACA)
    expected = read_examples("s", Source(path=str(tmp_path / "rows.jsonl")))
    with pa.output_stream(str(tmp_path / "rows.jsonl.zst"), compression="zstd") as stream:
        stream.write((tmp_path / "rows.jsonl").read_bytes())
    assert read_examples("s", Source(path=str(tmp_path / "rows.jsonl.zst"))) == expected
    data = (tmp_path / "rows.jsonl.zst").read_bytes()
    (tmp_path / "rows.jsonl.zst").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError) as caught:
        read_examples("s", Source(path=str(tmp_path / "rows.jsonl.zst")))
    assert caught.value.code in ("unreadable-file", "no-rows", "wrong-row")
    assert caught.value.place == ("s", "path")


def test_raw_text_is_learned_from_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "poems.txt").write_text("Roses are red.\r\n\nViolets are blue.\n", encoding="utf-8")
    examples = read_examples("s", Source(path=str(tmp_path / "poems.txt")))
    assert [item.messages[0].text for item in examples] == ["Roses are red.", "Violets are blue."]
    assert {item.messages[0].role for item in examples} == {"assistant"}
    assert [item.key for item in examples] == ["roses are red.", "violets are blue."]
    lines(tmp_path / "rows.jsonl", [{"text": "Roses are red."}])
    with rejects("wrong-format", "s", "path", of=DataError):
        read_examples("s", Source(path=str(tmp_path / "rows.jsonl")))
    (item,) = read_examples("s", Source(path=str(tmp_path / "rows.jsonl"), format="text"))
    assert item.messages == examples[0].messages


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_utf_16_is_called_so(name: str, encoding: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("\n".join(json.dumps(row) for row in ALPACA), encoding=encoding)
    with rejects("wrong-format", "s", "path", of=DataError) as caught:
        read_examples("s", Source(path=str(tmp_path / name), max_bad_rows=99))
    assert "UTF-16" in caught.value.message
    assert "iconv -f UTF-16 -t UTF-8 " in (caught.value.hint or "")


def test_messages_show_a_path_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable's value may be nobody else's business: messages are printed, and kept in
    summaries.
    """
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    for path in (
        "$OPENAI_API_KEY/x",
        "$OPENAI_API_KEY",
        "${OPENAI_API_KEY}.jsonl",
        "./$OPENAI_API_KEY/a.jsonl",
    ):
        with pytest.raises(DataError) as caught:
            read_examples("s", Source(path=path))
        assert "sk-secret" not in repr(caught.value.as_dict())
        assert path in caught.value.message
    from hgms_mix.evaluation.questions import place

    for call in (
        lambda: place("gsm8k", "$OPENAI_API_KEY/x"),
        lambda: load_tokenizer("./$OPENAI_API_KEY/x"),
        lambda: BaseModel(path="./$OPENAI_API_KEY/x", tokenizer="bytes").load(torch.device("cpu")),
    ):
        with pytest.raises(HgmsError) as caught:
            call()
        assert "sk-secret" not in repr(caught.value.as_dict())


# -- the Hub
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A stand-in for the Hub's loader, which answers with a real data set or raises."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    requests = types.SimpleNamespace(calls=[], answer=datasets.Dataset.from_list(ALPACA))

    def load(name: str, subset: str | None, *, split: str, revision: str) -> Any:
        requests.calls.append((name, subset, split, revision))
        if isinstance(requests.answer, Exception):
            raise requests.answer
        return requests.answer

    monkeypatch.setattr(datasets, "load_dataset", load)
    return requests


def test_a_hub_set_is_read_at_its_pinned_revision(hub: types.SimpleNamespace) -> None:
    examples = read_examples("s", Source(hub="a/b", revision=REVISION))
    assert [example.messages[-1].text for example in examples] == ["3", "Hi.", "Red."]
    read_examples("s", Source(hub="a/b", revision=REVISION, subset="main", split="test", rows=1))
    assert hub.calls == [("a/b", None, "train", REVISION), ("a/b", "main", "test", REVISION)]


def test_a_hub_set_that_cannot_be_had_says_what_to_check(hub: types.SimpleNamespace) -> None:
    hub.answer = ConnectionError("no route to host")
    with rejects("cannot-load", "s", "hub", of=DataError) as caught:
        read_examples("s", Source(hub="a/b", revision=REVISION))
    assert "'a/b'" in caught.value.message
    assert caught.value.message.endswith(": ConnectionError: no route to host")


def test_a_hub_set_without_datasets_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with rejects("missing-package", "s", "hub", of=MissingExtra) as caught:
        read_examples("s", Source(hub="a/b", revision=REVISION))
    assert caught.value.install == "pip install 'hgms[llm]'"


# -- real rows
# --------------------------------------------------------------------------------------------------

REAL = [
    ("alpaca/alpaca_52002.jsonl.gz", "alpaca", 52002, 28),
    ("alpaca_gpt4_en/alpaca_gpt4_en_6000.jsonl.gz", "alpaca", 6000, 0),
    ("alpaca_zh/alpaca_zh_6000.jsonl.gz", "alpaca", 6000, 1),
    ("code_alpaca/code_alpaca_2000.jsonl.gz", "alpaca", 2000, 2),
    ("dart_math_uniform/dart_math_uniform_2000.jsonl.gz", "sharegpt", 2000, 0),
    ("gpt4_llm_cleaned/gpt4_llm_cleaned_2000.jsonl.gz", "sharegpt", 2000, 0),
    ("gpteacher_general_instruct/gpteacher_general_instruct_2000.jsonl.gz", "sharegpt", 2000, 0),
    ("gpteacher_roleplay/gpteacher_roleplay_1923.jsonl.gz", "alpaca", 1923, 0),
    ("gsm8k/train.jsonl.gz", "gsm8k", 7473, 0),
    ("gsm8k/test.jsonl.gz", "gsm8k", 1319, 0),
    ("math/train.jsonl.gz", "math", 7500, 0),
    ("math/test.jsonl.gz", "math", 5000, 0),
    ("math/math500.jsonl.gz", "math", 500, 0),
    ("mathinstruct/mathinstruct_2000.jsonl.gz", "sharegpt", 2000, 0),
    ("orca_math/orca_math_2000.jsonl.gz", "sharegpt", 2000, 0),
    ("scalebio_data_tiny/train_alpaca.jsonl.gz", "alpaca", 9000, 7),
    ("scalebio_data_tiny/train_gpt4_alpaca.jsonl.gz", "alpaca", 1000, 0),
    ("scalebio_data_tiny/val.jsonl.gz", "alpaca", 1000, 0),
    ("scalebio_data_tiny/test.jsonl.gz", "alpaca", 1000, 0),
    ("scalebio_math_valtest/val.jsonl.gz", "sharegpt", 1400, 0),
    ("scalebio_math_valtest/test.jsonl.gz", "sharegpt", 280, 0),
]


@real
@pytest.mark.parametrize(("file", "form", "rows", "blank"), REAL, ids=[file for file, *_ in REAL])
def test_every_real_set_is_read_whole(file: str, form: str, rows: int, blank: int) -> None:
    examples, report = read("real", Source(path=f"$HGMS_DATA/{file}"))
    assert (report.format, report.total, report.bad, len(examples)) == (form, rows, 0, rows)
    assert sum(example.blank for example in examples) == blank
    assert all(example.messages[-1].role == "assistant" and example.key for example in examples)
    assert [example.row for example in examples] == list(range(rows))


@real
def test_the_corrupted_source_of_the_denoising_experiment_has_all_9000_rows() -> None:
    source = Source(path="$HGMS_DATA/scalebio_data_tiny/train_alpaca.jsonl.gz", completion=".")
    examples = read_examples("noisy", source)
    assert len(examples) == 9000
    assert {example.messages[-1].text for example in examples} == {"."}
    assert not any(example.blank for example in examples)


# -- columns with names of their own
# --------------------------------------------------------------------------------------------------


def test_columns_with_names_of_their_own_are_said_once_for_a_source(tmp_path: Path) -> None:
    rows = [{"frage": f"Q{n}", "antwort": f"A{n}", "id": n} for n in range(3)]
    own = Source(
        path=str(lines(tmp_path / "own.jsonl", rows)),
        fields={"prompt": "frage", "completion": "antwort"},
    )
    examples, report = read("own", own)
    assert [words(example) for example in examples] == [
        [("user", f"Q{n}"), ("assistant", f"A{n}")] for n in range(3)
    ]
    assert report.format == "prompt-completion"


def test_they_hold_for_every_format_and_kind_of_file(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text("aufgabe,input,ergebnis,output\nQ,I,A,not it\n")
    own = Source(
        path=str(file), format="alpaca", fields={"instruction": "aufgabe", "output": "ergebnis"}
    )
    assert words(read_examples("own", own)[0]) == [("user", "Q\nI"), ("assistant", "A")]


def test_a_row_without_such_a_column_is_a_bad_one_and_counts_as_one(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "own.jsonl", [{"frage": "Q", "antwort": "A"}, {"frage": "Q", "answer": "A"}]
    )
    fields = {"prompt": "frage", "completion": "antwort"}
    with rejects("wrong-row", "own", "path", of=DataError) as caught:
        read("own", Source(path=str(file), fields=fields))
    assert "\nline 2: no column 'antwort'" in caught.value.message
    assert "'completion' (did you mean 'answer'?); it has: frage, answer" in caught.value.message
    examples, report = read("own", Source(path=str(file), fields=fields, max_bad_rows=1))
    assert (len(examples), report.bad) == (1, 1)


def test_they_change_the_tokens_and_only_where_they_are_given(tmp_path: Path) -> None:
    rows = [{"prompt": "Q", "completion": "A", "better": "B"}]
    path = str(lines(tmp_path / "own.jsonl", rows))
    cache = tmp_path / "cache"
    bytes_ = load_tokenizer("bytes")
    options = {"template": "plain", "max_length": 32, "cache_dir": cache}
    sources = [
        Source(path=path, fields=fields) for fields in (None, {"completion": "better"}, None)
    ]
    tables = [token_table("own", source, bytes_, **options) for source in sources]
    texts = [bytes(int(token) for token in table.row(0)[0] if token < 256) for table in tables]
    assert [b"B" in text for text in texts] == [False, True, False]
    assert tables[0].digest == tables[2].digest != tables[1].digest


@pytest.mark.parametrize("fields", [{"prompt": "a", "completion": "a"}, {"prompt": ""}, {"": "a"}])
def test_a_column_for_two_fields_and_names_of_nothing_are_refused(fields: dict[str, str]) -> None:
    with rejects("wrong-value", "fields", of=ConfigError):
        Source(path="own.jsonl", fields=fields)


def test_where_no_format_fits_the_message_says_how_to_name_columns(tmp_path: Path) -> None:
    path = str(lines(tmp_path / "own.jsonl", [{"frage": "Q", "antwort": "A"}]))
    own = 'fields = { prompt = "COLUMN", completion = "COLUMN" }'
    with rejects("wrong-format", "own", "path", of=DataError) as caught:
        read("own", Source(path=path))
    assert own in (caught.value.hint or "")
    with rejects("wrong-row", "own", "path", of=DataError) as caught:
        read("own", Source(path=path, format="alpaca"))
    assert f"remove format = 'alpaca' and set {own}" in (caught.value.hint or "")
    misspelt = Source(path=path, fields={"prompt": "frage", "completion": "antwrt"})
    with rejects("wrong-row", "own", "path", of=DataError) as caught:
        read("own", misspelt)
    assert "did you mean 'antwort'?" in caught.value.message
    assert "fields" in (caught.value.hint or "")
