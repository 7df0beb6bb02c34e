"""TRL's files: the rows, and the configuration of ``trl sft``."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hgms.arguments import require
from hgms.config import expand
from hgms.store import replace_file, writing
from hgms_mix.exchange.sample import Row, Sampled, is_learned

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
ROWS = "rows.jsonl"


FILES = ("sft.yaml", ROWS)
"""The files of an export."""


def export(sample: Sampled, folder: Path) -> list[str]:
    """Write the rows and ``sft.yaml`` to a new folder, and return notes for the user.

    The notes are also comments of ``sft.yaml``, which is written last.

    Raises
    ------
    ConfigError
        If the folder exists and is not empty.
    DiskError
        If it cannot be written.
    """
    import yaml  # type: ignore[import-untyped]

    require(
        not folder.exists() or (folder.is_dir() and not any(folder.iterdir())),
        "file-exists",
        "the folder exists and is not empty",
        place=(str(folder),),
        hint="use another --out, or remove the folder",
    )
    rows = [row for drawn in sample.rows.values() for row in _rows(sample, drawn)]
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    table = {
        "model_name_or_path": model_name(sample),
        "datasets": [{"path": "json", "data_files": ROWS}],
        "completion_only_loss": True,
        "max_length": sample.config.task.max_length,
        **_arguments(sample),
        **_adapter(sample),
        "output_dir": "tuned",
    }
    notes = _notes(sample, len(rows))
    comments = "".join(f"# {line}\n" for line in (f"{COMMAND}, in this folder", *notes))
    text = yaml.safe_dump(table, sort_keys=False, allow_unicode=True, width=120)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / ROWS, "".join(lines).encode())
    replace_file(folder / "sft.yaml", f"{comments}{text}".encode())
    return notes


def _notes(sample: Sampled, rows: int) -> list[str]:
    """Return what a user of the folder needs to know.

    This includes the differences between the exported training and ``hgms mix``.
    """
    own = sample.config.finetune
    notes = [
        f"No row is from `{name}`: its weight {weight:.2g} is too small for {sample.size} rows."
        for name, weight in sample.weights.items()
        if name not in sample.rows and not sample.is_ranked
    ]
    if own.epochs == 0:
        notes.append(
            "With `[finetune] epochs = 0`, `hgms mix` does not train on these rows: its model is "
            "the model at the end of learning. The training here starts from the base model, and "
            "takes one epoch over the rows."
        )
    elif own.start == "reweighted":
        notes.append(
            "`hgms mix` starts from the parameters at the end of learning (`[finetune] start = "
            '"reweighted"`). The training here starts from the base model.'
        )
    if rows > sample.size:
        notes.append(f"Each learned answer is a row: {rows} for the {sample.size} of the sample.")
    if model_name(sample) == UNNAMED:
        notes.append(
            "The mix's model is built from a configuration and has no name: write one in the "
            f"place of `{UNNAMED}`."
        )
    template = (
        "Turns are written by the model's own chat template, as `hgms mix` did."
        if sample.chat
        else f"The template `{sample.config.task.template}` is written into the rows: the trainer "
        "must add none."
    )
    return [*notes, template, ON_A_CPU, OLDER]


def _rows(sample: Sampled, drawn: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield a row of TRL per learned answer: its prompt, and the answer.

    With a named template these are texts, as in reweighting; with a chat template, turns.
    """
    if not sample.chat:
        for pieces in sample.pieces_of(drawn):
            for prompt, completion in answers_in(pieces, sample.tokenizer.bos_token or ""):
                yield {"prompt": prompt, "completion": completion}
        return
    for row in drawn:
        turns = [{"role": turn["role"], "content": turn["content"]} for turn in row["messages"]]
        for number, turn in enumerate(row["messages"]):
            if turn["role"] == "assistant" and is_learned(turn):
                yield {"prompt": turns[:number], "completion": [turns[number]]}


def answers_in(pieces: Sequence[tuple[str, bool]], start: str) -> Iterator[tuple[str, str]]:
    """Yield each learned answer of a row after its prompt, without the ``start`` mark.

    Examples
    --------
    >>> list(answers_in([("Q", False), ("A", True), (".", True), ("R", False), ("B", True)], ""))
    [('Q', 'A.'), ('QA.R', 'B')]
    """
    text = ""
    for learned, run in itertools.groupby(pieces, key=lambda piece: piece[1]):
        part = "".join(text for text, _ in run)
        if learned:
            yield text.removeprefix(start), part
        text += part


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
    require(
        lora.alpha == int(lora.alpha),
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
