"""Finished stages of a tuning in a folder."""

from __future__ import annotations

import io
import re
from pathlib import Path

import torch

from hgms.config.fingerprinting import fingerprint
from hgms.store import Folder
from hgms.tuning.meter import Stage


class StageFolder:
    """Store the result of each stage in one file; the manifest of the folder records it.

    Raises
    ------
    CheckpointError
        ``other-settings`` for a folder with other arguments, and the errors of
        :class:`hgms.store.Folder`.
    """

    def __init__(self, path: str | Path, *inputs: object) -> None:
        self.folder = Folder(Path(path), fingerprint(inputs))

    def stages(self) -> dict[str, Stage]:
        """Return the stored stages by name."""
        files = self.folder.manifest().files
        stored = (
            torch.load(io.BytesIO(self.folder.read(file)), weights_only=True) for file in files
        )
        return {named["name"]: named["stage"] for named in stored}

    def save(self, name: str, stage: Stage) -> None:
        buffer = io.BytesIO()
        torch.save({"name": name, "stage": stage}, buffer)
        file = _file_of(name)
        self.folder.write(file, buffer.getvalue())
        self.folder.commit([file], facts={}, keep=list(self.folder.manifest().files))


def _file_of(name: str) -> str:
    """Return the file of a stage.

    Examples
    --------
    >>> _file_of("shared level, +2 in log λ")
    'shared-level-2-in-log.pt'
    """
    words = re.findall(r"[a-z0-9.+-]*[a-z0-9]", name.lower())
    return "-".join(word.lstrip("+") for word in words) + ".pt"
