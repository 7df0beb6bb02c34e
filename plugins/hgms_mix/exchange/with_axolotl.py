"""Axolotl: ``axolotl train`` on conversations, or on segments for a named template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hgms_mix.exchange.messages import conversations
from hgms_mix.exchange.sample import Part, Sampled
from hgms_mix.exchange.trainer import (
    Trainer,
    epochs,
    lora_alpha,
    model_name,
    schedule,
    warmup,
    write_rows,
    write_yaml,
)


def rows(sample: Sampled, part: Part) -> Iterator[dict[str, Any]]:
    if sample.chat:
        yield from conversations(part)
        return
    for pieces in sample.pieces_of(part):
        yield {"segments": [{"label": learned, "text": text} for text, learned in pieces]}


def write(sample: Sampled, folder: Path) -> Sequence[str]:
    own = sample.config.finetune
    lora = sample.adapter
    kind = (
        {"type": "chat_template", "roles_to_train": ["assistant"], "train_on_eos": "turn"}
        if sample.chat
        else {"type": "input_output"}
    )
    data = [
        {"path": write_rows(folder, part, rows(sample, part)), "ds_type": "json", **kind}
        for part in sample.parts
    ]
    adapter: dict[str, Any] = {}
    if lora is not None:
        adapter = {
            "adapter": "lora",
            "lora_r": lora.rank,
            "lora_alpha": lora_alpha(lora),
            "lora_dropout": lora.dropout,
        }
        adapter |= (
            {"lora_target_linear": True}
            if lora.targets is None or lora.everywhere
            else {"lora_target_modules": list(lora.targets)}
        )
    table = {
        "base_model": model_name(sample),
        "datasets": data,
        "shuffle_merged_datasets": True,
        "train_on_inputs": False,
        "val_set_size": 0,
        "sequence_len": sample.config.task.max_length,
        "micro_batch_size": own.micro_batch,
        "gradient_accumulation_steps": own.accumulation,
        "num_epochs": epochs(sample),
        "optimizer": "adamw_torch",
        "learning_rate": own.lr,
        "lr_scheduler": schedule(sample),
        **warmup(sample),
        "weight_decay": own.weight_decay,
        "max_grad_norm": own.clip or 0.0,
        "gradient_checkpointing": own.checkpointing,
        **adapter,
        "seed": sample.seed,
        "output_dir": "tuned",
    }
    write_yaml(folder / "axolotl.yaml", table, "axolotl train axolotl.yaml, in this folder")
    return []


def whole(sample: Sampled) -> Mapping[str, str]:
    weights = sample.weights
    most = min(
        part.available / weights[part.name] for part in sample.parts if weights[part.name] > 0
    )
    return {
        part.name: f"`weight: {weights[part.name] * most / part.available:.6g}`"
        for part in sample.parts
    }


AXOLOTL = Trainer(
    name="axolotl",
    files=("axolotl.yaml",),
    meaning=(
        "`weight` (0 < weight ≤ 1, in the versions that have it: axolotl#3690) is the share of a "
        "data set's *own* rows that is "
        "kept: a subsample, drawn before tokenising. It is no share of the mixture, and nothing "
        "is ever repeated. Data sets are concatenated and shuffled"
    ),
    command="axolotl train axolotl.yaml",
    write=write,
    whole=whole,
)
