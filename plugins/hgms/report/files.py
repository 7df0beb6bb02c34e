"""Files of reports and pictures."""

from __future__ import annotations

from pathlib import Path

from hgms.store import replace_file, writing


def write_file(path: Path, data: bytes) -> None:
    """Replace a file atomically, and create its folder. After an error, the file is unchanged.

    Raises
    ------
    DiskError
        If the file is not writable.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data)
