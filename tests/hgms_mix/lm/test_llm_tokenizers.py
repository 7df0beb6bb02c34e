"""Tokenizers: bytes, GPT-2's, those with habits of their own, and those that cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import rejects

from hgms_core import ConfigError
from hgms_mix.lm.formats import Message
from hgms_mix.lm.models import BaseModel
from hgms_mix.lm.templates import template_for
from hgms_mix.lm.tokenizers import byte_tokenizer, load_tokenizer
from hgms_mix.lm.tokens import encode

pytest.importorskip("transformers", reason="transformers is not installed")
from tokenizers import Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

BYTES = byte_tokenizer()
PLACE = ("task", "model", "tokenizer")


@given(st.text(max_size=60))
@settings(max_examples=25, deadline=None)
def test_bytes_are_their_own_tokens_and_come_back(text: str) -> None:
    tokens = BYTES(text, split_special_tokens=True)["input_ids"]
    assert (tokens, BYTES.decode(tokens)) == (list(text.encode()), text)


def spaced() -> PreTrainedTokenizerFast:
    """A tokenizer that puts a space before every text it is given, as SentencePiece does."""
    letters = [*"▁abcdefghijklmnopqrstuvwxyzABQRS?<>|/_:.,#\n", "<0x0A>"]
    vocabulary = {"<unk>": 0, **{letter: i for i, letter in enumerate(letters, 1)}}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def test_a_tokenizer_that_adds_spaces_gets_none_at_the_borders() -> None:
    tokenizer = spaced()
    template = template_for("plain", tokenizer)
    texts = (("user", "is it so?"), ("assistant", "it is"), ("user", "sure?"), ("assistant", "yes"))
    pieces = template.pieces([Message(role, text) for role, text in texts])
    ((tokens, learned),) = encode([pieces], tokenizer, template)
    words = tokenizer.convert_ids_to_tokens(tokens)
    assert "".join(words) == "▁is▁it▁so?\nit▁is</s>▁sure?\nyes</s>"
    answers = [word for word, learn in zip(words, learned, strict=True) if learn]
    assert "".join(answers) == "it▁is</s>yes</s>"


def test_code_of_its_own_is_refused_unless_allowed_by_the_file_and_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trust_remote_code = true` of a stranger's configuration: the command has to say so too,
    and nothing was imported.
    """
    ran = tmp_path / "ran"
    files = {
        "config.json": '{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}',
        "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["own.Own", null]}}',
        "own.py": f"open({str(ran)!r}, 'w').close()\nraise ImportError('it was run')\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.delenv("HGMS_TRUST_REMOTE_CODE", raising=False)
    with rejects("cannot-load", *PLACE, of=ConfigError):
        load_tokenizer(str(tmp_path))
    model = BaseModel(path=str(tmp_path), tokenizer="bytes", trust_remote_code=True)
    for load in (model.load_tokenizer, lambda: model.load(torch.device("cpu"))):
        with rejects("untrusted-code", "task", "model", "trust_remote_code", of=ConfigError):
            load()
    assert not ran.exists()
    monkeypatch.setenv("HGMS_TRUST_REMOTE_CODE", "1")
    with rejects("cannot-load", "task", "model", "path", of=ConfigError):
        model.load(torch.device("cpu"))
    assert ran.exists()
