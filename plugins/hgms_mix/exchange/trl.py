"""TRL's files: rows per source, and the configuration of ``trl sft``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hgms.config import expand
from hgms.store import replace_file
from hgms_core import ConfigError
from hgms_mix.exchange.sample import Part, Sampled, is_learned

COMMAND = "trl sft --config sft.yaml"
UNNAMED = "MODEL"
"""The placeholder for a base model without a name.

A network with random weights is created separately in every program.
"""
OLDER = (
    "With transformers before 5.20, replace `activation_checkpointing` by its earlier name "
    "`gradient_checkpointing`."
)
ON_A_CPU = f"Without a GPU, trl requires two options: `{COMMAND} --use_cpu true --bf16 false`."
ONLY_LAST = "In rows with several answers, this export learns only the last; `hgms mix` learns all."


def write(sample: Sampled, folder: Path) -> list[str]:
    """Write the rows and ``sft.yaml``, and return notes for the user."""
    import yaml  # type: ignore[import-untyped]

    masks = sample.chat and sample.turns > 1 and _masks_answers(sample)
    rows = {part.name: list(_rows(sample, part, masks)) for part in sample.parts}
    count = sum(map(len, rows.values()))
    data = [
        {
            "path": "json",
            "data_files": _write_rows(folder, part, rows[part.name]),
            "fraction": len(rows[part.name]) / count,
        }
        for part in sample.parts
    ]
    table = {
        "model_name_or_path": model_name(sample),
        "datasets": data,
        "assistant_only_loss" if masks else "completion_only_loss": True,
        "max_length": sample.config.task.max_length,
        **_arguments(sample),
        **_adapter(sample),
        "output_dir": "tuned",
    }
    text = yaml.safe_dump(table, sort_keys=False, allow_unicode=True, width=120)
    replace_file(folder / "sft.yaml", f"# {COMMAND}, in this folder\n{text}".encode())
    notes = [ON_A_CPU, OLDER]
    if not sample.chat and sample.turns > 1:
        notes.append(ONLY_LAST)
    if count > sample.size:
        notes.append(
            "TRL learns several answers of a row only if the chat template marks them with "
            f"`{{% generation %}}`. Here each answer is a row: {count} for the {sample.size} of "
            "the sample."
        )
    return notes


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


def _rows(sample: Sampled, part: Part, masks: bool) -> Iterator[dict[str, Any]]:
    """Yield TRL's types of rows.

    With a named template: the texts of prompt and last answer, as in reweighting. With a chat
    template: conversations if TRL masks prompts, else a row of turns per learned answer.
    """
    if not sample.chat:
        for pieces in sample.pieces_of(part):
            prompt, completion = sample.pair(pieces)
            yield {"prompt": prompt, "completion": completion}
        return
    for row in part.rows:
        turns = [{"role": turn["role"], "content": turn["content"]} for turn in row["messages"]]
        if masks:
            yield {"messages": turns}
            continue
        for number, turn in enumerate(row["messages"]):
            if turn["role"] == "assistant" and is_learned(turn):
                yield {"prompt": turns[:number], "completion": [turns[number]]}


def _write_rows(folder: Path, part: Part, rows: Iterable[Mapping[str, Any]]) -> str:
    """Write the rows to a file, and return its path relative to ``folder``."""
    lines = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    path = folder / "rows" / f"{part.stem}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lines.encode())
    return path.relative_to(folder).as_posix()


def model_name(sample: Sampled) -> str:
    """Return the base model as other programs find it from the export's folder.

    This is its path, or its name on the Hub.
    """
    if sample.model.path is None:
        return UNNAMED
    folder = expand(sample.model.path, ("task", "model", "path"))
    return str(folder.resolve()) if folder.is_dir() else str(sample.model.path)


def _arguments(sample: Sampled) -> dict[str, Any]:
    """Return ``[finetune]`` as transformers' TrainingArguments, with at least one epoch."""
    own = sample.config.finetune
    constant = own.schedule == "constant" and own.warmup
    return {
        # The name in transformers since 5.20; the older name will be removed.
        "activation_checkpointing": own.checkpointing,
        "learning_rate": own.lr,
        "num_train_epochs": max(1, own.epochs),
        "per_device_train_batch_size": own.micro_batch,
        "gradient_accumulation_steps": own.accumulation,
        "weight_decay": own.weight_decay,
        "lr_scheduler_type": "constant_with_warmup" if constant else own.schedule,
        "max_grad_norm": own.clip or 0.0,
        "save_steps": own.save_every,
        "seed": sample.seed,
        "warmup_steps": own.warmup,
    }


def _adapter(sample: Sampled) -> dict[str, Any]:
    lora = sample.adapter
    if lora is None:
        return {}
    if lora.alpha != int(lora.alpha):
        raise ConfigError(
            "not-supported",
            f"alpha={lora.alpha:g} must be a whole number for TRL",
            place=("adapter", "alpha"),
            hint="set finetune.adapter to an adapter with a whole alpha; the drawn rows do not "
            "depend on it",
        )
    # The type of the frozen base, which trl otherwise loads in float32.
    dtype = {} if sample.model.dtype == "auto" else {"dtype": sample.model.dtype}
    targets = {} if lora.targets is None else {"lora_target_modules": list(lora.targets)}
    # trl uses a single name as a pattern that must match the full name of a module.
    if lora.targets is not None and len(lora.targets) == 1 and not lora.everywhere:
        targets = {"lora_target_modules": [rf"(.*\.)?{re.escape(lora.targets[0])}"]}
    return {
        "use_peft": True,
        "lora_r": lora.rank,
        "lora_alpha": int(lora.alpha),
        "lora_dropout": lora.dropout,
        **targets,
        **dtype,
    }
