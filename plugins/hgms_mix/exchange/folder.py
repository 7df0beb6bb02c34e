"""An export: the trainer's files, and a README.md.

README.md describes the files and the command for training.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from hgms.store import DiskError, replace_file
from hgms_core import ConfigError
from hgms_mix.exchange.sample import Sampled
from hgms_mix.exchange.trainer import UNNAMED, Trainer, differences, model_name
from hgms_mix.exchange.with_datasets import DATASETS
from hgms_mix.exchange.with_trl import TRL

TRAINERS: Mapping[str, Trainer] = {trainer.name: trainer for trainer in (DATASETS, TRL)}


def export(sample: Sampled, trainer: Trainer, folder: Path) -> list[str]:
    """Write an export to a new folder. It appears when it is complete.

    Return the files that a user starts from, relative to ``folder``.

    Errors: ConfigError if the folder exists and is not empty; DiskError if it cannot be written.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(
            "file-exists",
            "the folder exists and is not empty",
            place=(str(folder),),
            hint="use another --out, or remove the folder",
        )
    folder = folder.resolve()
    part = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            notes = [*differences(sample), *trainer.write(sample, part)]
            replace_file(part / "README.md", readme(sample, trainer, notes).encode())
            if folder.exists():
                folder.rmdir()
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise DiskError(
            "cannot-write",
            f"the export cannot be written: {error.strerror or error}",
            place=(str(folder),),
            hint="use another --out, or free disk space",
        ) from error
    return ["README.md", *trainer.files]


def readme(sample: Sampled, trainer: Trainer, notes: list[str]) -> str:
    """Return the README text: the facts that a user of the folder needs."""
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
        lines.append(
            "| " + " | ".join([*cells, *([] if sample.ranked else [whole[part.name]])]) + " |"
        )
    if sample.ranked:
        notes = [
            *notes,
            "The method ranked rows: these are its best, and weights did not choose them.",
        ]
    if model_name(sample) == UNNAMED:
        notes = [
            *notes,
            (
                "The mix's model is built from a configuration and has no name: write one in the "
                f"place of `{UNNAMED}`."
            ),
        ]
    if sample.chat:
        notes = [*notes, "Turns are written by the model's own chat template, as `hgms mix` did."]
    else:
        notes = [
            *notes,
            (
                f"The template `{sample.config.task.template}` is written into the rows: the "
                "trainer must add none."
            ),
        ]
    return "\n".join(
        [
            f"# {sample.title}, for {trainer.name}",
            "",
            f"{sample.size} rows that `hgms mix` drew by a learned mixture. In this folder:",
            "",
            "```bash",
            trainer.command,
            "```",
            "",
            "The mixture is in the rows: an epoch takes each of them once.",
            "",
            *lines,
            "",
            f"What a weight means there: {trainer.meaning}.",
            "",
            *[f"- {note}" for note in notes],
            "",
        ]
    )
