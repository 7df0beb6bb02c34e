"""A base in bfloat16: finite differences reach as far as its rounding asks, by default."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.helpers import F64
from support.language_models import noisy
from torch import Tensor

from hgms_core import Key, Tree, cross_product, upper_gradients

pytest.importorskip("transformers")

from hgms_mix.lm import BaseModel, LanguageModel, Lora

SIZE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "initializer_range": 0.1}
FLOAT32_LENGTH = torch.finfo(torch.float32).eps ** (1 / 3)
"""What τ/(1 + ‖x‖) was when it came from the type of x, whatever the base's."""

BFLOAT16_LENGTH = (3 * torch.finfo(torch.bfloat16).eps) ** (1 / 3)
"""What τ would be whatever ‖x‖: right for large adapters, and for these beyond what a quadratic
describes.
"""


def languages() -> tuple[LanguageModel, LanguageModel, Tree]:
    """A model in bfloat16, the same numbers in float64, and an adapter that is no fresh one."""
    built = BaseModel(config={"model_type": "gpt2", **SIZE}, tokenizer="bytes", dtype="bfloat16")
    coarse, fine = (
        LanguageModel.of(
            built.load(torch.device("cpu"), vocabulary=64).to(dtype),
            Lora(rank=2, targets=("c_attn",)),
            length=24,
        )
        for dtype in (torch.bfloat16, F64)
    )
    return coarse, fine, noisy(coarse.start(Key(0), torch.float32), size=0.02)


def mean(model: LanguageModel, x: Tree, tokens: Tensor) -> Tensor:
    losses, count = model.nll(x, tokens, torch.ones_like(tokens, dtype=torch.bool))
    return (losses / count).mean()


def mixture(model: LanguageModel, sources: Tensor) -> Callable[[Tree, Tree], Tensor]:
    return lambda theta, x: (
        theta["logits"].softmax(0) @ torch.stack([mean(model, x, tokens) for tokens in sources])
    )


def test_the_mixed_derivative_of_a_base_in_bfloat16() -> None:
    """Against the exact one of the same weights in float64: the default is near it, the length that
    float32 would have is rounding noise, and one that does not look at ‖x‖ is too long."""
    coarse, fine, x = languages()
    draw = torch.Generator().manual_seed(1)
    wide = {name: leaf.double() for name, leaf in x.items()}
    theta = {"logits": torch.zeros(4, dtype=F64)}
    size = float(torch.cat([leaf.flatten() for leaf in x.values()]).norm())
    errors = []
    for _ in range(2):
        sources = torch.randint(0, 64, (4, 4, 24), generator=draw)
        above = torch.randint(0, 64, (4, 24), generator=draw)
        _, _, v = upper_gradients(lambda _, p, above=above: mean(fine, p, above), theta, wide)
        exact = cross_product(mixture(fine, sources), theta, wide, v, "jvp")["logits"]
        narrow = {name: leaf.float() for name, leaf in v.items()}
        point = (mixture(coarse, sources), {"logits": torch.zeros(4)}, x, narrow, "difference")
        values = [
            cross_product(*point, tau, coarse.precision)["logits"]
            for tau in (None, FLOAT32_LENGTH * (1 + size), BFLOAT16_LENGTH)
        ]
        errors.append([float((value - exact).norm() / exact.norm()) for value in values])
    default, *others = torch.tensor(errors).mean(0).tolist()
    assert default < 0.1, errors
    assert min(others) > 1.5 * default, errors
