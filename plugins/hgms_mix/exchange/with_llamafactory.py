"""LLaMA-Factory: ``dataset_info.json`` in the folder of a training configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hgms.store import replace_file
from hgms_mix.exchange.messages import conversations, only_last, texts
from hgms_mix.exchange.sample import Sampled
from hgms_mix.exchange.trainer import (
    Trainer,
    lora_alpha,
    model_name,
    settings,
    warmup,
    write_rows,
    write_yaml,
)

CHAT = {
    "formatting": "sharegpt",
    "columns": {"messages": "messages"},
    "tags": {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "system_tag": "system",
    },
}
TEXTS = {"formatting": "alpaca", "columns": {"prompt": "prompt", "response": "completion"}}


def write(sample: Sampled, folder: Path) -> Sequence[str]:
    info = {}
    for part in sample.parts:
        rows = conversations(part) if sample.chat else texts(sample, part)
        info[part.stem] = {
            "file_name": write_rows(folder, part, rows),
            **(CHAT if sample.chat else TEXTS),
        }
    replace_file(
        folder / "dataset_info.json", json.dumps(info, indent=2, ensure_ascii=False).encode()
    )
    lora = sample.adapter
    adapter: dict[str, Any] = {"finetuning_type": "full"}
    if lora is not None:
        everywhere = lora.targets is None or lora.everywhere
        targets = "all" if everywhere else ",".join(lora.targets)
        adapter = {
            "finetuning_type": "lora",
            "lora_rank": lora.rank,
            "lora_alpha": lora_alpha(lora),
            "lora_dropout": lora.dropout,
            "lora_target": targets,
        }
    table = {
        "model_name_or_path": model_name(sample),
        "stage": "sft",
        "do_train": True,
        **adapter,
        "dataset_dir": ".",
        "dataset": ",".join(part.stem for part in sample.parts),
        "mix_strategy": "concat",
        **({} if sample.chat else {"template": "empty"}),
        "cutoff_len": sample.config.task.max_length,
        **settings(sample),
        **warmup(sample),
        "output_dir": "tuned",
    }
    write_yaml(folder / "train.yaml", table, "llamafactory-cli train train.yaml, in this folder")
    return only_last(sample)


def whole(sample: Sampled) -> Mapping[str, str]:
    how = "in `interleave_probs`, `mix_strategy: interleave_under`"
    return {name: f"{weight:.6g} {how}" for name, weight in sample.weights.items()}


LLAMAFACTORY = Trainer(
    name="llamafactory",
    files=("train.yaml", "dataset_info.json"),
    meaning=(
        "`interleave_probs` are the probabilities that the next row is from a data set. They "
        "require an interleaving `mix_strategy`: `interleave_under` ends with the first data set "
        "without further rows, `interleave_over` repeats small data sets until all have been "
        "read, `interleave_once` takes each row once (the shares are the shares of the rows). "
        "`concat`, the default, takes all rows. `num_samples` repeats rows of a smaller data set"
    ),
    command="llamafactory-cli train train.yaml",
    write=write,
    whole=whole,
)
