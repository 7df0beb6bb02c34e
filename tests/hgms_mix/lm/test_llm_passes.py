"""Passes of rows of like length: little padding, and the losses of the batch's full width."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.helpers import assert_same

from hgms_core import Key
from hgms_mix.lm import BaseModel, LanguageModel, Lora
from hgms_mix.lm.passes import needed_lengths, passes

pytest.importorskip("transformers", reason="transformers is not installed")


ADAPTER = Lora(rank=2, alpha=4, targets=["c_attn"])


def language_model(adapter: Lora | None, rows: int | None = None) -> LanguageModel:
    config = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 48}
    base = BaseModel(config=config, tokenizer="bytes").load(torch.device("cpu"), torch.float64, 259)
    return LanguageModel.of(base, adapter, length=48, rows=rows)


def batch(
    shape: tuple[int, ...], width: int = 40, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of very different lengths, right-padded; what is scored ends up to three tokens
    before the row.
    """
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, width, shape, generator=draw)
    columns = torch.arange(width)
    tokens = torch.randint(0, 256, (*shape, width), generator=draw).where(
        columns < lengths.unsqueeze(-1), 258
    )
    last = (lengths - torch.randint(0, 3, shape, generator=draw)).unsqueeze(-1)
    return tokens, (columns < last) & (columns >= lengths.unsqueeze(-1) // 2)


@pytest.mark.parametrize(
    ("adapter", "shape", "rows"),
    [(ADAPTER, (7,), 3), (ADAPTER, (2, 7), None), (None, (7,), None)],
    ids=["in parts", "stacked", "all parameters"],
)
def test_losses_and_gradients_are_those_of_the_full_width(
    adapter: Any, shape: tuple[int, ...], rows: int | None
) -> None:
    model = language_model(adapter, rows)
    draw = torch.Generator().manual_seed(1)
    x = {
        name: leaf + 0.1 * torch.randn(*shape[:-1], *leaf.shape, generator=draw, dtype=leaf.dtype)
        for name, leaf in model.start(Key(0), torch.float64).items()
    }
    tokens, mask = batch(shape)
    results = []
    read = [0]
    for start in (0, 10**9):  # passes of few rows; and one of the full width
        model.start_tokens = start
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
        losses, count = model.nll(leaves, tokens, mask)
        weighted = losses.flatten() @ torch.arange(1.0, losses.numel() + 1, dtype=losses.dtype)
        slopes = torch.autograd.grad(weighted, list(leaves.values()))
        results.append((losses.detach(), count, slopes))
        read.append(model.tokens["forward_tokens"])
    assert_same(results[0], results[1], rtol=1e-10, atol=1e-10)
    assert rows is not None or read[1] < 0.75 * (read[2] - read[1])
    full, _ = model.nll(x, tokens, mask, seeds=(0,))
    assert_same(results[0][:2], (full, mask[..., 1:].sum(-1)), rtol=1e-12, atol=1e-12)


def test_what_is_cut_is_the_cheapest_of_all_ways() -> None:
    lengths = torch.tensor([3, 3, 4, 9, 9, 20])

    def price(parts: list[int], start: int) -> int:
        ends = itertools.accumulate(parts)
        return sum(
            start + size * int(lengths[end - 1]) for size, end in zip(parts, ends, strict=True)
        )

    ways = [
        [right - left for left, right in itertools.pairwise([0, *borders, 6])]
        for count in range(6)
        for borders in itertools.combinations(range(1, 6), count)
    ]
    for start, most in itertools.product((0, 1, 5, 12, 100), (None, 2, 4)):
        order, cut = passes(lengths, start, most)
        sizes = [last - first for first, last, _ in cut]
        ends = list(itertools.accumulate(sizes))
        assert order.equal(lengths.argsort(stable=True))
        assert cut == [
            (end - size, end, int(lengths[end - 1])) for size, end in zip(sizes, ends, strict=True)
        ]
        allowed = [way for way in ways if max(way) <= (most or 6)]
        assert sizes in allowed
        assert price(sizes, start) == min(price(way, start) for way in allowed)


def test_only_columns_up_to_the_last_scored_token_are_needed() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
    assert needed_lengths(mask).tolist() == [3, 4, 2]
