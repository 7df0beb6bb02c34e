"""Rows and columns of a data set that a trainer would read, and keys that are not imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.exports import brought, sources
from support.helpers import rejects

from hgms_core import ConfigError
from hgms_mix.lm import Source, read_examples

pytest.importorskip("yaml", reason="pyyaml is not installed: pip install 'hgms[llm]'")

DIRECTORY = "dataset_dir: .\n"
BOTH = f"dataset: a,b\n{DIRECTORY}"
pytestmark = pytest.mark.usefixtures("data_sets")
JSON = "{path: json, data_files: "
RAW = "type: {field_instruction: frage, field_output: antwort}"


def answers(trainer: str, text: str, info: Any = None) -> list[str]:
    """The first answer of each source of the mix file."""
    brought(trainer, text, info)
    return [
        read_examples(name, Source(**table))[0].messages[-1].text
        for name, table in sources().items()
    ]


@pytest.mark.parametrize(
    ("split", "skip", "count"),
    [
        ("train", 0, None),
        ("train[:10]", 0, 10),
        ("train[-5:]", 35, None),
        ("train[20%:-10%]", 8, 28),
        ("train[:400]", 0, None),
    ],
)
@pytest.mark.parametrize("trainer", ["axolotl", "trl", "llamafactory"])
def test_a_slice_of_a_data_set(trainer: str, split: str, skip: int, count: int | None) -> None:
    text = f"datasets:\n- {JSON}a.jsonl, split: '{split}'}}\n- {JSON}b.jsonl}}\n"
    columns = {"prompt": "frage", "response": "text"}
    info = {name: {"file_name": f"{name}.jsonl", "columns": columns} for name in "ab"}
    info["a"]["split"] = split
    found = brought(trainer, BOTH if trainer == "llamafactory" else text, info)
    source = found.sources["a"]
    assert (source.get("skip", 0), source.get("rows")) == (skip, count)
    rows = list(range(40))[skip:][:count]
    assert found.mixture["a"] == pytest.approx(len(rows) / (len(rows) + 10))
    assert [example.row for example in read_examples("a", Source(**source))] == rows


NAMED = {"file_name": "a.jsonl", "columns": {"prompt": "frage", "response": "antwort"}}
INFO = {
    "alpaca": {"file_name": "c.jsonl"},
    "named": NAMED,
    "chat": {
        "file_name": "a.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "dialog"},
        "tags": {"role_tag": "from", "content_tag": "value", "user_tag": "human"},
    },
}
ALL = f"dataset: alpaca,named,chat\n{DIRECTORY}"
TWO = "dataset: [a.jsonl, b.jsonl]\n"


@pytest.mark.parametrize(
    ("trainer", "text", "expected"),
    [
        (
            "axolotl",
            f"datasets:\n- {{path: a.jsonl, {RAW}}}\n"
            f'- {{path: a.jsonl, {RAW[:-1]}, format: "{{instruction}}"}}}}\n'
            "- {path: c.jsonl, type: alpaca}\n- {path: a.jsonl, type: chat_template}\n"
            "- {path: a.jsonl, type: chat_template, field_messages: dialog,"
            " message_property_mappings: {role: from, content: value}}\n"
            "- {path: a.jsonl, type: completion}\n"
            "- {path: a.jsonl, type: completion, field: antwort}\n",
            ["ANTWORT 0", "ANTWORT 0", "ALPACA", "RAW", "DIALOG 0", "TEXT 0", "ANTWORT 0"],
        ),
        (
            "trl",
            f"datasets:\n- {JSON}a.jsonl, columns: [text]}}\n"
            f"- {JSON}b.jsonl, columns: [messages]}}\n",
            ["TEXT 0", "RAW"],
        ),
        ("llamafactory", ALL, ["ALPACA", "ANTWORT 0", "DIALOG 0"]),
        (
            "ms-swift",
            "dataset: [a.jsonl, b.jsonl]\ncolumns: {frage: query, antwort: response}\n",
            ["ANTWORT 0", "ANTWORT 0"],
        ),
        (
            "ms-swift",
            'dataset: [a.jsonl, b.jsonl]\ncolumns: \'{"dialog": "messages"}\'\n',
            ["DIALOG 0", "DIALOG 0"],
        ),
    ],
)
def test_the_columns_that_a_trainer_reads_are_read(
    trainer: str, text: str, expected: list[str]
) -> None:
    assert answers(trainer, text, INFO) == expected


B = "{path: b.jsonl}"
WRONG: list[tuple[str, str, Any, tuple[str | int, ...]]] = [
    *(
        (
            "trl",
            f"datasets: [{{path: a.jsonl, split: '{split}'}}, {B}]",
            {},
            ("datasets", 0, "split"),
        )
        for split in ("test", "train+test", "train[:10%](drop)")
    ),
    *(
        (
            "axolotl",
            f"datasets: [{{path: a.jsonl, type: chat_template, {option}}}, {B}]",
            {},
            ("datasets", 0, *place),
        )
        for option, place in (
            ("shards: 4", ["shards"]),
            ("field_tools: werkzeug", ["field_tools"]),
            ("drop_system_message: true", ["drop_system_message"]),
            ("message_field_training_detail: wo", ["message_field_training_detail"]),
            ("message_field_role: wer", ["message_field_role"]),
            ("message_property_mappings: {role: wer}", ["message_property_mappings", "role"]),
            ("roles_to_train: [user]", ["roles_to_train"]),
            ("roles: {user: [ich]}", ["roles", "user"]),
        )
    ),
    (
        "trl",
        f"datasets: [{{path: a.jsonl, columns: [frage, x]}}, {B}]",
        {},
        ("datasets", 0, "columns"),
    ),
    (
        "llamafactory",
        ALL,
        {"columns": {"prompt": "frage", "tools": "werkzeug"}},
        ("named", "columns", "tools"),
    ),
    ("llamafactory", ALL, {"ranking": True}, ("named", "ranking")),
    (
        "llamafactory",
        ALL,
        {"formatting": "sharegpt", "tags": {"role_tag": "wer"}},
        ("named", "tags", "role_tag"),
    ),
    ("llamafactory", ALL, {"formatting": "other"}, ("named", "formatting")),
    ("llamafactory", f"{ALL}stage: kto\n", {}, ("stage",)),
    ("ms-swift", f"{TWO}columns: {{frage: rejected_response}}\n", {}, ("columns",)),
    ("ms-swift", f"{TWO}rlhf_type: kto\n", {}, ("rlhf_type",)),
]


@pytest.mark.parametrize(("trainer", "text", "wrong", "place"), WRONG)
def test_slices_and_keys_that_change_what_is_learned_are_rejected(
    trainer: str, text: str, wrong: dict[str, Any], place: tuple[str | int, ...]
) -> None:
    file = str(Path.cwd() / "dataset_info.json") if wrong else "c.yaml"
    info = {**INFO, "named": {"file_name": "a.jsonl", **wrong}} if wrong else INFO
    with rejects("not-supported", file, *place, of=ConfigError):
        brought(trainer, text, info)


@pytest.mark.parametrize(
    ("trainer", "text"),
    [
        (
            "axolotl",
            "datasets: [{path: c.jsonl, type: alpaca, colour: 1, ds_type: json}, {path: b.jsonl}]",
        ),
        ("trl", f"datasets: [{JSON}a.jsonl, colour: 1}}, {JSON}b.jsonl}}]"),
        ("datasets", "datasets: [{data_files: a.jsonl, colour: red}, {data_files: b.jsonl}]"),
        ("llamafactory", BOTH),
    ],
)
def test_keys_that_are_not_imported_are_reported(trainer: str, text: str) -> None:
    file = {"file_name": "c.jsonl"}
    notes = brought(trainer, text, {"a": {**file, "colour": 1}, "b": file}).notes
    assert ("colour" in notes[0], "ds_type" in notes[0]) == (True, False)
