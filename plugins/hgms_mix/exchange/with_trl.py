"""TRL: ``trl sft`` with a mixture of data sets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hgms_mix.exchange.messages import dialogues, each_answer, only_last
from hgms_mix.exchange.sample import Sampled, is_learned
from hgms_mix.exchange.trainer import (
    Trainer,
    lora_alpha,
    model_name,
    normalise,
    settings,
    write_rows,
    write_yaml,
)

OLDER = (
    "With transformers before 5.20, replace `activation_checkpointing` by its earlier name "
    "`gradient_checkpointing`."
)
ON_A_CPU = (
    "Without a GPU, trl requires two options: `trl sft --config sft.yaml --use_cpu true "
    "--bf16 false`."
)


def adapter(sample: Sampled) -> dict[str, Any]:
    lora = sample.adapter
    if lora is None:
        return {}
    base = sample.config.finetune.model or sample.config.task.model
    # The type of the frozen base, which trl otherwise loads in float32.
    dtype = {} if base.dtype == "auto" else {"dtype": base.dtype}
    targets = {} if lora.targets is None else {"lora_target_modules": list(lora.targets)}
    # trl uses a single name as a pattern that must match the full name of a module.
    if lora.targets is not None and len(lora.targets) == 1 and not lora.everywhere:
        targets = {"lora_target_modules": [rf"(.*\.)?{re.escape(lora.targets[0])}"]}
    return {
        "use_peft": True,
        "lora_r": lora.rank,
        "lora_alpha": lora_alpha(lora),
        "lora_dropout": lora.dropout,
        **targets,
        **dtype,
    }


def write(sample: Sampled, folder: Path) -> Sequence[str]:
    masks = sample.chat and sample.turns > 1 and _masks_answers(sample)
    rows = {
        part.name: list(each_answer(part) if sample.chat and not masks else dialogues(sample, part))
        for part in sample.parts
    }
    shares = normalise({name: len(listed) for name, listed in rows.items()})
    data = [
        {
            "path": "json",
            "data_files": write_rows(folder, part, rows[part.name]),
            "fraction": shares[part.name],
        }
        for part in sample.parts
    ]
    answers = "assistant_only_loss" if masks else "completion_only_loss"
    table = {
        "model_name_or_path": model_name(sample),
        "datasets": data,
        answers: True,
        "max_length": sample.config.task.max_length,
        # The name in transformers since 5.20; the older name will be removed.
        "activation_checkpointing": sample.config.finetune.checkpointing,
        **settings(sample),
        "warmup_steps": sample.config.finetune.warmup,
        **adapter(sample),
        "output_dir": "tuned",
    }
    write_yaml(folder / "sft.yaml", table, "trl sft --config sft.yaml, in this folder")
    count = sum(map(len, rows.values()))
    split = (
        f"TRL learns several answers of a row only if the chat template marks them with `{{% "
        f"generation %}}`. Here each answer is a row: {count} for the {sample.size} of the sample."
    )
    return [ON_A_CPU, OLDER, *only_last(sample), *([split] if count > sample.size else [])]


def _masks_answers(sample: Sampled) -> bool:
    """Return whether TRL learns all assistant turns, and all should be learned.

    TRL detects these turns by marks of the chat template, and adds the marks only to a few
    templates.
    """
    template = sample.tokenizer.chat_template
    text = template["default"] if isinstance(template, dict) else template
    return bool(re.search(r"\{%-?\s*generation\s*-?%\}", text)) and all(
        is_learned(turn) for part in sample.parts for row in part.rows for turn in row["messages"]
    )


def whole(sample: Sampled) -> Mapping[str, str]:
    return {name: f"`fraction: {weight:.6g}`" for name, weight in sample.weights.items()}


TRL = Trainer(
    name="trl",
    files=("sft.yaml",),
    meaning=(
        "`fraction` is the share of a data set in the rows of the mixture; fractions are divided "
        "by their sum. The mixture is "
        "as large as it can be without repeating a row, and takes the *first* rows of each file. "
        "Without fractions all rows are concatenated"
    ),
    command="trl sft --config sft.yaml",
    write=write,
    whole=whole,
)
