"""Arrays on disk: folders of the store with one file of plain numbers per array.

They are memory-mapped for reading.
"""

from __future__ import annotations

import functools
import logging
import math
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from hgms.store import Folder, hold_lease
from hgms_core.errors import CheckpointError

Arrays = Mapping[str, np.ndarray]


@functools.cache
def warn(message: str) -> None:
    """Print a message of the library once per process."""
    logging.getLogger("hgms").warning(message)


def lock(folder: Folder) -> AbstractContextManager[object]:
    """Give this process exclusive access for writing; wait for another process.

    The lease is next to the folder, which is created only by the first file.
    """
    return hold_lease(folder.path.parent, f".{folder.path.name}.lease", patience=math.inf)


def save(
    folder: Folder, types: Mapping[str, str], arrays: Arrays, facts: Mapping[str, Any]
) -> None:
    """Write the arrays, and facts about them (JSON), in place of earlier files.

    Raises
    ------
    DiskError
        If the folder cannot be written.
    """
    shutil.rmtree(folder.path, ignore_errors=True)
    for name, dtype in types.items():
        folder.write(file_of(name), np.asarray(arrays[name], dtype).tobytes())
    folder.commit(map(file_of, types), facts=facts, done=True)


def file_of(name: str) -> str:
    """Return the name of the file of an array."""
    return f"{name}.bin"


def load(
    folder: Folder, types: Mapping[str, str]
) -> tuple[dict[str, np.ndarray], Mapping[str, Any]] | None:
    """Map the arrays of a finished folder into memory, and return them with the facts about them.

    The result is None if the folder is not finished, or damaged, which is also logged. Cost:
    one pass over the files.
    """
    try:
        manifest = folder.manifest()
        if manifest.status != "done":
            return None
        for name in types:
            folder.verified_path(file_of(name))
    except CheckpointError as error:
        warn(f"the cache entry {folder.path} is recomputed: {error.message}")
        return None
    # "c": torch requires writable arrays, and the file stays unchanged.
    arrays: dict[str, np.ndarray] = {}
    for name, dtype in types.items():
        path = folder.path / file_of(name)
        is_empty = path.stat().st_size == 0
        arrays[name] = np.zeros(0, dtype) if is_empty else np.memmap(path, dtype, mode="c")
    return arrays, manifest.facts
