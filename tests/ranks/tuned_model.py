"""One rank of `test_mix_ranks.py`: fine-tunes a small Llama with others, and evaluates it.

Arguments: rank, ranks, address, folder.
``<folder>/one-two`` may hold what one process has begun; ``<folder>/two-one`` is left interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from hgms.distributed import Ranks, as_launched, join
from hgms.runs import Interrupted
from hgms_mix.lm import TokenTable, called_through
from hgms_mix.lm.sharding import sharded
from hgms_mix.stages.evaluate import row_losses
from hgms_mix.stages.settings import Finetune
from hgms_mix.stages.training import train

SETTINGS = Finetune(
    lr=1e-2,
    epochs=2,
    micro_batch=2,
    accumulation=4,
    schedule="linear",
    warmup=2,
    clip=0.5,
    save_every=2,
    checkpointing=True,
)


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).requires_grad_(False)


def lora(dropout: float = 0.0) -> Any:
    return peft.LoraConfig(
        r=2, lora_alpha=4, lora_dropout=dropout, target_modules=["q_proj", "v_proj"]
    )


def some_rows(count: int = 21) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of very different lengths; five are left for the last optimiser step of an epoch."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(count):
        length = 4 + (number * 7) % 23
        tokens = torch.randint(1, 40, (length,), generator=generator, dtype=torch.int32)
        rows.append((tokens, torch.arange(length) >= 1 + number % 3))
    return rows


def table() -> TokenTable:
    rows = some_rows()
    lengths = torch.tensor([len(tokens) for tokens, _ in rows])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens, masks = (torch.cat(column) for column in zip(*rows, strict=True))
    return TokenTable("t", tokens, masks, offsets, torch.arange(len(rows)), "digest")


def in_parts() -> Any:
    """The same model, half of it on each of two ranks; rank 0 alone makes it."""

    def outline() -> Any:
        with torch.device("meta"):
            return llama()

    return called_through(sharded(llama, outline, torch.device("cpu")))


def tune(
    folder: Path,
    settings: Finetune = SETTINGS,
    ranks: Ranks | None = None,
    *,
    stop: int = 0,
    dropout: float = 0.0,
    model: Any = llama,
) -> Any:
    """Trains, or the rest of it; a signal comes after step ``stop``, of ranks to the first
    alone.
    """

    def watch(step: int, _steps: int, _loss: float) -> None:
        if step == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    folder.mkdir(exist_ok=True)
    with contextlib.suppress(Interrupted) if stop else contextlib.nullcontext():
        return train(
            settings,
            model(),
            some_rows(),
            folder,
            seed=3,
            adapter=lora(dropout),
            ranks=ranks,
            watch=watch,
        )


def main(rank: int, count: int, address: str, folder: Path) -> None:
    torch.set_num_threads(1)
    join(rank, count, torch.device("cpu"), address)
    ranks = Ranks(rank, count)
    with as_launched(rank, count):
        tune(folder / "two", ranks=ranks)
        tune(folder / "two-one", ranks=ranks, stop=3)
        tune(folder / "one-two", ranks=ranks)
        tune(folder / "two-dropout", ranks=ranks, dropout=0.3)
        tune(folder / "two-two-dropout", ranks=ranks, dropout=0.3, stop=1)
        tune(folder / "two-two-dropout", ranks=ranks, dropout=0.3)
        tune(folder / "parts", ranks=ranks, model=in_parts)
    for name, model in (("whole", llama()), ("parts", in_parts())):
        losses = row_losses(model, table(), rows=4, ranks=ranks)
        (folder / f"losses-{name}-{rank}.json").write_text(json.dumps(losses.as_dict()))
    ranks.close()
    assert "LOCAL_RANK" not in os.environ


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
