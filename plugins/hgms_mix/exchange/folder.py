"""An export: TRL's files, and a README.md with the command for training."""

from __future__ import annotations

import shutil
from pathlib import Path

from hgms.arguments import require
from hgms.store import DiskError, replace_file
from hgms_mix.exchange import trl
from hgms_mix.exchange.sample import Sampled

FILES = ("README.md", "sft.yaml")
"""The files that a user starts from."""


def export(sample: Sampled, folder: Path) -> None:
    """Write an export to a new folder. It appears when it is complete.

    Raises
    ------
    ConfigError
        If the folder exists and is not empty.
    DiskError
        If it cannot be written.
    """
    require(
        not folder.exists() or (folder.is_dir() and not any(folder.iterdir())),
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
            notes = [*differences(sample), *trl.write(sample, part)]
            replace_file(part / "README.md", readme(sample, notes).encode())
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


def differences(sample: Sampled) -> list[str]:
    """Return the differences between the exported training and ``hgms mix``.

    Sources without a row are also listed.
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
    return notes


def readme(sample: Sampled, notes: list[str]) -> str:
    """Return the README text: the facts that a user of the folder needs."""
    lines = [
        "| source | learned weight | rows here | share here | rows in all |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, rows in sample.rows.items():
        title = name.replace("|", "\\|")
        counts = f"{len(rows)} | {sample.shares[name]:.4f} | {sample.facts['capacity'][name]}"
        lines.append(f"| {title} | {sample.weights[name]:.4f} | {counts} |")
    if sample.is_ranked:
        notes = [
            *notes,
            "The method ranked rows: these are its best, and weights did not choose them.",
        ]
    if trl.model_name(sample) == trl.UNNAMED:
        notes = [
            *notes,
            "The mix's model is built from a configuration and has no name: write one in the "
            f"place of `{trl.UNNAMED}`.",
        ]
    template = (
        "Turns are written by the model's own chat template, as `hgms mix` did."
        if sample.chat
        else f"The template `{sample.config.task.template}` is written into the rows: the trainer "
        "must add none."
    )
    return "\n".join(
        [
            f"# {sample.title}, for TRL",
            "",
            f"{sample.size} rows that `hgms mix` drew by a learned mixture. In this folder:",
            "",
            "```bash",
            trl.COMMAND,
            "```",
            "",
            "The mixture is in the rows: an epoch takes each of them once.",
            "",
            *lines,
            "",
            *[f"- {note}" for note in (*notes, template)],
            "",
        ]
    )
