"""A base whose parameters are split over two ranks (threads here; tests/ranks has processes):
numbers of the whole one.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.helpers import F64, assert_same, rejects
from support.language_models import gradients, noisy, rows
from support.threads import on_ranks

pytest.importorskip("transformers")

import transformers

from hgms.distributed import LAUNCHED, join, launcher_rank
from hgms_core import ConfigError, Key
from hgms_mix.lm import LanguageModel, Lora
from hgms_mix.lm.sharding import FirstDerivative, shard_model

pytestmark = pytest.mark.extended

CPU = torch.device("cpu")
LAYERS, WIDTH, HIDDEN, WORDS = 2, 32, 64, 64


@pytest.fixture(scope="module")
def whole() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).to(F64).requires_grad_(False).eval()


def joined() -> int:
    rank, count = launcher_rank() or (0, 1)
    join(rank, count, CPU, LAUNCHED)
    return rank


def in_parts(model: Any) -> Any:
    """Rank 0 alone has the numbers."""

    def outline() -> Any:
        return copy.deepcopy(model).to("meta")

    return shard_model(lambda: copy.deepcopy(model), outline, CPU)


def language(model: Any, **options: Any) -> LanguageModel:
    return LanguageModel.of(model, Lora(rank=2, alpha=4.0), length=24, **options)


@pytest.mark.parametrize("options", [{}, {"rows": 2, "checkpointing": True}])
def test_losses_and_gradients_are_those_of_the_whole_base(
    whole: Any, options: dict[str, Any]
) -> None:
    """Each rank on rows of its own."""
    x = noisy(language(whole).start(Key(0), F64), 1)

    def rank() -> Any:
        batch = rows(6, seed=joined())
        parts = language(in_parts(whole), **options)
        found = gradients(parts, x, *batch)
        assert any(hasattr(leaf, "to_local") for leaf in parts.model.parameters())
        return found

    for number, found in enumerate(on_ranks(rank, rank)):
        expected = gradients(language(copy.deepcopy(whole)), x, *rows(6, seed=number))
        assert_same(found, expected, rtol=1e-10, atol=1e-12)


def test_other_parameters_than_those_of_rank_0_are_refused(whole: Any) -> None:
    def rank() -> None:
        number = joined()
        other = copy.deepcopy(whole)
        if number == 1:
            other.model.norm = torch.nn.Linear(2, 2, dtype=F64)
        in_parts(other)

    with rejects("other-settings", "task", "model", of=ConfigError):
        on_ranks(rank, rank)


def test_an_outline_of_another_type_takes_the_type_of_rank_0(whole: Any) -> None:
    def rank() -> set[torch.dtype]:
        model = whole if joined() == 0 else copy.deepcopy(whole).float()
        return {leaf.dtype for leaf in in_parts(model).parameters()}

    assert on_ranks(rank, rank) == [{F64}, {F64}]


def test_a_loss_of_parts_has_a_first_derivative_alone() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    (slope,) = torch.autograd.grad(FirstDerivative.apply(x**2), x)
    assert float(slope) == 6.0
    with rejects("no-second-derivative", "task", "model", "shard", of=ConfigError):
        torch.autograd.grad(FirstDerivative.apply(x**2), x, create_graph=True)
