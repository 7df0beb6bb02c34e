"""Axolotl: ``axolotl train`` on conversations, or on segments for a named template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hgms_core import ConfigError
from hgms_core.errors import Place
from hgms_mix.exchange.configuration import (
    count_rows,
    data_sets,
    expect,
    in_columns,
    of_load_dataset,
    read_mapping,
    table_at,
    unread_keys,
)
from hgms_mix.exchange.messages import conversations
from hgms_mix.exchange.sample import Part, Sampled, unique_name
from hgms_mix.exchange.trainer import (
    ImportedMix,
    Trainer,
    epochs,
    lora_alpha,
    model_name,
    normalise,
    schedule,
    warmup,
    write_rows,
    write_yaml,
)

KEYS = {
    "read": (
        *("path", "data_files", "name", "revision", "split", "weight", "type", "field"),
        *("field_messages", "message_field_role", "message_field_content", "roles"),
        *("message_property_mappings", "message_field_training", "roles_to_train"),
    ),
    "harmless": ("ds_type", "preprocess_shards", "train_on_eos", "trust_remote_code"),
    "rejected": (
        *("shards", "shards_idx", "input_transform", "input_format", "drop_system_message"),
        *("field_human", "field_model", "field_tools", "field_thinking", "split_thinking"),
        *("template_thinking_key", "message_field_training_detail", "data_dir"),
    ),
}
"""The handling of keys of a data set. All other keys are templates, and keys of later versions."""
PROMPTER = {
    "instruction": "field_instruction",
    "input": "field_input",
    "output": "field_output",
    "system": "field_system",
}
"""Fields of rows, and the keys that name their columns if a table replaces the type."""


def rows(sample: Sampled, part: Part) -> Iterator[dict[str, Any]]:
    if sample.chat:
        yield from conversations(part)
        return
    for pieces in sample.written(part):
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


def read(path: Path) -> ImportedMix:
    table = read_mapping(path, "configuration of axolotl")
    listed = data_sets(table.get("datasets"), path, "datasets", "path")
    notes = unread_keys({"rl": table.get("rl")}, (str(path),), read=(), rejected=("rl",))
    sources: dict[str, dict[str, Any]] = {}
    weights: dict[str, float] = {}
    for number, part in enumerate(listed):
        place = (str(path), "datasets", number)
        notes += unread_keys(part, place, **KEYS)
        columns, more = _columns(part, place)
        notes += more
        name, source = of_load_dataset(part, path, "datasets", number, columns=columns)
        name = unique_name(sources, name)
        share = part.get("weight", 1.0)
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(
                "out-of-range",
                f"weight={share!r} of {part['path']!r} must be greater than 0 and at most 1, as "
                "the share of its rows",
                place=(str(path), "datasets", number, "weight"),
            )
        sources[name], weights[name] = source, share * count_rows(name, source, path)
    return ImportedMix(
        sources=sources,
        mixture=normalise(weights, (str(path),)),
        model=table.get("base_model"),
        notes=notes,
    )


def _columns(part: Mapping[str, Any], place: Place) -> tuple[dict[str, Any], list[str]]:
    """Return the format and the columns of a data set by its type.

    Also return the keys that are not imported.
    """
    kind = part.get("type")
    if isinstance(kind, dict):
        notes = unread_keys(kind, (*place, "type"), read=PROMPTER.values())
        names = {field: kind[key] for field, key in PROMPTER.items() if kind.get(key)}
        if "{input}" in str(kind.get("format") or "{input}"):
            return in_columns("alpaca", names), notes
        # A template without the input.
        pair = {
            "prompt": names.get("instruction", "instruction"),
            "completion": names.get("output", "output"),
        }
        system = {"system": names["system"]} if "system" in names else {}
        return in_columns("prompt-completion", {**pair, **system}), notes
    word = str(kind).split(":")[0].split(".")[0]
    if word in ("alpaca", "gpteacher"):
        return in_columns("alpaca", {}), []
    if word == "completion":
        return in_columns("text", {"text": part.get("field") or "text"}), []
    if word == "chat_template":
        _turns(part, place)
        return in_columns("chat", {"messages": part.get("field_messages") or "messages"}), []
    if word == "sharegpt":
        _turns(part, place)
        column = part.get("field_messages") or "conversations"
        return in_columns("sharegpt", {"conversations": column}), []
    return {}, [f"the format of {part['path']!r} is detected, because type={kind!r} is not known"]


def _turns(part: Mapping[str, Any], place: Place) -> None:
    """Raise ConfigError for names in turns that a source does not read."""
    from hgms_mix.lm import ROLES

    expect(part, "message_field_role", ("role", "from"), place)
    expect(part, "message_field_content", ("content", "value"), place)
    expect(part, "message_field_training", ("train", "weight"), place)
    mapping = table_at(part, "message_property_mappings", place)
    inner = (*place, "message_property_mappings")
    expect(mapping, "role", ("role", "from"), inner)
    expect(mapping, "content", ("content", "value"), inner)
    names = ("role", "content")
    unread_keys(mapping, inner, read=names, rejected=[key for key in mapping if key not in names])
    for role, names in table_at(part, "roles", place).items():
        for name in names if isinstance(names, list) else [names]:
            if ROLES.get(str(name).casefold()) != role:
                raise ConfigError(
                    "not-supported",
                    f"the role {name!r} cannot be imported as {role!r}",
                    place=(*place, "roles", role),
                    hint="rename the role in the rows",
                )
    learned = part.get("roles_to_train") or []
    for name in learned if isinstance(learned, list) else [learned]:
        if ROLES.get(str(name).casefold()) != "assistant":
            raise ConfigError(
                "not-supported",
                f"hgms mix learns from answers only, not from turns of {name!r}",
                place=(*place, "roles_to_train"),
                hint="remove it",
            )


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
    read=read,
)
