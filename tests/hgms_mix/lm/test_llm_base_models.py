"""Base models and the modules that adapters are for: what is built, and what is refused."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import F64, rejects
from support.language_models import CPU, LAYERS, VOCABULARY, spec

from hgms_core import ConfigError
from hgms_mix.lm import BaseModel, Lora
from hgms_mix.lm.models import computes_bfloat16
from hgms_mix.lm.store import warn

pytest.importorskip("transformers")
pytest.importorskip("peft")

TARGETS = ("task", "adapter", "targets")


def test_building_a_model_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second = (spec("gpt2").load(CPU, F64, VOCABULARY) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("kind", "targets", "code"),
    [
        ("gpt2", ("q_proj",), "unknown-module"),
        ("llama", ("q_proj", "vproj"), "unknown-module"),
        ("llama", ("q_proj", "lm_head"), "not-supported"),
    ],
)
def test_each_target_has_to_match_a_module(kind: str, targets: tuple[str, ...], code: str) -> None:
    model = spec(kind).load(CPU, F64, VOCABULARY)
    with rejects(code, *TARGETS, of=ConfigError):
        Lora(targets=targets).modules(model)


def test_all_linear_modules_but_the_output_embedding_get_an_adapter() -> None:
    modules = Lora(targets=("all-linear",)).modules(spec("gpt2").load(CPU, F64, VOCABULARY))
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert modules == [f"transformer.h.{layer}.{name}" for layer in range(2) for name in names]


def test_a_model_without_default_targets_lists_its_modules() -> None:
    config = {"model_type": "phi3", "pad_token_id": 0, **LAYERS}
    phi3 = BaseModel(config=config, tokenizer="bytes").load(CPU, F64, VOCABULARY)
    with rejects("missing-option", *TARGETS, of=ConfigError) as caught:
        Lora().modules(phi3)
    assert "down_proj, gate_up_proj, o_proj, qkv_proj" in (caught.value.hint or "")
    assert len(Lora(targets=("all-linear",)).modules(phi3)) == 4 * phi3.config.num_hidden_layers


@pytest.mark.parametrize("instructions", [True, False])
def test_bfloat16_on_a_cpu_without_it_is_warned_of(
    instructions: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: instructions)
    warn.cache_clear()
    spec("gpt2", "bfloat16").load(CPU, F64, VOCABULARY)
    assert ("bfloat16" in caplog.text) is not instructions
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert computes_bfloat16()


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with rejects("missing-file", "task", "model", "path", of=ConfigError):
        BaseModel(path=str(tmp_path / "none"), tokenizer="bytes").load(CPU)


GPT2 = {"model_type": "gpt2", "n_layer": 1}


@pytest.mark.parametrize(
    ("fields", "code", "place"),
    [
        ({}, "missing-option", ("path",)),
        ({"path": "a", "config": GPT2}, "conflicting-options", ("path",)),
        (
            {"config": {"n_layer": 2}, "tokenizer": "bytes"},
            "missing-option",
            ("config", "model_type"),
        ),
        ({"config": GPT2}, "missing-option", ("tokenizer",)),
        *(
            ({"config": {**GPT2, "odd": value}, "tokenizer": "bytes"}, "not-finite", place)
            for value, place in (
                (float("nan"), ("config", "odd")),
                ([1.0, float("inf")], ("config", "odd", 1)),
                ({"factor": float("-inf")}, ("config", "odd", "factor")),
            )
        ),
    ],
)
def test_a_model_is_named_one_way_with_numbers_that_a_model_can_have(
    fields: dict[str, Any], code: str, place: tuple[str | int, ...]
) -> None:
    with rejects(code, *place, of=ConfigError):
        BaseModel(**fields)
