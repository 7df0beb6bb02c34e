"""OLMo-core: token files with label masks, and a list of sources with shares of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hgms_core import ConfigError
from hgms_core.errors import DataError
from hgms_mix.exchange.sample import Part, Sampled
from hgms_mix.exchange.trainer import Trainer, normalise, write_rows, write_yaml

DTYPES = (np.uint8, np.uint16, np.uint32)


def dtype_of(vocabulary: int) -> Any:
    """Return the smallest unsigned type for all tokens, as OLMo-core reads its files.

    >>> dtype_of(257).__name__, dtype_of(100_278).__name__
    ('uint16', 'uint32')
    """
    return next(kind for kind in DTYPES if vocabulary - 1 <= np.iinfo(kind).max)


def documents(table: Any, part: Part, end: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return tokens and label mask of each row, followed by the end token.

    Rows that are too long are excluded.
    """
    places = table.places
    written = []
    for row in part.rows:
        if row["row"] in places:
            ids, mask = (tensor.numpy() for tensor in table.row(places[row["row"]]))
            written.append(
                (ids, mask) if ids[-1] == end else (np.append(ids, end), np.append(mask, False))
            )
    return written


def write(sample: Sampled, folder: Path) -> Sequence[str]:
    end = sample.tokenizer.eos_token_id
    kind = dtype_of(len(sample.tokenizer))
    if end is None:
        raise ConfigError(
            "missing-token",
            "the tokenizer has no end token, but OLMo-core requires one at the end of each row",
            place=("tokenizer",),
        )
    if missing := [part.name for part in sample.parts if part.name not in sample.tables]:
        raise DataError(
            "no-rows",
            f"all rows of {missing[0]!r} have more than "
            f"max_length={sample.config.task.max_length} tokens of the fine-tuned model",
            place=("task", "max_length"),
            hint="increase task.max_length",
        )
    (folder / "tokens").mkdir(parents=True, exist_ok=True)
    lengths: dict[str, int] = {}
    files: dict[str, str] = {}
    split = 0
    dropped = 0
    for number, part in enumerate(sample.parts):
        written = documents(sample.tables[part.name], part, end)
        dropped += len(part.rows) - len(written)
        split += sum(int((ids == end).sum()) > 1 for ids, _ in written)
        files[part.name] = f"tokens/token_ids_part_{number:04d}.npy"
        flat = np.concatenate([ids for ids, _ in written]).astype(kind)
        # No header: OLMo-core maps the plain array, for any file ending.
        flat.tofile(folder / files[part.name])
        np.concatenate([mask for _, mask in written]).tofile(
            folder / "tokens" / f"labels_mask_part_{number:04d}.npy"
        )
        lengths[part.name] = len(flat)
        write_rows(folder, part, ({"messages": row["messages"]} for row in part.rows))
    shares = normalise(lengths)
    table = {
        "sources": [
            {
                "source_name": part.name,
                "target_ratio": shares[part.name],
                "paths": [files[part.name]],
                "max_repetition_ratio": 1.0,
                "max_source_fraction": 1.0,
            }
            for part in sample.parts
        ]
    }
    write_yaml(
        folder / "mixture.yaml",
        table,
        "sources of olmo_core.data.SourceMixtureList; shares are of tokens",
    )
    facts = (
        f"{sum(lengths.values())} tokens of {np.dtype(kind).name}, {sample.size - dropped} "
        f"rows; a row ends with token {end}"
    )
    notes = [
        (
            f"`tokens/` holds {facts}. They are of the mix's tokenizer: the model that is trained "
            "must have the same."
        ),
        "The ratios to draw from all rows go by the mean lengths of the rows here.",
    ]
    if split:
        notes.append(
            f"{split} of {sample.size - dropped} rows have the end token within, after an answer "
            "or another turn: OLMo-core takes each piece for a document."
        )
    if dropped:
        notes.append(f"{dropped} rows are too long in the tokens of the tuned model, and left out.")
    return notes


def whole(sample: Sampled) -> Mapping[str, str]:
    """Return ω as shares of tokens: a source of long rows has a larger share."""
    lengths = {name: float(table.lengths.double().mean()) for name, table in sample.tables.items()}
    shares = normalise({name: weight * lengths[name] for name, weight in sample.weights.items()})
    return {name: f"`target_ratio: {share:.6g}`" for name, share in shares.items()}


OLMO = Trainer(
    name="olmo",
    files=("mixture.yaml", "tokens/"),
    meaning=(
        "`target_ratio` is the share of a source in the *tokens* of the mixture (they must add "
        "up to one), so a weight of rows "
        "has to be multiplied by the mean length of a source's rows. A source short of its share "
        "is an error, unless "
        "`max_repetition_ratio` > 1 lets it repeat; `max_source_fraction` leaves part of it out"
    ),
    command=(
        "python OLMo-core/src/scripts/train/sft/Olmo-3-7B-SFT.py train NAME BASE_CHECKPOINT "
        "CLUSTER --seq_len=4096 "
        '--dataset_path "$PWD/tokens"'
    ),
    write=write,
    whole=whole,
)
