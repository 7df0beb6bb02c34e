"""Base models and the modules that adapters are for: what is built, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.helpers import F64, rejects
from support.language_models import CPU, LAYERS, VOCABULARY, spec

from hgms_core import ConfigError
from hgms_mix.lm import BaseModel, Lora

pytest.importorskip("transformers")
pytest.importorskip("peft")

TARGETS = ("task", "adapter", "targets")


def loaded(kind: str) -> Any:
    config = {"model_type": kind, "pad_token_id": 0, **LAYERS}
    model = spec(kind) if kind != "phi3" else BaseModel(config=config, tokenizer="bytes")
    return model.load(CPU, F64, VOCABULARY)


@pytest.mark.parametrize(
    ("kind", "targets", "code"),
    [
        ("llama", ("q_proj", "vproj"), "unknown-module"),
        ("llama", ("q_proj", "lm_head"), "not-supported"),
        ("phi3", None, "missing-option"),
    ],
)
def test_targets_are_modules_of_the_model(
    kind: str, targets: tuple[str, ...] | None, code: str
) -> None:
    with rejects(code, *TARGETS, of=ConfigError) as caught:
        Lora(targets=targets).modules(loaded(kind))
    assert ("qkv_proj" in str(caught.value.hint)) == (kind == "phi3"), "its modules are listed"


def test_all_linear_modules_but_the_output_embedding_get_an_adapter() -> None:
    gpt2, phi3 = (Lora(targets=("all-linear",)).modules(loaded(kind)) for kind in ("gpt2", "phi3"))
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert gpt2 == [f"transformer.h.{layer}.{name}" for layer in range(2) for name in names]
    assert len(phi3) == 4 * 2


def test_the_contents_of_a_folder_are_in_the_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    model = BaseModel(path=str(tmp_path), tokenizer="bytes")
    digests = []
    for contents in (b"0", b"0", b"1"):
        weights.write_bytes(contents)
        digests.append(model.digest())
    assert None is not digests[0] == digests[1] != digests[2]
