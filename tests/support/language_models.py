"""Tiny language models of four kinds, rows for them, and losses and derivatives by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch.nn import functional

from hgms_core import Problem, Tree
from hgms_mix.lm import BaseModel, Lora, Source, SourceMixture
from support.helpers import F64
from support.source_files import source_of

EXTENDED = pytest.mark.extended
CPU = torch.device("cpu")
VOCABULARY = 60
LAYERS = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 64},
    "llama": LAYERS,
    "qwen2": LAYERS,
    "gemma2": {**LAYERS, "head_dim": 8},
}

KINDS = ["gpt2", "gemma2", *(pytest.param(kind, marks=EXTENDED) for kind in ("llama", "qwen2"))]
"""For tests of every kind: that of weights in float64 throughout, and the one with most parts."""


def spec(kind: str, dtype: Any = "auto", **config: Any) -> BaseModel:
    return BaseModel(
        config={"model_type": kind, **SMALL[kind], **config}, tokenizer="bytes", dtype=dtype
    )


def noisy(x: Tree, seed: int = 0, size: float = 0.1) -> Tree:
    """A point where nothing vanishes (a fresh adapter has B = 0)."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: leaf + size * torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype)
        for name, leaf in x.items()
    }


def rows(count: int, length: int = 11, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens, and which of them are learned."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (count, length), generator=draw)
    mask = torch.zeros(count, length, dtype=torch.bool)
    for row in range(count):
        mask[row, 3 + row % 3 : length - row % 4] = True
    return tokens, mask


def by_hand(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """Σ −log p(token | before) over marked tokens, one row after the other, unpadded."""
    result = []
    for row, marked in zip(tokens, mask, strict=True):
        end = int(marked.nonzero().max()) + 1
        logs = functional.log_softmax(model(input_ids=row[None, :end]).logits[0], -1)
        result.append(-sum(logs[t - 1, row[t]] for t in range(1, end) if marked[t]))
    return torch.stack(result)


def gradients(model: Any, x: Tree, *args: Any) -> tuple[Tensor, list[Tensor]]:
    """The losses of all rows, and ∇ of their sum."""
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
    losses = model.nll(leaves, *args)[0]
    return losses.detach(), list(torch.autograd.grad(losses.sum(), list(leaves.values())))


# -- a task
# --------------------------------------------------------------------------------------------------

TEXTS: dict[str, Sequence[tuple[str, str]]] = {
    "sums": [(f"{a} plus {b}", str(a + b)) for a in range(1, 7) for b in range(2, 6)],
    "dots": [(f"{a} plus {b}", ".") for a in range(3, 8) for b in range(7, 9)],
    "words": [
        (f"say {word} twice", f"{word} {word}")
        for word in ("yes", "no", "never", "maybe now", "so")
    ],
}


def text_files(folder: Path) -> dict[str, Source]:
    return {name: source_of(folder / f"{name}.jsonl", rows) for name, rows in TEXTS.items()}


def task_of(files: dict[str, Source], kind: str = "gpt2", **fields: Any) -> SourceMixture:
    options: dict[str, Any] = {
        "sources": {**files, "sums": evolve(files["sums"], rows=16)},
        "validation": {"sums": evolve(files["sums"], skip=16)},
        "model": spec(kind),
        "adapter": Lora(rank=2, alpha=4.0, dropout=0.25),
        "template": "plain",
        "max_length": 48,
        "validation_split": (1, 1, 1),
        **fields,
    }
    return SourceMixture(**options)


def problem_of(files: dict[str, Source], kind: str = "gpt2", **fields: Any) -> Problem:
    """In float64, away from where it starts."""
    problem = task_of(files, kind, **fields).problem(0, CPU, F64)
    theta0 = {"logits": torch.tensor([0.3, -0.2, 0.1], dtype=F64)}
    return evolve(problem, x0=noisy(problem.x0, size=0.2), theta0=theta0)
