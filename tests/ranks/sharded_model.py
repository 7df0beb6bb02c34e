"""One rank of `test_sharded_model.py`: a small Llama in parts and the same model in one piece.

Arguments: rank, ranks, address, a folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from derivatives import check
from support.helpers import F64, rejects
from support.language_models import noisy
from torch.distributed.tensor import DTensor

from hgms.distributed import join
from hgms_core import ConfigError, Key, curvature, stack
from hgms_mix.lm import BaseModel, LanguageModel, Lora

CPU = torch.device("cpu")
VOCABULARY = 64
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
# its head is its embedding
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64}


def pair(
    config: dict[str, object], folder: Path | None = None, **options: object
) -> tuple[LanguageModel, LanguageModel]:
    """(Whole, in parts.)"""
    path = {"config": config} if folder is None else {"path": str(folder)}
    base = BaseModel(**path, tokenizer="bytes", shard=True)
    models = base.load(CPU, F64, VOCABULARY), base.load(CPU, F64, VOCABULARY, sharded=True)
    whole, parts = (
        LanguageModel.of(model, Lora(rank=2, alpha=4.0), length=24, **options) for model in models
    )
    return whole, parts


def batch(seed: int, *lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of lengths of their own: of another seed they are cut into other passes by a whole
    model.
    """
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (*lead, 6, 20), generator=draw)
    ends = torch.randint(3, 21, (*lead, 6, 1), generator=draw)
    place = torch.arange(20)
    return tokens, (place >= 2) & (place < ends)


def taken(
    model: LanguageModel, x: dict[str, torch.Tensor], tokens: torch.Tensor, mask: torch.Tensor
) -> list[torch.Tensor]:
    """Losses, a gradient, and a second backward pass through the same graph (as a derivative by
    sources takes it).
    """
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
    losses, _ = model.nll(leaves, tokens, mask)
    gradient = torch.autograd.grad(losses.sum(), list(leaves.values()), retain_graph=True)
    of_one = torch.autograd.grad(losses[..., 0].sum(), list(leaves.values()))
    with torch.no_grad():
        again, _ = model.nll(x, tokens, mask)
    return [losses.detach(), *gradient, *of_one, again]


def product(
    model: LanguageModel,
    x: dict[str, torch.Tensor],
    tokens: torch.Tensor,
    mask: torch.Tensor,
    v: torch.Tensor,
    how: str,
):
    """A product with the Hessian."""
    return curvature(lambda point: model.nll(point, tokens, mask)[0].sum(), x, how).matvec(v)


def main(rank: int, ranks: int, address: str, folder: Path) -> None:
    join(rank, ranks, CPU, address)
    check()
    for config, way in ((LLAMA, {}), (GPT2, {"rows": 2, "checkpointing": True})):
        whole, parts = pair(config, **way)
        x = noisy(whole.start(Key(0), F64), 1)
        stacked = stack([x, noisy(x, 2)])
        for at, lead in ((x, ()), (stacked, (2,))):
            rows = batch(10 * rank, *lead)  # each rank on rows of its own, as branches are
            torch.testing.assert_close(
                taken(parts, at, *rows), taken(whole, at, *rows), rtol=1e-10, atol=1e-12
            )

        leaves = list(parts.model.parameters())
        assert all(isinstance(leaf, DTensor) for leaf in leaves), (
            "something is whole between passes"
        )
        total = sum(leaf.numel() * leaf.element_size() for leaf in whole.model.parameters())
        own = sum(leaf.to_local().numel() * leaf.element_size() for leaf in leaves)
        assert abs(own - total / ranks) < 0.02 * total, (own, total)

    tokens, mask = batch(0)
    vector = torch.randn(
        sum(leaf.numel() for leaf in x.values()),
        generator=torch.Generator().manual_seed(3),
        dtype=F64,
    )
    products = [product(model, x, tokens, mask, vector, "difference") for model in (whole, parts)]
    torch.testing.assert_close(products[1], products[0], rtol=1e-8, atol=1e-10)

    if rank == 0:
        whole.model.save_pretrained(folder / "model")
    dist.barrier()
    whole, parts = pair({}, folder / "model")
    torch.testing.assert_close(
        taken(parts, x, tokens, mask), taken(whole, x, tokens, mask), rtol=1e-10, atol=1e-12
    )
    for strategy in ("jvp", "vjp"):
        with rejects("no-second-derivative", of=ConfigError):
            product(parts, x, tokens, mask, vector, strategy)
    dist.barrier()  # a rank that ends early would break a connection in use
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
