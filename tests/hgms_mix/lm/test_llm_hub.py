"""Names on the Hub, which is never asked here, and folders that are not what they seem."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.helpers import F64, rejects
from support.language_models import CPU, VOCABULARY, spec

from hgms_core import ConfigError
from hgms_core.errors import MissingExtra, OutOfMemory
from hgms_mix.lm import BaseModel, models
from hgms_mix.lm.hub import resolve_name
from hgms_mix.lm.tokenizers import byte_tokenizer, load_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

MODEL = ("task", "model")
TOKENIZER = (*MODEL, "tokenizer")
PLACE = ("here",)


def test_a_folder_that_is_missing_is_named_with_the_nearest_and_a_name_is_left_to_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    assert resolve_name("owner/name", "model", PLACE) == "owner/name"
    assert resolve_name("my-model", "model", PLACE).endswith("my-model")
    with rejects("missing-file", *PLACE, of=ConfigError) as caught:
        resolve_name("./my-modle", "model", PLACE)
    assert caught.value.did_you_mean == ("my-model",)


# -- tokenizers
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocabulary", "merges", "code"),
    [
        (None, "", "missing-file"),
        ('{"a": 0}', None, "missing-file"),
        ("{", "", "cannot-load"),
        ('{"a": 0}', b"\xff", "cannot-load"),
        ('{"a": 0, "b": 1}', "a c\n", "cannot-load"),
    ],
)
def test_two_files_of_gpt2_that_do_not_fit_are_refused(
    tmp_path: Path, vocabulary: str | None, merges: str | bytes | None, code: str
) -> None:
    for name, text in (("encoder.json", vocabulary), ("vocab.bpe", merges)):
        if text is not None:
            (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with rejects(code, *TOKENIZER, of=ConfigError):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_pads_with_its_end_token_where_it_has_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).pad_token == "<eos>"
    (tmp_path / "saved" / "tokenizer.json").write_text("{")
    with rejects("cannot-load", *TOKENIZER, of=ConfigError):
        load_tokenizer(str(tmp_path / "saved"))


# -- models
# --------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_a_model_is_read_with_the_attention_that_is_asked_for(tmp_path: Path) -> None:
    built: Any = spec("gpt2").load(CPU, torch.float32, VOCABULARY)
    built.save_pretrained(tmp_path)
    read = BaseModel(path=str(tmp_path), tokenizer="bytes", attention="eager")
    model: Any = read.load(CPU)
    assert model.config._attn_implementation == "eager"
    assert all(map(torch.equal, model.parameters(), built.parameters()))


def load(base: BaseModel, device: str = "cpu") -> Callable[[], object]:
    return lambda: base.load(torch.device(device), F64, VOCABULARY)


@pytest.mark.parametrize(
    ("call", "error", "code", "place", "of"),
    [
        (load(spec("gpt2")), torch.OutOfMemoryError("CUDA"), "out-of-memory", (), OutOfMemory),
        (load(spec("gpt2")), ValueError("odd"), "cannot-load", ("config",), ConfigError),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[], object],
    error: Exception,
    code: str,
    place: tuple[str, ...],
    of: Any,
) -> None:
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", Mock(side_effect=error))
    with rejects(code, *MODEL, *place, of=of):
        call()


def test_a_model_with_its_own_code_requires_consent(tmp_path: Path) -> None:
    config = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with rejects("cannot-load", *MODEL, "path", of=ConfigError):
        BaseModel(path=str(tmp_path), tokenizer="bytes").load(CPU)


def test_a_quantised_base_needs_a_gpu_and_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec("gpt2").load(CPU, torch.float32, VOCABULARY).save_pretrained(tmp_path)  # type: ignore[operator]
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    base = BaseModel(path=str(tmp_path), tokenizer="bytes", quantize="4bit", dtype="float32")
    with rejects("not-supported", *MODEL, "quantize", of=ConfigError):
        load(base)()
    with rejects("missing-package", *MODEL, "quantize", of=MissingExtra):
        load(base, "cuda")()


def test_one_rank_alone_holds_no_part_and_contents_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rejects("not-supported", *MODEL, "shard", of=ConfigError):
        spec("gpt2").load(CPU, sharded=True)
    (tmp_path / "config.json").write_text("{}")
    base = BaseModel(path=str(tmp_path), tokenizer="bytes")
    monkeypatch.setattr(models, "file_digest", Mock(side_effect=PermissionError(13, "denied")))
    with rejects("unreadable-file", *MODEL, "path", of=ConfigError):
        base.digest()
