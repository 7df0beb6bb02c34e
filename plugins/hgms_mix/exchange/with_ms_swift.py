"""ms-swift: ``swift sft`` with a number of rows after each file name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hgms_core import ConfigError
from hgms_mix.exchange.configuration import (
    check_several,
    count_rows,
    in_columns,
    locate,
    name_of,
    of_hub,
    place_of,
    read_mapping,
    shares_of,
    unread_keys,
)
from hgms_mix.exchange.messages import conversations, only_last, texts
from hgms_mix.exchange.sample import Sampled, unique_name
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

REJECTED = ("rlhf_type", "custom_dataset_info", "custom_register_path")
"""Options that change the contents of a data set."""


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


def read(path: Path) -> ImportedMix:
    table = read_mapping(path, "configuration of ms-swift")
    listed = table.get("dataset")
    listed = [listed] if isinstance(listed, str) else listed
    if (
        not isinstance(listed, list)
        or not listed
        or not all(isinstance(entry, str) for entry in listed)
    ):
        raise ConfigError(
            "wrong-type",
            f"dataset={listed!r} must be a list of files or data sets, optionally with #ROWS",
            place=(str(path), "dataset"),
        )
    check_several(listed, (str(path), "dataset"))
    given = {key: table.get(key) for key in REJECTED}
    notes = unread_keys(given, (str(path),), read=(), rejected=REJECTED)
    columns = _columns(table.get("columns"), path)
    sources: dict[str, dict[str, Any]] = {}
    counts: dict[str, int | None] = {}
    for entry in listed:
        name, source, count = _entry(entry, path)
        name = unique_name(sources, name)
        sources[name], counts[name] = {**source, **columns}, count
    shares = table.get("interleave_prob")
    if shares is not None:
        shares = shares.split() if isinstance(shares, str) and "," not in shares else shares
        weights = shares_of(shares, sources, (str(path), "interleave_prob"))
    else:
        weights = {
            name: float(count_rows(name, sources[name], path) if count is None else count)
            for name, count in counts.items()
        }
    return ImportedMix(
        sources=sources,
        mixture=normalise(weights, (str(path),)),
        model=table.get("model"),
        notes=notes,
    )


def _columns(given: Any, file: Path) -> dict[str, Any]:
    """Return the format of the data sets by ``columns``, {column: field}.

    ``columns`` may be a text of JSON.
    """
    if not given:
        return {}
    place = (str(file), "columns")
    try:
        mapping = json.loads(given) if isinstance(given, str) else given
        fields = {field: column for column, field in mapping.items()}
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(
            "wrong-type", f"columns={given!r} must be a table {{column: field}}", place=place
        ) from None
    if "messages" in fields and set(fields) <= {"messages", "system"}:
        return in_columns("chat", fields)
    if set(fields) <= {"query", "response", "system"}:
        # The first pair in the order of detection.
        first = {"query": "prompt", "response": "completion"}
        pair = {name: fields.get(key, key) for key, name in first.items()}
        system = {"system": fields["system"]} if "system" in fields else {}
        return in_columns("prompt-completion", {**pair, **system})
    raise ConfigError(
        "not-supported",
        f"columns={given!r} cannot be imported",
        place=place,
        hint="map columns to query, response and system, or to messages and system",
    )


def _entry(entry: str, file: Path) -> tuple[str, dict[str, Any], int | None]:
    """Parse ``[hf::|ms::]ID_OR_PATH[:SUBSET][#ROWS]``.

    An existing path is used unchanged.
    """
    head, mark, tail = entry.rpartition("#")
    place, count = (head, int(tail)) if mark and tail.isdigit() else (entry, None)
    if place_of(place, file) is not None:
        return name_of(place), {"path": locate(place, file)}, count
    hub, _, rest = place.partition("::") if "::" in place else ("ms", "", place)
    if hub.lower() != "hf":
        raise ConfigError(
            "not-supported",
            f"{place!r} is not a local file, and data sets of ModelScope are not supported",
            place=(str(file), "dataset"),
            hint="download it and use the file, or add hf:: before a data set of the Hugging Face "
            "Hub",
        )
    name, _, subset = rest.partition(":")
    return name.split("/")[-1], of_hub(name, subset=subset), count


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
    read=read,
)
