"""The language model as a pure function: stacked adapters, checkpointing, completion-only
losses, on four architectures.
"""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch
from support.helpers import rejects
from torch.nn import functional

from hgms_core import ConfigError, Key, Tree, stack, twice_differentiable_attention

pytest.importorskip("transformers")

from hgms_mix.lm import BaseModel, Lora
from hgms_mix.lm.language import LanguageModel
from hgms_mix.lm.lora import _down, _halves
from hgms_mix.lm.models import computes_bfloat16
from hgms_mix.lm.store import warn

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
F64 = torch.float64
CPU = torch.device("cpu")


# Llama, Qwen2 and Gemma2 normalise in float32 whatever their weights are in.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def base(kind: str, dtype: torch.dtype = F64) -> Any:
    built = BaseModel(config={"model_type": kind, **SMALL[kind]}, tokenizer="bytes")
    return built.load(CPU, dtype, VOCABULARY)


def language(
    kind: str, adapter: Lora | None = Lora(rank=3, alpha=6.0), **options: Any
) -> LanguageModel:
    if adapter is not None and adapter.targets is None:
        pytest.importorskip("peft")
    return LanguageModel.of(base(kind), adapter, length=24, **options)


def noisy(x: Tree, seed: int) -> Tree:
    draw = torch.Generator().manual_seed(seed)
    return {
        name: leaf + 0.1 * torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype)
        for name, leaf in x.items()
    }


def rows(count: int, length: int = 11, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (count, length), generator=draw)
    mask = torch.zeros(count, length, dtype=torch.bool)
    for row in range(count):
        mask[row, 3 + row % 3 : length - row % 4] = True
    return tokens, mask


def by_hand(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Σ −log p(token | before) over marked tokens, one row after the other, unpadded."""
    result = []
    for row, marked in zip(tokens, mask, strict=True):
        end = int(marked.nonzero().max()) + 1
        logits = model(input_ids=row[None, :end]).logits[0]
        logs = functional.log_softmax(logits, -1)
        result.append(-sum(logs[t - 1, row[t]] for t in range(1, end) if marked[t]))
    return torch.stack(result)


@pytest.mark.parametrize("kind", SMALL)
def test_a_fresh_adapter_changes_nothing_and_only_completions_are_scored(kind: str) -> None:
    model = language(kind)
    tokens, mask = rows(5)
    x = model.start(Key(0), F64)
    result, count = model.nll(x, tokens, mask)
    with torch.no_grad():
        wanted = by_hand(base(kind), tokens, mask)
    torch.testing.assert_close(result, wanted)
    assert count.tolist() == mask.sum(1).tolist()
    assert model.plain_head


@pytest.mark.parametrize("kind", SMALL)
def test_an_adapter_is_what_peft_makes_of_it(kind: str) -> None:
    peft = pytest.importorskip("peft")
    spec = Lora(rank=3, alpha=6.0)
    model = language(kind, spec)
    x = noisy(model.start(Key(0), F64), 1)
    tokens, mask = rows(4)
    raw = base(kind)
    theirs = peft.get_peft_model(raw, spec.peft_config(raw)).to(F64)
    prefixed = {f"base_model.model.{name}": leaf for name, leaf in x.items()}
    report = peft.set_peft_model_state_dict(theirs, prefixed)
    assert not report.unexpected_keys
    theirs.eval()
    with torch.no_grad():
        torch.testing.assert_close(model.nll(x, tokens, mask)[0], by_hand(theirs, tokens, mask))


@pytest.mark.parametrize("kind", SMALL)
def test_padding_on_the_left_gives_the_same(kind: str) -> None:
    # In float64 the masks of eager attention overflow where it takes its softmax in float32.
    model = LanguageModel.of(base(kind, torch.float32), Lora(rank=3), length=24)
    x = noisy(model.start(Key(0), torch.float32), 1)
    tokens, mask = rows(3)
    attention = torch.ones_like(mask)
    pad = torch.full((3, 4), 7)
    left = [
        torch.cat([before, entry], 1)
        for before, entry in ((pad, tokens), (pad > 99, mask), (pad > 99, attention))
    ]
    right = [torch.cat([entry, after], 1) for entry, after in ((tokens, pad), (mask, pad > 99))]
    expected = model.nll(x, tokens, mask)[0]
    torch.testing.assert_close(
        model.nll(x, left[0], left[1], attention=left[2])[0], expected, **CLOSE
    )
    torch.testing.assert_close(model.nll(x, *right)[0], expected, **CLOSE)


def gradients(model: LanguageModel, x: Tree, *args: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
    result = model.nll(leaves, *args)[0]
    return result.detach(), list(torch.autograd.grad(result.sum(), list(leaves.values())))


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("own", [True, False])
def test_stacked_branches_equal_separate_ones(kind: str, own: bool) -> None:
    model = language(kind, Lora(rank=3, alpha=6.0, dropout=0.3))
    members = [noisy(model.start(Key(0), F64), seed) for seed in range(3)]
    batches = [rows(4, seed=seed if own else 0) for seed in range(3)]
    seeds = (5, 6, 7) if own else (5, 5, 5)
    tokens, mask = (torch.stack(entry) for entry in zip(*batches, strict=True))
    result, slopes = gradients(model, stack(members), tokens, mask, seeds)
    for i, member in enumerate(members):
        alone, slope = gradients(model, member, *batches[i], (seeds[i],))
        torch.testing.assert_close(result[i], alone)
        for theirs, ours in zip(slopes, slope, strict=True):
            torch.testing.assert_close(theirs[i], ours)


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("adapter", [Lora(rank=2, dropout=0.2), None])
@pytest.mark.parametrize(
    "how", [{"checkpointing": True}, {"rows": 2}, {"checkpointing": True, "rows": 3}]
)
def test_saving_memory_changes_no_gradient(
    kind: str, adapter: Lora | None, how: dict[str, Any]
) -> None:
    plain = language(kind, adapter)
    saving = language(kind, adapter, **how)
    x = noisy(plain.start(Key(0), F64), 1)
    # Masks are drawn for each pass, so with dropout passes have to be the same.
    seeds = (3,) if adapter is not None and "rows" not in how else None
    expected, slopes = gradients(plain, x, *rows(5), seeds)
    result, saved = gradients(saving, x, *rows(5), seeds)
    torch.testing.assert_close(result, expected, **CLOSE)
    for ours, theirs in zip(saved, slopes, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_checkpointing_stores_less() -> None:
    def stored(**how: Any) -> int:
        model = language("gpt2", **how)
        x = {name: leaf.requires_grad_() for name, leaf in model.start(Key(0), F64).items()}
        total = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.nll(x, *rows(16, 24))
        return total

    assert stored(checkpointing=True) < 0.5 * stored()


def test_a_mask_depends_on_the_seed_and_not_on_the_padding() -> None:
    model = language("gpt2", Lora(rank=2, dropout=0.5))
    x = noisy(model.start(Key(0), F64), 1)
    tokens, mask = rows(3)
    first = model.nll(x, tokens, mask, (1,))[0]
    longer = [torch.cat([entry, entry[:, :4] & False], 1) for entry in (tokens, mask)]
    torch.testing.assert_close(model.nll(x, *longer, (1,))[0], first)
    assert not torch.allclose(model.nll(x, tokens, mask, (2,))[0], first)


def test_dropout_is_unbiased() -> None:
    """The mean over masks of what an adapter adds is what it adds without dropout: first order
    in the adapter.
    """
    model = language("gpt2", Lora(rank=2, dropout=0.5))
    x = noisy(model.start(Key(0), F64), 1)
    x = {name: leaf * (1e-3 if "lora_B" in name else 1) for name, leaf in x.items()}
    tokens, mask = rows(3)
    without = model.nll(
        {name: leaf * ("lora_A" in name) for name, leaf in x.items()}, tokens, mask
    )[0]
    mean = (
        torch.stack([model.nll(x, tokens, mask, (seed,))[0] for seed in range(400)]).mean(0)
        - without
    )
    exact = model.nll(x, tokens, mask)[0] - without
    assert (mean - exact).norm() < 0.2 * exact.norm()


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])  # the latter caps its logits
@pytest.mark.parametrize(
    "how", [{}, {"rows": 2}, {"checkpointing": True}, {"adapter": None}], ids=str
)
def test_large_heads_are_computed_in_pieces(
    kind: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = language(kind, **how)
    x = noisy(model.start(Key(0), F64), 1)
    expected, slopes = gradients(language(kind, **how), x, *rows(5))
    with torch.no_grad():
        value = model.nll(x, *rows(5))[0]
    monkeypatch.setattr("hgms_mix.lm.language.LOGITS", 7 * VOCABULARY)
    result, pieces = gradients(model, x, *rows(5))
    torch.testing.assert_close(result, expected, **CLOSE)
    torch.testing.assert_close(value, expected, **CLOSE)
    for ours, theirs in zip(pieces, slopes, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def hessian_product(model: LanguageModel, x: Tree, batch: Any) -> torch.Tensor:
    """Of the mean loss, along a fixed direction."""
    draw = torch.Generator().manual_seed(9)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
    along = [
        torch.randn(leaf.shape, generator=draw, dtype=F64).to(leaf.dtype) for leaf in x.values()
    ]
    with twice_differentiable_attention():
        slopes = torch.autograd.grad(
            model.nll(leaves, *batch)[0].mean(), list(leaves.values()), create_graph=True
        )
        products = torch.autograd.grad(slopes, list(leaves.values()), along)
    return torch.cat([product.flatten().double() for product in products])


def test_large_heads_have_a_second_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    model = language("gpt2")
    x = noisy(model.start(Key(0), F64), 1)
    expected = hessian_product(model, x, rows(5))
    monkeypatch.setattr("hgms_mix.lm.language.LOGITS", 7 * VOCABULARY)
    torch.testing.assert_close(hessian_product(model, x, rows(5)), expected)


def half_and_exact(**spec: Any) -> tuple[LanguageModel, LanguageModel, Tree]:
    """A model with weights in bfloat16, the same weights in float64, and adapters in float32
    whose effect is not small.
    """
    config = {**LAYERS, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    built = BaseModel(config={"model_type": "qwen2", **config}, tokenizer="bytes", dtype="bfloat16")
    adapter = Lora(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "o_proj", "down_proj"), **spec)
    half = LanguageModel.of(built.load(CPU, torch.float32, VOCABULARY), adapter, length=24)
    exact = LanguageModel.of(built.load(CPU, torch.float32, VOCABULARY).to(F64), adapter, length=24)
    return half, exact, noisy(half.start(Key(0), torch.float32), 1)


def distance(result: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((result.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_adapters_on_a_base_in_bfloat16_have_right_gradients(dropout: float) -> None:
    half, exact, x = half_and_exact(dropout=dropout)
    seeds = (3,) if dropout else None
    batch = rows(16, 24)
    result, slopes = gradients(half, x, *batch, seeds)
    wanted, true = gradients(
        exact, {name: leaf.double() for name, leaf in x.items()}, *batch, seeds
    )
    assert {slope.dtype for slope in slopes} == {torch.float32}
    assert distance(result, wanted) < 1e-2
    for ours, theirs in zip(slopes, true, strict=True):
        assert distance(ours, theirs) < 0.05


def test_adapters_on_a_base_in_bfloat16_have_right_second_derivatives() -> None:
    half, exact, x = half_and_exact()
    batch = rows(16, 24)
    wanted = hessian_product(exact, {name: leaf.double() for name, leaf in x.items()}, batch)
    assert distance(hessian_product(half, x, batch), wanted) < 0.1


def test_a_small_step_of_an_adapter_is_not_lost_on_a_base_in_bfloat16() -> None:
    """1e-3 of a weight's rounding error in bfloat16, seen in the mean over many tokens as in
    float64.
    """
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(4096, 32, generator=draw).to(torch.bfloat16)
    weight = torch.rand(4, 32, generator=draw) - 0.5
    step = 1e-5 * torch.sign(torch.randn(4, 32, generator=draw))
    assert float((weight.bfloat16() == (weight + step).bfloat16()).float().mean()) > 0.9
    coarse, fine = _halves(weight + step)
    before = sum(entry.double() for entry in _halves(weight))
    torch.testing.assert_close(
        coarse.double() + fine.double() - before, step.double(), rtol=0, atol=4e-6
    )
    wide = _down(hidden, torch.cat([weight, weight + 100 * step]), 1.0).double()
    moved = ((wide[:, 4:] - wide[:, :4]) * (hidden.double() @ step.double().T)).sum()
    assert float(
        moved / (100 * (hidden.double() @ step.double().T).square().sum())
    ) == pytest.approx(1, abs=0.1)


def test_tokens_are_counted() -> None:
    model = language("gpt2")
    x = model.start(Key(0), F64)
    model.nll(x, *rows(4, 10))
    assert model.tokens == {"forward_tokens": 40, "backward_tokens": 0}
    gradients(model, x, *rows(2, 10))
    assert model.tokens == {"forward_tokens": 60, "backward_tokens": 20}


def test_tokens_are_counted_under_vmap_too() -> None:
    model = language("gpt2", None)
    x = {
        name: leaf.expand(3, *leaf.shape).clone().requires_grad_()
        for name, leaf in model.start(Key(0), F64).items()
    }
    tokens, mask = rows(2, 10)
    torch.func.vmap(lambda member: model.nll(member, tokens, mask)[0])(x)
    assert model.tokens == {"forward_tokens": 60, "backward_tokens": 60}
    own = torch.stack([tokens] * 3), torch.stack([mask] * 3)
    torch.func.vmap(lambda member, *pair: model.nll(member, *pair)[0])(x, *own)
    assert model.tokens == {"forward_tokens": 120, "backward_tokens": 120}


def test_adapters_stay_in_float32_on_a_base_in_bfloat16() -> None:
    built = BaseModel(
        config={"model_type": "qwen2", **SMALL["qwen2"]}, tokenizer="bytes", dtype="bfloat16"
    )
    model = LanguageModel.of(built.load(CPU, torch.float32, VOCABULARY), Lora(rank=3), length=24)
    assert next(model.model.parameters()).dtype == torch.bfloat16
    x = noisy(model.start(Key(0), torch.float32), 1)
    tokens, mask = rows(5)
    losses, slopes = gradients(model, x, tokens, mask)
    assert losses.dtype == torch.float32
    assert {slope.dtype for slope in slopes} == {torch.float32}
    exact = LanguageModel.of(base("qwen2", torch.float32), Lora(rank=3), length=24)
    exact.model.load_state_dict(model.model.state_dict())
    wanted, true = gradients(exact, x, tokens, mask)
    torch.testing.assert_close(losses, wanted, rtol=2e-2, atol=2e-2)
    flat, other = (torch.cat([slope.flatten() for slope in entry]) for entry in (slopes, true))
    assert functional.cosine_similarity(flat, other, dim=0) > 0.99


def test_a_quantised_base_is_refused_in_forward_mode() -> None:
    """Its kernels would answer with a tangent of zero."""
    packed = base("gpt2")
    packed.packed = torch.nn.Parameter(torch.zeros(1, dtype=torch.uint8), requires_grad=False)
    model = LanguageModel.of(packed, Lora(rank=2), length=24)
    x = noisy(model.start(Key(0), F64), 1)
    gradients(model, x, *rows(3))
    with rejects("no-second-derivative", "task", "model", "quantize", of=ConfigError):
        torch.func.jvp(lambda point: model.nll(point, *rows(3))[0].sum(), (x,), (x,))


def test_building_a_model_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first = base("gpt2")
    second = base("gpt2")
    assert torch.equal(before, torch.get_rng_state())
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def test_targets_that_match_nothing() -> None:
    with rejects("unknown-module", "task", "adapter", "targets", of=ConfigError) as caught:
        language("gpt2", Lora(targets=("q_proj",)))
    assert caught.value.hint == "available: c_attn, c_fc, c_proj, all-linear"


def test_each_target_has_to_match_a_module() -> None:
    with rejects("unknown-module", "task", "adapter", "targets", of=ConfigError) as caught:
        language("llama", Lora(targets=("q_proj", "vproj")))
    assert caught.value.message == "LlamaForCausalLM has no linear module 'vproj'"
    with rejects("not-supported", "task", "adapter", "targets", of=ConfigError):
        language("llama", Lora(targets=("q_proj", "lm_head")))


def test_all_linear_modules_but_the_output_embedding_get_an_adapter() -> None:
    modules = Lora(targets=("all-linear",)).modules(base("gpt2"))
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert modules == [f"transformer.h.{layer}.{name}" for layer in range(2) for name in names]


def test_a_model_without_default_targets_lists_its_modules() -> None:
    pytest.importorskip("peft")
    phi3 = BaseModel(
        config={"model_type": "phi3", "pad_token_id": 0, **LAYERS}, tokenizer="bytes"
    ).load(CPU, F64, VOCABULARY)
    with rejects("missing-option", "task", "adapter", "targets", of=ConfigError) as caught:
        Lora().modules(phi3)
    listed = "down_proj, gate_up_proj, o_proj, qkv_proj"
    hint = f'set task.adapter.targets = ["all-linear"], or some of: {listed}'
    assert caught.value.hint == hint
    assert len(Lora(targets=("all-linear",)).modules(phi3)) == 4 * phi3.config.num_hidden_layers


@pytest.mark.parametrize("instructions", [True, False])
def test_bfloat16_on_a_cpu_without_it_is_warned_of(
    instructions: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: instructions)
    warn.cache_clear()
    model = BaseModel(
        config={"model_type": "gpt2", **SMALL["gpt2"]}, tokenizer="bytes", dtype="bfloat16"
    )
    model.load(CPU, F64, VOCABULARY)
    assert ("no instructions for bfloat16" in caplog.text) is not instructions
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert computes_bfloat16()


def test_a_model_that_is_not_there(tmp_path: Any) -> None:
    with rejects("missing-file", "task", "model", "path", of=ConfigError):
        BaseModel(path=str(tmp_path / "none"), tokenizer="bytes").load(CPU)


@pytest.mark.parametrize(
    ("fields", "code", "place"),
    [
        ({}, "missing-option", ("path",)),
        ({"path": "a", "config": {"model_type": "gpt2"}}, "conflicting-options", ("path",)),
        (
            {"config": {"n_layer": 2}, "tokenizer": "bytes"},
            "missing-option",
            ("config", "model_type"),
        ),
        ({"config": {"model_type": "gpt2"}}, "missing-option", ("tokenizer",)),
    ],
)
def test_a_model_is_named_one_way(
    fields: dict[str, Any], code: str, place: tuple[str, ...]
) -> None:
    with rejects(code, *place, of=ConfigError):
        BaseModel(**fields)


@pytest.mark.parametrize(
    ("value", "place"),
    [(float("nan"), ()), ([1.0, float("inf")], (1,)), ({"factor": float("-inf")}, ("factor",))],
)
def test_numbers_that_no_model_can_have_are_refused(
    value: Any, place: tuple[str | int, ...]
) -> None:
    with rejects("not-finite", "config", "odd", *place, of=ConfigError):
        BaseModel(config={"model_type": "gpt2", "n_layer": 1, "odd": value}, tokenizer="bytes")
