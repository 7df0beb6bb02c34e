"""An export: the trainer's files, and a README.md that says what they are and how to train with them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from hgms_core import ConfigError
from hgms_exchange.sampled import Sampled
from hgms_exchange.trainer import UNNAMED, Trainer, model_name
from hgms_exchange.with_axolotl import AXOLOTL
from hgms_exchange.with_datasets import DATASETS
from hgms_exchange.with_llamafactory import LLAMAFACTORY
from hgms_exchange.with_ms_swift import MS_SWIFT
from hgms_exchange.with_olmo import OLMO
from hgms_exchange.with_trl import TRL
from hgms_run import DiskError, replace_file

TRAINERS: Mapping[str, Trainer] = {trainer.name: trainer for trainer in (AXOLOTL, DATASETS, LLAMAFACTORY, MS_SWIFT, OLMO, TRL)}


MARK = "rows that `hgms mix` drew by a learned mixture"
"""In the README of every export: names such as sft.yaml and rows/ are others' too, and what is there is replaced."""


def export(sample: Sampled, trainer: Trainer, folder: Path) -> list[str]:
    """Writes all of it, aside until it is whole; the files that a person starts from, relative to ``folder``.

    Errors: ConfigError where the folder holds something else; DiskError where it cannot be written.
    """
    if folder.exists() and not (folder.is_dir() and (not any(folder.iterdir()) or _is_export(folder, trainer))):
        raise ConfigError(f"{folder} is there and holds no export for {trainer.name}\n  choose another --out, or move it away")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            notes = list(trainer.write(sample, Path(aside)))
            replace_file(Path(aside) / "README.md", readme(sample, trainer, notes).encode())
            for stale in (*folder.glob("rows/*.jsonl"), *folder.glob("tokens/*.npy")):
                stale.unlink()  # of an earlier export with other sources: OLMo-core takes all that is there
            for path in sorted(Path(aside).rglob("*")):  # a folder before what it holds
                place = folder / path.relative_to(aside)
                if path.is_dir():
                    place.mkdir(exist_ok=True)
                else:
                    path.replace(place)
    except OSError as error:
        raise DiskError(
            f"cannot write {folder}: {error.strerror or error}\n  choose another --out, or free some space"
        ) from error
    return ["README.md", *trainer.files]


def _is_export(folder: Path, trainer: Trainer) -> bool:
    text = (folder / "README.md").read_text(encoding="utf-8", errors="replace") if (folder / "README.md").is_file() else ""
    return MARK in text and text.split("\n")[0].endswith(f", for {trainer.name}")


def readme(sample: Sampled, trainer: Trainer, notes: list[str]) -> str:
    """What a person who opens the folder has to know."""
    whole = {} if sample.ranked else trainer.whole(sample)
    head = ["source", "learned weight", "rows here", "share here", "rows in all"] + (
        [] if sample.ranked else ["to draw from all rows"]
    )
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    for part in sample.parts:
        cells = [
            part.name.replace("|", "\\|"),
            f"{part.weight:.4f}",
            str(len(part.rows)),
            f"{sample.shares[part.name]:.4f}",
            str(part.available),
        ]
        lines.append("| " + " | ".join([*cells, *([] if sample.ranked else [whole[part.name]])]) + " |")
    if sample.ranked:
        notes = [*notes, "The method ranked rows: these are its best, and weights did not choose them."]
    if model_name(sample) == UNNAMED:
        notes = [
            *notes,
            f"The mix's model is built from a configuration and has no name: write one in the place of `{UNNAMED}`.",
        ]
    if sample.chat:
        notes = [*notes, "Turns are written by the model's own chat template, as `hgms mix` did."]
    else:
        notes = [*notes, f"The template `{sample.config.task.template}` is written into the rows: the trainer must add none."]
    return "\n".join([
        f"# {sample.title}, for {trainer.name}", "",
        f"{sample.size} {MARK}. In this folder:", "",
        "```bash", trainer.command, "```", "",
        "The mixture is in the rows: an epoch takes each of them once.", "",
        *lines, "",
        f"What a weight means there: {trainer.meaning}.", "",
        *[f"- {note}" for note in notes], "",
    ])  # fmt: skip
