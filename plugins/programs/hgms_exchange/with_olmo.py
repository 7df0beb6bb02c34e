"""OLMo-core: token files with label masks, and a list of sources with their shares of the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hgms_core import ConfigError, DataError
from hgms_exchange.sampled import Part, Sampled
from hgms_exchange.trainer import Brought, Trainer, located, named, normalised, numbers, read_mapping, write_rows, write_yaml

DTYPES = (np.uint8, np.uint16, np.uint32)


def dtype_of(vocabulary: int) -> Any:
    """The smallest unsigned type that holds every token, which is what OLMo-core takes a file for.

    >>> dtype_of(257).__name__, dtype_of(100_278).__name__
    ('uint16', 'uint32')
    """
    return next(kind for kind in DTYPES if vocabulary - 1 <= np.iinfo(kind).max)


def tokens(sample: Sampled, part: Part, table: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Each row's tokens and label mask, without the rows that are too long for the tokenizer of the tuned model."""
    places = table.places
    for row in part.rows:
        if row["row"] in places:
            yield table.row(places[row["row"]])


def write(sample: Sampled, folder: Path) -> Sequence[str]:
    tables, end = sample.config.task.tables(sample.tokenizer, sample.config.sample.of), sample.tokenizer.eos_token_id
    kind = dtype_of(len(sample.tokenizer))
    (folder / "tokens").mkdir(parents=True, exist_ok=True)
    lengths: dict[str, int] = {}
    files: dict[str, str] = {}
    split, dropped = 0, 0
    for number, part in enumerate(sample.parts):
        rows = list(tokens(sample, part, tables[part.name]))
        if not rows:
            raise DataError(
                f"no row of {part.name!r} is short enough in the tokens of the tuned model\n  raise task.max_length"
            )
        dropped += len(part.rows) - len(rows)
        written = [
            (ids.tolist() + ([] if ids[-1] == end else [end]), mask.tolist() + ([] if ids[-1] == end else [False]))
            for ids, mask in rows
        ]
        split += sum(ids.count(end) > 1 for ids, _ in written)
        flat = np.array([token for ids, _ in written for token in ids], dtype=kind)
        mask = np.array([learned for _, marks in written for learned in marks], dtype=np.bool_)
        files[part.name] = f"tokens/token_ids_part_{number:04d}.npy"
        flat.tofile(folder / files[part.name])  # no header: OLMo-core maps the plain array, whatever the ending says
        mask.tofile(folder / "tokens" / f"labels_mask_part_{number:04d}.npy")
        lengths[part.name] = len(flat)
        write_rows(folder, part, ({"messages": row["messages"]} for row in part.rows))
    shares = normalised(lengths)
    table = {
        "sources": [
            {"source_name": part.name, "target_ratio": shares[part.name], "paths": [files[part.name]],
             "max_repetition_ratio": 1.0, "max_source_fraction": 1.0}
            for part in sample.parts
        ]
    }  # fmt: skip
    write_yaml(folder / "mixture.yaml", table, "sources of olmo_core.data.SourceMixtureList; shares are of tokens")
    facts = (
        f"{sum(lengths.values())} tokens of {np.dtype(kind).name}, {sample.size - dropped} rows; a row ends with token {end}"
    )
    notes = [f"`tokens/` holds {facts}. They are of the mix's tokenizer: the model that is trained must have the same."]
    if split:
        notes.append(f"{split} rows have the end token within (several answers): OLMo-core takes each piece for a document.")
    if dropped:
        notes.append(f"{dropped} rows are too long in the tokens of the tuned model, and left out.")
    return notes


def whole(sample: Sampled) -> Mapping[str, str]:
    """ω as shares of tokens: a source of long rows has a larger one."""
    tables = sample.config.task.tables(sample.tokenizer, sample.config.sample.of)
    lengths = {part.name: float(tables[part.name].lengths.double().mean()) for part in sample.parts}
    shares = normalised({part.name: part.weight * lengths[part.name] for part in sample.parts})
    return {name: f"`target_ratio: {share:.6g}`" for name, share in shares.items()}


def read(path: Path) -> Brought:
    listed = read_mapping(path, "list of sources of OLMo-core").get("sources")
    if (
        not isinstance(listed, list)
        or not listed
        or not all(isinstance(part, dict) and "target_ratio" in part for part in listed)
    ):
        raise ConfigError(f"{path} has no 'sources': a list of {{source_name, target_ratio, paths}}, as OLMo-core reads it")
    ratios = numbers([part["target_ratio"] for part in listed], len(listed), f"{path}: target_ratio")
    sources: dict[str, dict[str, Any]] = {}
    weights: dict[str, float] = {}
    for part, ratio in zip(listed, ratios, strict=True):
        name = named(sources, str(part.get("source_name")))
        rows = _rows(name, path)
        sources[name] = {"path": located(rows, path)}
        weights[name] = ratio / _mean_length(name, sources[name])
    note = "shares of tokens were made shares of rows by the mean number of characters of a row"
    return Brought(sources=sources, mixture=normalised(weights), notes=[note])


def _rows(name: str, file: Path) -> str:
    from hgms_exchange.sampled import stems_of

    wanted = f"rows/{stems_of([name])[name]}.jsonl"
    if not (file.resolve().parent / wanted).is_file():
        raise ConfigError(
            f"OLMo-core's files hold tokens, and hgms mix reads rows of text: there is no {wanted} beside {file}\n"
            f"  put the rows of {name!r} there"
        )
    return wanted


def _mean_length(name: str, table: Mapping[str, Any]) -> float:
    from hgms_llm import Source, read_examples

    examples = read_examples(name, Source(**table))
    return sum(len(message.text) for example in examples for message in example.messages) / len(examples)


OLMO = Trainer(
    name="olmo",
    files=("mixture.yaml", "tokens/"),
    meaning=(
        "`target_ratio` is the share of a source in the *tokens* of the mixture (they must add up to one), so a weight of rows "
        "has to be multiplied by the mean length of a source's rows. A source short of its share is an error, unless "
        "`max_repetition_ratio` > 1 lets it repeat; `max_source_fraction` leaves part of it out"
    ),
    command=(
        "python OLMo-core/src/scripts/train/sft/Olmo-3-7B-SFT.py train NAME BASE_CHECKPOINT CLUSTER --seq_len=4096 "
        '--dataset_path "$PWD/tokens"'
    ),
    write=write,
    whole=whole,
    read=read,
)
