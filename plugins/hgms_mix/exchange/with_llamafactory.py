"""LLaMA-Factory: ``dataset_info.json`` in the folder of a training configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hgms.store import replace_file
from hgms_core import ConfigError
from hgms_core.errors import Place, unknown_name
from hgms_mix.exchange.configuration import (
    check_several,
    count_rows,
    expect,
    in_columns,
    locate,
    of_hub,
    part_of,
    place_of,
    read_mapping,
    shares_of,
    table_at,
    unread_keys,
)
from hgms_mix.exchange.messages import conversations, only_last, texts
from hgms_mix.exchange.sample import Sampled
from hgms_mix.exchange.trainer import (
    ImportedMix,
    Trainer,
    lora_alpha,
    model_name,
    normalise,
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
KEYS = {
    "read": (
        *("file_name", "hf_hub_url", "subset", "split", "num_samples", "formatting", "columns"),
        *("tags", "revision"),
    ),
    "harmless": ("ms_hub_url", "om_hub_url"),
    "rejected": ("ranking", "folder", "script_url", "cloud_file_name"),
}
"""The handling of keys of a data set."""
FIELDS = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
"""Fields of the format alpaca by LLaMA-Factory's names for its columns."""
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


def read(path: Path) -> ImportedMix:
    table = read_mapping(path, "configuration of LLaMA-Factory")
    names = table.get("dataset")
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            "wrong-type",
            f"dataset={names!r} must be names of dataset_info.json, separated by commas",
            place=(str(path), "dataset"),
        )
    check_several(names, (str(path), "dataset"))
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(
            "duplicate-name",
            f"the data set {twice!r} is listed twice",
            place=(str(path), "dataset"),
            hint="list it once; interleave_probs or num_samples set its share",
        )
    if table.get("stage") not in (None, "sft", "pt"):
        raise ConfigError(
            "not-supported",
            f"stage={table['stage']!r} must be sft or pt",
            place=(str(path), "stage"),
            hint="use a configuration with stage: sft",
        )
    folder = _folder(str(table.get("dataset_dir", "data")), path)
    listed = folder / "dataset_info.json"
    info = read_mapping(listed, "list of data sets")
    sources = {name: _source(name, info, folder, (str(path), "dataset")) for name in names}
    notes = [
        note for name in names for note in unread_keys(info[name], (str(listed), name), **KEYS)
    ]
    strategy = table.get("mix_strategy", "concat")
    shares = table.get("interleave_probs")
    if strategy in ("concat", "interleave_once"):
        most = _whole(table.get("max_samples"), (str(path), "max_samples"))
        weights = {
            name: float(_rows(name, sources[name], info[name], most, listed)) for name in names
        }
    elif shares is None:
        weights = dict.fromkeys(names, 1.0)  # in turn
    else:
        weights = shares_of(shares, names, (str(path), "interleave_probs"))
    return ImportedMix(
        sources=sources,
        mixture=normalise(weights, (str(path),)),
        model=table.get("model_name_or_path"),
        notes=notes,
    )


def _folder(name: str, file: Path) -> Path:
    if (place := place_of(f"{name}/dataset_info.json", file)) is None:
        raise ConfigError(
            "missing-file",
            f"there is no {name}/dataset_info.json in the current folder or next to {file.name}",
            place=(str(file), "dataset_dir"),
            hint="run this command in the folder where LLaMA-Factory is started",
        )
    return place.parent


def _source(name: str, info: Mapping[str, Any], folder: Path, place: Place) -> dict[str, Any]:
    if not isinstance(info.get(name), dict):
        raise unknown_name("data set", name, info, place)
    entry = info[name]
    listed = folder / "dataset_info.json"
    columns = _columns(entry, (str(listed), name))
    if isinstance(file := entry.get("file_name"), str):
        source = {"path": locate(str(folder / file), listed, name, "file_name"), **columns}
        place_of_split = (str(listed), name, "split")
        return source | part_of(entry.get("split"), name, source, listed, place_of_split)
    if isinstance(hub := entry.get("hf_hub_url"), str):
        source = of_hub(hub, entry.get("revision"), entry.get("subset"), entry.get("split"))
        return {**source, **columns}
    raise ConfigError(
        "missing-option",
        f"the data set {name!r} has no file_name or hf_hub_url",
        place=(str(folder / "dataset_info.json"), name),
        hint="set a text for one of these keys",
    )


def _columns(entry: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Return the format and the columns of a data set; by default alpaca's."""
    from hgms_mix.lm import ROLES

    names = table_at(entry, "columns", place)
    inner = (*place, "columns")
    system = {"system": names["system"]} if names.get("system") else {}
    if entry.get("formatting") in ("sharegpt", "openai"):
        unread_keys(
            names, inner, read=("messages", "system"), rejected=set(names) - {"messages", "system"}
        )
        tags = table_at(entry, "tags", place)
        expect(tags, "role_tag", ("role", "from"), (*place, "tags"))
        expect(tags, "content_tag", ("content", "value"), (*place, "tags"))
        for role in ("user", "assistant", "system"):
            same = [name for name, meant in ROLES.items() if meant == role]
            expect(tags, f"{role}_tag", same, (*place, "tags"))
        column = names.get("messages") or "conversations"
        if column == "messages":
            return in_columns("chat", system)
        return in_columns("sharegpt", {"conversations": column, **system})
    expect(entry, "formatting", ("alpaca", "sharegpt", "openai"), place)
    read = (*FIELDS, "system")
    unread_keys(names, inner, read=read, rejected=set(names) - set(read))
    fields = {field: names[key] for key, field in FIELDS.items() if names.get(key)}
    if names and "input" not in fields and "history" not in fields:
        # Columns without a name are not read.
        pair = {
            "prompt": fields.get("instruction", "instruction"),
            "completion": fields.get("output", "output"),
        }
        return in_columns("prompt-completion", {**pair, **system})
    return in_columns("alpaca", {**fields, **system})


def _rows(
    name: str, source: Mapping[str, Any], entry: Mapping[str, Any], most: int | None, listed: Path
) -> int:
    asked = _whole(entry.get("num_samples"), (str(listed), name, "num_samples"))
    count = count_rows(name, source, listed) if asked is None else asked
    return count if most is None else min(count, most)


def _whole(value: Any, place: Place) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ConfigError(
            "wrong-value",
            f"{place[-1]}={value!r} must be a whole number of at least 0",
            place=place,
        )
    return value


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
    read=read,
)
