"""Small models with byte tokenizers, and their greedy answers one token at a time."""

from __future__ import annotations

from typing import Any

import torch

from hgms_mix.lm import BaseModel

SMALL = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 512},
    "llama": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
    },
    "qwen2": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "gemma2": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 8,  # shorter than the prompts
    },
}


def small_model(kind: str = "llama", seed: int = 0) -> tuple[Any, Any]:
    # Gemma 2's attention takes its softmax in float32, where a float64 mask is −∞, and a row of
    # padding alone NaN
    dtype = "float32" if kind == "gemma2" else "float64"
    config = {"model_type": kind, **SMALL[kind], "initializer_range": 0.4}
    base = BaseModel(config=config, tokenizer="bytes", seed=seed, dtype=dtype)
    tokenizer = base.load_tokenizer()
    return base.load(torch.device("cpu"), torch.float64, len(tokenizer)), tokenizer


def by_hand(
    model: Any, prompt: list[int], count: int, stops: tuple[int, ...] = (257,)
) -> list[int]:
    """One prompt, no padding, no cache: the most likely next token, again and again."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(
                int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
            )
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]
