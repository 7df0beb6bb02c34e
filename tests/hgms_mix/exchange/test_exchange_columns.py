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
        ("train[:10%]", 0, 4),
        ("train[:10]", 0, 10),
        ("train[90%:]", 36, None),
        ("train[-5:]", 35, None),
        ("train[10:20]", 10, 10),
        ("train[20%:-10%]", 8, 28),
        ("train[:400]", 0, None),
    ],
)
@pytest.mark.parametrize("trainer", ["axolotl", "trl", "llamafactory"])
def test_a_slice_of_a_data_set(trainer: str, split: str, skip: int, count: int | None) -> None:
    text = f"datasets:\n- {JSON}a.jsonl, split: '{split}'}}\n- {JSON}b.jsonl}}\n"
    columns = {"prompt": "frage", "response": "text"}
    info: Any = {name: {"file_name": f"{name}.jsonl", "columns": columns} for name in "ab"}
    info["a"]["split"] = split
    found = brought(trainer, BOTH if trainer == "llamafactory" else text, info)
    source = found.sources["a"]
    assert (source.get("skip", 0), source.get("rows")) == (skip, count)
    rows = list(range(40))[skip:][:count]
    assert found.mixture["a"] == pytest.approx(len(rows) / (len(rows) + 10))
    assert [example.row for example in read_examples("a", Source(**source))] == rows


@pytest.mark.parametrize("split", ["test", "train+test", "train[5:5]", "train[:10%](drop)"])
def test_other_slices_are_rejected(split: str) -> None:
    text = f"datasets:\n- {{path: a.jsonl, split: '{split}'}}\n- {{path: b.jsonl}}\n"
    code = "no-rows" if "5:5" in split else "not-supported"
    for trainer in ("axolotl", "trl"):
        with rejects(code, "c.yaml", "datasets", 0, "split", of=ConfigError):
            brought(trainer, text)


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


MAPPINGS = "message_property_mappings"
CHAT = "path: a.jsonl, type: chat_template"


@pytest.mark.parametrize(
    ("trainer", "option", "place"),
    [
        ("axolotl", "shards: 4", ("shards",)),
        ("axolotl", "field_tools: werkzeug", ("field_tools",)),
        ("axolotl", "drop_system_message: true", ("drop_system_message",)),
        ("axolotl", "message_field_training_detail: wo", ("message_field_training_detail",)),
        ("axolotl", "message_field_role: wer", ("message_field_role",)),
        (
            "axolotl",
            "message_property_mappings: {role: wer}",
            ("message_property_mappings", "role"),
        ),
        ("axolotl", "roles_to_train: [user]", ("roles_to_train",)),
        ("axolotl", "roles: {user: [ich]}", ("roles", "user")),
        ("trl", "columns: [frage, antwort]", ("columns",)),
    ],
)
def test_keys_of_a_data_set_that_change_what_is_learned_are_rejected(
    trainer: str, option: str, place: tuple[str, ...]
) -> None:
    with rejects("not-supported", "c.yaml", "datasets", 0, *place, of=ConfigError):
        brought(trainer, f"datasets:\n- {{{CHAT}, {option}}}\n- {{path: b.jsonl}}\n")


def test_keys_of_llamafactory_and_ms_swift_that_change_what_is_learned_are_rejected() -> None:
    for wrong, place in (
        ({"columns": {"prompt": "frage", "tools": "werkzeug"}}, ("columns", "tools")),
        ({"ranking": True}, ("ranking",)),
        ({"formatting": "sharegpt", "tags": {"role_tag": "wer"}}, ("tags", "role_tag")),
        ({"formatting": "sharegpt", "tags": {"user_tag": "ich"}}, ("tags", "user_tag")),
        ({"formatting": "other"}, ("formatting",)),
    ):
        listed = str(Path.cwd() / "dataset_info.json")
        with rejects("not-supported", listed, "named", *place, of=ConfigError):
            brought("llamafactory", ALL, {**INFO, "named": {"file_name": "a.jsonl", **wrong}})
    two = "dataset: [a.jsonl, b.jsonl]\n"
    for trainer, text, option in (
        ("llamafactory", ALL, "stage: kto"),
        ("ms-swift", two, "columns: {frage: rejected_response}"),
        ("ms-swift", two, "rlhf_type: kto"),
    ):
        with rejects("not-supported", "c.yaml", option.partition(":")[0], of=ConfigError):
            brought(trainer, f"{text}{option}\n", INFO)


@pytest.mark.parametrize(
    ("trainer", "text"),
    [
        (
            "axolotl",
            "datasets: [{path: c.jsonl, type: alpaca, colour: red, ds_type: json},"
            " {path: b.jsonl}]",
        ),
        ("trl", f"datasets: [{JSON}a.jsonl, colour: red}}, {JSON}b.jsonl}}]"),
        ("datasets", "datasets: [{data_files: a.jsonl, colour: red}, {data_files: b.jsonl}]"),
        ("llamafactory", BOTH),
    ],
)
def test_keys_that_are_not_imported_are_reported(trainer: str, text: str) -> None:
    file = {"file_name": "c.jsonl"}
    notes = brought(trainer, text, {"a": {**file, "colour": 1}, "b": file}).notes
    assert "colour" in notes[0]
    assert "ds_type" not in notes[0]
    assert "colour" in Path("mix.toml").read_text()
