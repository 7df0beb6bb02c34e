"""An export: the trainer's files, and a README.md.

README.md describes the files and the command for training.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping, Set
from pathlib import Path

from hgms.config.tables import parse_json
from hgms.store import DiskError, read_file, replace_file
from hgms_core import ConfigError
from hgms_core.errors import CheckpointError
from hgms_mix.exchange.sample import Sampled
from hgms_mix.exchange.trainer import UNNAMED, Trainer, differences, model_name
from hgms_mix.exchange.with_datasets import DATASETS
from hgms_mix.exchange.with_trl import TRL

TRAINERS: Mapping[str, Trainer] = {trainer.name: trainer for trainer in (DATASETS, TRL)}


LIST = ".export.json"
"""The file list of every export: its trainer and the files it wrote.

The next export to the folder removes only these files.
"""

ASIDE = ".export.part"
"""The temporary folder of an unfinished export.

A remainder of an interrupted export does not disturb later exports.
"""


def export(sample: Sampled, trainer: Trainer, folder: Path) -> list[str]:
    """Write an export, in a temporary folder until it is complete.

    Return the files that a user starts from, relative to ``folder``.

    Errors: ConfigError if the folder contains other files; DiskError if it cannot be written.
    """
    before = _exported_files(folder, trainer)
    aside = folder / ASIDE
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            notes = [*differences(sample), *trainer.write(sample, aside)]
            replace_file(aside / "README.md", readme(sample, trainer, notes).encode())
            files = {
                path.relative_to(aside).as_posix() for path in aside.rglob("*") if path.is_file()
            }
            for name in sorted(files - before):
                if (folder / name).exists():
                    raise ConfigError(
                        "file-exists",
                        "the file exists and was not written by an export",
                        place=(str(folder / name),),
                        hint="use another --out, or move the file",
                    )
            _write_list(folder, trainer, before | files)  # after a kill, the next export knows both
            for name in before - files:
                (folder / name).unlink(missing_ok=True)
            for name in files:
                (folder / name).parent.mkdir(exist_ok=True)
                (aside / name).replace(folder / name)
            _write_list(folder, trainer, files)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise DiskError(
            "cannot-write",
            f"the export cannot be written: {error.strerror or error}",
            place=(str(folder),),
            hint="use another --out, or free disk space",
        ) from error
    return ["README.md", *trainer.files]


def _write_list(folder: Path, trainer: Trainer, files: Set[str]) -> None:
    replace_file(
        folder / LIST,
        json.dumps({"trainer": trainer.name, "files": sorted(files)}, indent=2).encode(),
    )


def _exported_files(folder: Path, trainer: Trainer) -> Set[str]:
    """Return the files of an earlier export in the folder.

    Raise ConfigError if the folder contains any other file.
    """
    if not folder.exists() or (
        folder.is_dir() and {path.name for path in folder.iterdir()} <= {ASIDE}
    ):
        return frozenset()
    with contextlib.suppress(CheckpointError):
        table = parse_json(read_file(folder / LIST), LIST)
        files = (
            table.get("files")
            if isinstance(table, dict) and table.get("trainer") == trainer.name
            else None
        )
        if isinstance(files, list) and all(
            isinstance(name, str) and _is_below(folder, name) for name in files
        ):
            return frozenset(files)
    raise ConfigError(
        "file-exists",
        f"the folder exists and contains no export for {trainer.name} with a list of its files "
        f"({LIST})",
        place=(str(folder),),
        hint="use another --out, or move the folder",
    )


def _is_below(folder: Path, name: str) -> bool:
    """Return whether a listed file is in the folder, and not reached through a link.

    The list may come from any author.
    """
    return (folder / name).parent.resolve().is_relative_to(folder.resolve()) and Path(
        name
    ).name not in ("", "..")


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
