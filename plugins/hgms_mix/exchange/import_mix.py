"""Create a mix file from another trainer's configuration.

The configuration gives the sources, and its mixture becomes the method ``fixed``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import tomlkit

from hgms.store import replace_file
from hgms_core import ConfigError, HgmsError
from hgms_mix.exchange.configuration import COMMIT
from hgms_mix.exchange.trainer import ImportedMix, Trainer

SIZE = 1000


def mix_file(
    imported: ImportedMix, trainer: Trainer, origin: Path, validation: str | None = None
) -> str:
    """Return the text of a mix file.

    Comments mark the settings that the configuration does not contain; users fill them in.
    """
    document = tomlkit.document()
    document.add(tomlkit.comment(f"From {origin.name}, a configuration of {trainer.name}."))
    for note in imported.notes:
        document.add(tomlkit.comment(f"{note[0].upper()}{note[1:]}."))
    document["budget"] = "1 step"
    document["seed"] = 0
    document["method"] = _table(name="fixed", mixture=_table(**imported.mixture))
    task = _table(
        name="source-mixture",
        model=_table(path=imported.model or "MODEL"),
        sources=_table(**{name: _table(**table) for name, table in imported.sources.items()}),
    )
    if imported.model is None:
        task["model"].comment("the configuration names none")
    if validation is not None:
        task["validation"] = _table(validation=_table(path=validation))
    document["task"] = task
    if validation is None:
        document.add(tomlkit.nl())
        document.add(
            tomlkit.comment("Rows that look like what the model shall do; hgms mix needs some:")
        )
        document.add(tomlkit.comment("[task.validation.NAME]"))
        document.add(tomlkit.comment('path = "FILE.jsonl"'))
        document.add(tomlkit.nl())
    document["sample"] = _table(size=SIZE)
    return tomlkit.dumps(document)


def _table(**items: Any) -> Any:
    table = tomlkit.table()
    for key, value in items.items():
        table[key] = value
    return table


def write_mix_file(
    trainer: Trainer, origin: Path, out: Path, validation: str | None = None
) -> ImportedMix:
    """Read ``origin`` and write the mix file ``out``, which must not exist.

    Errors: ConfigError for a configuration that cannot be read, or whose shares are unknown.
    """
    from hgms_mix.lm import Source

    if out.exists():
        raise ConfigError(
            "file-exists",
            "the file already exists",
            place=(str(out),),
            hint="use another --out, or move the file",
        )
    if not origin.is_file():
        raise ConfigError("missing-file", "the file does not exist", place=(str(origin),))
    imported = trainer.read(origin)
    for name, table in imported.sources.items():
        pinned = {"revision": "0" * 40} if table.get("revision") == COMMIT else {}
        try:
            Source(**{**table, **pinned})
        except HgmsError as error:
            raise error.at(str(origin), name) from None
    unknown = [name for name, table in imported.sources.items() if table.get("revision") == COMMIT]
    if unknown:
        note = (
            f"put the commit of {', '.join(unknown)} in the place of {COMMIT}: `git "
            "ls-remote` prints it"
        )
        imported = attrs.evolve(imported, notes=[*imported.notes, note])
    replace_file(out, mix_file(imported, trainer, origin, validation).encode())
    return imported
