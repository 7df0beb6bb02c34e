"""LLaMA-Factory: ``dataset_info.json`` beside a training configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hgms.runs import replace_file
from hgms_core import ConfigError, Place, unknown_name
from hgms_mix.exchange.configuration import (
    count_rows,
    located,
    numbers,
    of_hub,
    place_of,
    read_mapping,
)
from hgms_mix.exchange.messages import conversations, only_last, texts
from hgms_mix.exchange.sample import Sampled
from hgms_mix.exchange.trainer import (
    Brought,
    Trainer,
    lora_alpha,
    model_name,
    normalised,
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
        targets = "all" if lora.targets is None else ",".join(lora.targets)
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


def read(path: Path) -> Brought:
    table = read_mapping(path, "configuration of LLaMA-Factory")
    names = table.get("dataset")
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            "wrong-type",
            f"dataset={names!r} must be names of dataset_info.json, separated by commas",
            place=(str(path), "dataset"),
        )
    folder = _folder(str(table.get("dataset_dir", "data")), path)
    info = read_mapping(folder / "dataset_info.json", "list of data sets")
    sources = {name: _source(name, info, folder, (str(path), "dataset")) for name in names}
    strategy = table.get("mix_strategy", "concat")
    shares = table.get("interleave_probs")
    if strategy in ("concat", "interleave_once"):
        most = _whole(table.get("max_samples"), (str(path), "max_samples"))
        listed = folder / "dataset_info.json"
        weights = {
            name: float(_rows(name, sources[name], info[name], most, listed)) for name in names
        }
    elif shares is None:
        weights = dict.fromkeys(names, 1.0)  # in turn
    else:
        weights = dict(
            zip(names, numbers(shares, len(names), (str(path), "interleave_probs")), strict=True)
        )
    return Brought(
        sources=sources,
        mixture=normalised(weights, (str(path),)),
        model=table.get("model_name_or_path"),
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
    if isinstance(file := entry.get("file_name"), str):
        listed = folder / "dataset_info.json"
        return {"path": located(str(folder / file), listed, name, "file_name")}
    if isinstance(hub := entry.get("hf_hub_url"), str):
        return of_hub(hub, subset=entry.get("subset"), split=entry.get("split"))
    raise ConfigError(
        "missing-option",
        f"the data set {name!r} has no file_name or hf_hub_url",
        place=(str(folder / "dataset_info.json"), name),
        hint="set one of them to a text",
    )


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
        "`interleave_probs` are the chances that the next row comes from a data set, and count "
        "only with an interleaving "
        "`mix_strategy`: `interleave_under` ends with the first data set that runs out, "
        "`interleave_over` repeats small ones "
        "until all are through, `interleave_once` takes each row once (so the shares are those "
        "of the rows). `concat`, the "
        "default, takes all rows. `num_samples` of a data set repeats rows where it has fewer"
    ),
    command="llamafactory-cli train train.yaml",
    write=write,
    whole=whole,
    read=read,
)
