"""The language model as a pure function: stacked adapters, checkpointing, completion-only
losses, on four architectures.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.helpers import F64, assert_same
from support.language_models import (
    CPU,
    KINDS,
    LAYERS,
    VOCABULARY,
    by_hand,
    gradients,
    noisy,
    rows,
    spec,
)

from hgms_core import Key, Tree, stack
from hgms_core.hypergrad import twice_differentiable_attention
from hgms_mix.lm import BaseModel, Lora
from hgms_mix.lm.language import LanguageModel
from hgms_mix.lm.lora import _down, _halves

pytest.importorskip("transformers")
pytest.importorskip("peft")

# Llama, Qwen2 and Gemma2 normalise in float32 whatever their weights are in.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
EXACT = {"rtol": 1e-7, "atol": 1e-7}
HEADS = "hgms_mix.lm.language.LOGITS"
every_kind = pytest.mark.parametrize("kind", KINDS)


def base(kind: str, dtype: torch.dtype = F64) -> Any:
    return spec(kind).load(CPU, dtype, VOCABULARY)


def language(
    kind: str, adapter: Lora | None = Lora(rank=3, alpha=6.0), **options: Any
) -> LanguageModel:
    return LanguageModel.of(base(kind), adapter, length=24, **options)


def moved(model: LanguageModel, dtype: torch.dtype = F64) -> Tree:
    return noisy(model.start(Key(0), dtype), 1)


@every_kind
def test_losses_are_of_the_completions_alone_and_an_adapter_is_what_peft_makes_of_it(
    kind: str,
) -> None:
    import peft

    adapter = Lora(rank=3, alpha=6.0)
    model = language(kind, adapter)
    raw = base(kind)
    batch = rows(5)
    x = moved(model)
    losses, count = model.nll(model.start(Key(0), F64), *batch)
    assert (count.tolist(), model.plain_head) == (batch[1].sum(1).tolist(), True)
    with torch.no_grad():
        assert_same(losses, by_hand(raw, *batch), **EXACT)  # a fresh one changes nothing
        theirs = peft.get_peft_model(raw, adapter.peft_config(raw)).to(F64).eval()
        prefixed = {f"base_model.model.{name}": leaf for name, leaf in x.items()}
        assert not peft.set_peft_model_state_dict(theirs, prefixed).unexpected_keys
        assert_same(model.nll(x, *batch)[0], by_hand(theirs, *batch), **EXACT)


@every_kind
def test_padding_changes_no_loss(kind: str) -> None:
    model = LanguageModel.of(base(kind, torch.float32), Lora(rank=3), length=24)
    x = moved(model, torch.float32)
    tokens, mask = rows(3)
    pad = torch.full((3, 4), 7)
    padded = [torch.cat(pair, 1) for pair in ((tokens, pad), (mask, pad > 99))]
    assert_same(model.nll(x, *padded)[0], model.nll(x, tokens, mask)[0], **CLOSE)


@every_kind
@pytest.mark.parametrize("own", [True, False])
def test_stacked_branches_equal_separate_ones(kind: str, own: bool) -> None:
    model = language(kind, Lora(rank=3, alpha=6.0, dropout=0.3))
    members = [noisy(model.start(Key(0), F64), seed) for seed in range(3)]
    batches = [rows(4, seed=seed if own else 0) for seed in range(3)]
    seeds = (5, 6, 7) if own else (5, 5, 5)
    tokens, mask = (torch.stack(entry) for entry in zip(*batches, strict=True))
    losses, slopes = gradients(model, stack(members), tokens, mask, seeds)
    for i, member in enumerate(members):
        alone = gradients(model, member, *batches[i], (seeds[i],))
        assert_same((losses[i], [slope[i] for slope in slopes]), alone, **EXACT)


@every_kind
@pytest.mark.parametrize(
    ("adapter", "how"),
    [
        (Lora(rank=2, dropout=0.2), {"checkpointing": True}),
        (Lora(rank=2, dropout=0.2), {"checkpointing": True, "rows": 3}),
        (None, {"rows": 2}),
    ],
    ids=str,
)
def test_saving_memory_changes_no_gradient(
    kind: str, adapter: Lora | None, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does it to compute large heads in pieces, of which Gemma's caps its logits."""
    plain = language(kind, adapter)
    saving = language(kind, adapter, **how)
    x = moved(plain)
    # Masks are drawn for each pass, so with dropout passes have to be the same.
    seeds = (3,) if adapter is not None and "rows" not in how else None
    expected = gradients(plain, x, *rows(5), seeds)
    assert_same(gradients(saving, x, *rows(5), seeds), expected, **CLOSE)
    monkeypatch.setattr(HEADS, 7 * VOCABULARY)
    assert_same(gradients(saving, x, *rows(5), seeds), expected, **CLOSE)
    with torch.no_grad():
        assert_same(saving.nll(x, *rows(5), seeds)[0], expected[0], **CLOSE)


def test_dropout_depends_on_the_seed_and_not_on_the_padding_and_is_unbiased() -> None:
    """The mean over masks of what an adapter adds is what it adds without dropout: first order
    in the adapter.
    """
    model = language("gpt2", Lora(rank=2, dropout=0.5))
    x = {name: leaf * (1e-3 if "lora_B" in name else 1) for name, leaf in moved(model).items()}
    batch = rows(3)
    longer = [torch.cat([entry, entry[:, :4] & False], 1) for entry in batch]
    still = {name: leaf * ("lora_A" in name) for name, leaf in x.items()}
    with torch.no_grad():
        without = model.nll(still, *batch)[0]
        many = [entry.expand(300, -1, -1) for entry in batch]
        draws = model.nll(stack(300 * [x]), *many, tuple(range(300)))[0]
        exact = model.nll(x, *batch)[0] - without
        assert_same(model.nll(x, *longer, (1,))[0], draws[1], **EXACT)
    assert not torch.allclose(draws[1], draws[2], rtol=1e-7)
    assert (draws.mean(0) - without - exact).norm() < 0.2 * exact.norm()


def hessian_product(model: LanguageModel, x: Tree, batch: Any) -> torch.Tensor:
    """Of the mean loss, along a fixed direction."""
    draw = torch.Generator().manual_seed(9)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
    along = [
        torch.randn(leaf.shape, generator=draw, dtype=F64).to(leaf.dtype) for leaf in x.values()
    ]
    with twice_differentiable_attention():
        loss = model.nll(leaves, *batch)[0].mean()
        slopes = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        products = torch.autograd.grad(slopes, list(leaves.values()), along)
    return torch.cat([product.flatten().double() for product in products])


def test_large_heads_have_a_second_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    model = language("gpt2")
    x = moved(model)
    expected = hessian_product(model, x, rows(5))
    monkeypatch.setattr(HEADS, 7 * VOCABULARY)
    assert_same(hessian_product(model, x, rows(5)), expected, **EXACT)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_adapters_on_a_base_in_bfloat16_have_right_derivatives(dropout: float) -> None:
    """Against the same weights in float64; adapters and gradients stay in float32."""
    wide = {**LAYERS, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    built = spec("qwen2", "bfloat16", **wide)
    targets = ("q_proj", "v_proj", "o_proj", "down_proj")
    adapter = Lora(rank=3, alpha=6.0, targets=targets, dropout=dropout)
    half, exact = (
        LanguageModel.of(built.load(CPU, torch.float32, VOCABULARY).to(dtype), adapter, length=24)
        for dtype in (torch.bfloat16, F64)
    )
    x = moved(half, torch.float32)
    double = {name: leaf.double() for name, leaf in x.items()}

    def apart(result: torch.Tensor, wanted: torch.Tensor) -> float:
        return float((result.double() - wanted).norm() / wanted.norm())

    batch = rows(16, 24)
    seeds = (3,) if dropout else None
    losses, slopes = gradients(half, x, *batch, seeds)
    wanted, true = gradients(exact, double, *batch, seeds)
    assert {losses.dtype, *(slope.dtype for slope in slopes)} == {torch.float32}
    assert apart(losses, wanted) < 1e-2
    assert max(map(apart, slopes, true)) < 0.05
    products = [hessian_product(*point, batch) for point in ((half, x), (exact, double))]
    assert apart(*products) < 0.1


def test_a_small_step_of_an_adapter_is_not_lost_on_a_base_in_bfloat16() -> None:
    """1e-3 of a weight's rounding error in bfloat16, seen in the mean over many tokens as in
    float64.
    """
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(4096, 32, generator=draw).to(torch.bfloat16)
    weight = torch.rand(4, 32, generator=draw) - 0.5
    step = 1e-5 * torch.sign(torch.randn(4, 32, generator=draw))
    assert float((weight.bfloat16() == (weight + step).bfloat16()).float().mean()) > 0.9
    before, after = (
        sum(entry.double() for entry in _halves(entry)) for entry in (weight, weight + step)
    )
    assert_same(after - before, step.double(), atol=4e-6)
    wide = _down(hidden, torch.cat([weight, weight + 100 * step]), 1.0).double()
    expected = hidden.double() @ step.double().T
    moved = ((wide[:, 4:] - wide[:, :4]) * expected).sum()
    assert float(moved / (100 * expected.square().sum())) == pytest.approx(1, abs=0.1)


def test_tokens_are_counted_forward_and_backward_also_under_vmap() -> None:
    model = language("gpt2", None)
    x = model.start(Key(0), F64)
    model.nll(x, *rows(4, 10))
    gradients(model, x, *rows(2, 10))
    assert model.tokens == {"forward_tokens": 60, "backward_tokens": 20}
    stacked = {name: leaf.requires_grad_() for name, leaf in stack(3 * [x]).items()}
    batch = rows(2, 10)
    torch.func.vmap(lambda member: model.nll(member, *batch)[0])(stacked)
    assert model.tokens == {"forward_tokens": 120, "backward_tokens": 80}


@pytest.mark.extended
@pytest.mark.parametrize("adapter", [Lora(rank=3, targets=("all-linear",)), None])
def test_a_head_with_a_scale_of_its_own_is_called_whole(adapter: Lora | None) -> None:
    """Granite divides its logits: losses are the model's own."""
    config = {"model_type": "granite", "logits_scaling": 4.0, **LAYERS}
    raw: Any = BaseModel(config=config, tokenizer="bytes").load(CPU, F64, VOCABULARY)
    model = LanguageModel.of(raw, adapter, length=24)
    assert not model.plain_head
    tokens, mask = rows(4)
    x = model.start(Key(0), F64)
    with torch.no_grad():
        assert_same(model.nll(x, tokens, mask)[0], by_hand(raw, tokens, mask), **EXACT)
