"""What is said wrong of models, sources, tokenizers, templates and tables, by code and place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chat_templates import FORGETFUL, TURNS, with_template
from support.helpers import rejects
from support.source_files import source_of

pytest.importorskip("transformers", reason="transformers is not installed")

from support.token_tables import read_examples, table_of

from hgms_mix.lm.formats import Message
from hgms_mix.lm.models import BaseModel
from hgms_mix.lm.sources import Source, check_names
from hgms_mix.lm.templates import template_for
from hgms_mix.lm.tokenizers import byte_tokenizer, ensure_padding, load_tokenizer

GPT2 = {"model_type": "gpt2", "n_layer": 1}
NOWHERE = "/hgms/nowhere"
TOKENIZER = ("task", "model", "tokenizer")
BARE = byte_tokenizer()
BARE.pad_token = BARE.eos_token = None
CHOOSY = (
    "{% for m in messages %}{% if m['content'] == 'Q7' %}{{ raise_exception('no') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)


def source(folder: Path, **fields: Any) -> Source:
    return source_of(folder / "s.jsonl", [(f"Q{i}", f"A{i}") for i in range(20)], **fields)


def pieces(template: str, **texts: str) -> Any:
    """Of a conversation; a role is the first part of a name."""
    messages = [Message(name.partition("_")[0], text) for name, text in texts.items()]
    return template_for("model", with_template(template)).pieces(messages)


Call = Callable[[Path], object]
MODELS: list[tuple[str, tuple[str | int, ...], dict[str, Any]]] = [
    ("missing-option", ("path",), {}),
    ("conflicting-options", ("path",), {"path": "a", "config": GPT2}),
    ("missing-option", ("config", "model_type"), {"config": {"n_layer": 2}, "tokenizer": "bytes"}),
    ("missing-option", ("tokenizer",), {"config": GPT2}),
]
SOURCES: list[tuple[str, str, dict[str, Any]]] = [
    ("unknown-format", "format", {"format": "alpacca"}),
    ("out-of-range", "rows", {"rows": 0}),
    ("out-of-range", "skip", {"skip": -1}),
    ("out-of-range", "max_bad_rows", {"max_bad_rows": -1}),
    ("wrong-length", "path", {"path": ""}),
    # a column for two fields, and names of nothing
    ("wrong-value", "fields", {"fields": {"prompt": "a", "completion": "a"}}),
    ("wrong-value", "fields", {"fields": {"prompt": ""}}),
    ("wrong-value", "fields", {"fields": {"": "a"}}),
]
NAMES = [
    ("duplicate-name", ["clean", "Clean"]),
    ("duplicate-name", ["a", "b", "a"]),
    *(("wrong-value", ["a", name]) for name in (" ", "gsm8k/test", "c:\\test", "two\nlines")),
    ("wrong-length", ["a", "ä" * 100]),
]
REFUSED: list[tuple[str, tuple[str | int, ...], Call]] = [
    *(
        (code, place, lambda _, fields=fields: BaseModel(**fields))
        for code, place, fields in MODELS
    ),
    (
        "missing-file",
        ("task", "model", "path"),
        lambda _: BaseModel(path=NOWHERE, tokenizer="bytes").load(torch.device("cpu")),
    ),
    *(
        (code, (option,), lambda _, fields=fields: Source(**{"path": "a.jsonl", **fields}))
        for code, option, fields in SOURCES
    ),
    *(
        (code, ("sources",), lambda _, names=names: check_names(iter(names), place=("sources",)))
        for code, names in NAMES
    ),
    # sources shorter than asked
    *(
        ("too-few-rows", ("s", option), lambda to, own=own: read_examples("s", source(to, **own)))
        for option, own in (
            ("rows", {"rows": 21}),
            ("rows", {"rows": 10, "skip": 11}),
            ("skip", {"skip": 20}),
            ("rows", {"skip": 30, "rows": 2}),
        )
    ),
    # rows of no known format
    (
        "wrong-format",
        ("s", "path"),
        lambda to: read_examples("s", source_of(to / "s.jsonl", [{"question": "Q", "text": "A"}])),
    ),
    ("missing-file", TOKENIZER, lambda _: load_tokenizer(NOWHERE)),
    ("missing-file", TOKENIZER, lambda to: load_tokenizer(str(to))),
    ("missing-variable", TOKENIZER, lambda _: load_tokenizer("$HGMS_NOT_SET/t")),
    ("missing-token", ("tokenizer",), lambda _: ensure_padding(BARE)),
    ("missing-token", ("template",), lambda _: template_for("plain", BARE)),
    ("missing-template", ("template",), lambda _: template_for("model", byte_tokenizer())),
    ("unknown-choice", ("template",), lambda _: template_for("chatlm", byte_tokenizer())),
    # what a chat template refuses
    (
        "wrong-row",
        ("template",),
        lambda _: pieces(
            FORGETFUL, user="Q", assistant="hm</think>A", user_2="R", assistant_2="hm</think>B"
        ),
    ),
    ("wrong-row", ("template",), lambda _: pieces(TURNS, system="S", user="Q", assistant="A")),
    (
        "wrong-row",
        ("s", "path"),
        lambda to: table_of(source(to), with_template(CHOOSY), template="model"),
    ),
]


@pytest.mark.parametrize(("code", "place", "call"), REFUSED)
def test_what_is_said_wrong_is_refused(
    tmp_path: Path, code: str, place: tuple[str | int, ...], call: Call
) -> None:
    with rejects(code, *place):
        call(tmp_path)
