"""ms-swift: ``swift sft`` with a number of rows after each file name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


def write(sample: Sampled, folder: Path) -> Sequence[str]:
    data = []
    for part in sample.parts:
        # ms-swift adds the mark.
        rows = (
            conversations(part)
            if sample.chat
            else texts(sample, part, "query", "response", eos=False)
        )
        data.append(f"{write_rows(folder, part, rows)}#{len(part.rows)}")
    lora = sample.adapter
    adapter: dict[str, Any] = {"tuner_type": "full"}
    if lora is not None:
        targets = ["all-linear"] if lora.targets is None else list(lora.targets)
        adapter = {
            "tuner_type": "lora",
            "lora_rank": lora.rank,
            "lora_alpha": lora_alpha(lora),
            "lora_dropout": lora.dropout,
            "target_modules": targets,
        }
    table = {
        "model": model_name(sample),
        "dataset": data,
        "use_chat_template": sample.chat,
        "max_length": sample.config.task.max_length,
        **settings(sample),
        **warmup(sample),
        **adapter,
        "output_dir": "tuned",
    }
    write_yaml(folder / "sft.yaml", table, "swift sft sft.yaml, in this folder")
    return only_last(sample)


def whole(sample: Sampled) -> Mapping[str, str]:
    return {
        name: f"`FILE#{round(weight * sample.size)}`" for name, weight in sample.weights.items()
    }


MS_SWIFT = Trainer(
    name="ms-swift",
    files=("sft.yaml",),
    meaning=(
        "`FILE#N` takes N rows of a file: without repetition if it has as many, else all of them "
        "N // rows times and a draw "
        "for the rest. `interleave_prob` instead are the chances that the next row comes from a "
        "data set, until "
        "`stopping_strategy`: `first_exhausted` (default) or `all_exhausted`. Without either all "
        "rows are concatenated"
    ),
    command="swift sft sft.yaml",
    write=write,
    whole=whole,
)
