"""The peak of a step in bfloat16 with fused attention, told beforehand, within 15 % of what the
device's allocator says.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from hgms_core import Key, gradient, groups, repeat

pytest.importorskip("transformers", reason="the extra llm is not installed")
pytest.importorskip("peft", reason="the extra llm is not installed")

from hgms_mix.lm import BaseModel, LanguageModel, Lora
from hgms_mix.lm.losses import Rows, UpperLoss
from hgms_mix.lm.memory import peak_bytes, step_memory

pytestmark = pytest.mark.nightly

CANDIDATES = 4
# Of a GPU, and of a CPU on which these tests are only tried: vocabulary, rows, length, width.
SIZES = {"cuda": (32_000, 8, 257, 768), "cpu": (1_000, 2, 65, 256)}


def config(kind: str, width: int) -> dict[str, Any]:
    heads = width // 64
    if kind == "gpt2":
        return {
            "model_type": "gpt2",
            "n_layer": 4,
            "n_head": heads,
            "n_embd": width,
            "n_positions": 512,
        }
    return {
        "model_type": "qwen2",
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "max_position_embeddings": 512,
    }


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("chunk", [1, None])
@pytest.mark.usefixtures("real")
def test_the_peak_is_predicted(
    kind: str, checkpointing: bool, chunk: int | None, device: torch.device
) -> None:
    vocabulary, batch, length, width = SIZES[device.type]
    gc.collect()
    others = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    base = BaseModel(config=config(kind, width), tokenizer="bytes", dtype="bfloat16").load(
        device, torch.float32, vocabulary
    )
    model = LanguageModel.of(base, Lora(rank=16), length=length, checkpointing=checkpointing)
    x = model.start(Key(0), torch.float32)
    told = step_memory(model, x, candidates=CANDIDATES, batch=batch, chunk=chunk, length=length)
    stacked = repeat(x, CANDIDATES)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (CANDIDATES, batch, length), generator=draw).to(device)
    rows = {"tokens": tokens, "mask": torch.ones_like(tokens, dtype=torch.bool)}
    loss = UpperLoss(Rows(model, "example", torch.ones(0)))

    def step() -> None:
        for group in groups(loss, stacked, own_batch=True, mode="stacked", chunk=chunk):
            gradient(
                group.loss, {}, group.x, {name: leaf[group.part] for name, leaf in rows.items()}
            )

    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device)
        step()  # libraries take their working memory, and keep it: no part of a step
        others += torch.cuda.memory_allocated(device) - held
    measured = (
        peak_bytes(
            step, device, [*base.parameters(), *base.buffers(), *x.values(), *stacked.values()]
        )
        - others
    )
    off = told.peak / measured - 1
    said = (
        f"{told.peak / 2**20:.0f} MiB told ({told}), {measured / 2**20:.0f} MiB measured: "
        f"{off:+.1%}"
    )
    assert abs(off) < 0.15, said
