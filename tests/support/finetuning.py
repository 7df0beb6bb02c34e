"""A small GPT-2, rows of tokens and what a fine-tuning wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

Rows = list[tuple[torch.Tensor, torch.Tensor]]


class PowerCut(RuntimeError):
    """Ends a training in the middle of it."""


def cut_at(step: int) -> Any:
    """What a training is watched by, and ended after that step."""

    def watch(now: int, steps: int, loss: float) -> None:
        if now == step:
            raise PowerCut

    return watch


def gpt(seed: int = 0, dropout: float = 0.0, **changes: Any) -> Any:
    import transformers

    size = {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = transformers.GPT2Config(**{**size, **ends, **drop, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.GPT2LMHeadModel(config)


def random_rows(count: int, words: tuple[int, int] = (1, 40), whole: bool = False) -> Rows:
    """Rows of 4 to 11 tokens; ``whole``: all of a row is learned, as in the format ``text``."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(count):
        length = int(torch.randint(4, 12, (), generator=generator))
        prompt = 0 if whole else int(torch.randint(1, length - 1, (), generator=generator))
        tokens = torch.randint(*words, (length,), generator=generator, dtype=torch.int32)
        rows.append((tokens, torch.arange(length) >= prompt))
    return rows


def lora(dropout: float = 0.0) -> Any:
    import peft

    return peft.LoraConfig(
        r=2, lora_alpha=4, lora_dropout=dropout, target_modules=["c_attn"], fan_in_fan_out=True
    )


def logged(folder: Path) -> list[dict[str, Any]]:
    """The losses of the optimiser's steps."""
    return [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    """Those of the tuned adapter or model."""
    from safetensors.torch import load_file

    (path,) = folder.glob("*/*.safetensors")
    return load_file(path)


def assert_ended_alike(one: Path, other: Path) -> None:
    """The same parameters, bit for bit, and the same losses."""
    ours, theirs = parameters(one), parameters(other)
    assert set(ours) == set(theirs)
    assert all(leaf.equal(theirs[name]) for name, leaf in ours.items())
    assert logged(one) == logged(other)
