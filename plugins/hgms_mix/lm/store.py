"""Arrays on disk: folders of the store with one NumPy file per array.

Arrays are written in pieces, so they may be larger than memory. They are memory-mapped for reading.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from hgms.store import DiskError, Folder, hold_lease
from hgms_core.errors import CheckpointError, DataError

PARTS = "parts"
"""The folder of finished parts in an entry that is in progress."""


@final
@frozen
class Leaf:
    """An array of ``count`` numbers in ``pieces``.

    The pieces are recomputed on each request.
    """

    dtype: str
    count: int
    pieces: Callable[[], Iterator[np.ndarray]]

    @classmethod
    def of(cls, array: np.ndarray) -> Leaf:
        return cls(str(array.dtype), len(array), lambda: iter([array]))

    def tensor(self) -> Tensor:
        """Return the whole array in memory."""
        pieces = [np.asarray(piece, self.dtype) for piece in self.pieces()]
        return torch.from_numpy(np.concatenate(pieces) if len(pieces) != 1 else pieces[0].copy())


@functools.cache
def warn(message: str) -> None:
    """Print a message of the library once per process."""
    logging.getLogger("hgms").warning(message)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Convert an error of writing into a DataError that names the folder."""
    try:
        yield
    except (OSError, DiskError) as error:
        reason = error.message if isinstance(error, DiskError) else error.strerror or str(error)
        raise DataError(
            "cannot-write",
            f"the token cache cannot be written: {reason}",
            place=(str(folder),),
            hint="free disk space, or set HGMS_CACHE to another folder",
        ) from error


@contextlib.contextmanager
def lock(folder: Folder) -> Iterator[None]:
    """Give this process exclusive access for writing; wait for another process.

    The lease is next to the folder, which is created only by the first file.
    """
    root = folder.path.parent
    with contextlib.ExitStack() as held:
        with writing(root):
            held.enter_context(hold_lease(root, f".{folder.path.name}.lease", patience=math.inf))
        yield


def save(
    folder: Folder, leaves: Mapping[str, Leaf], types: Mapping[str, str], facts: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Write the arrays, then map the file into memory.

    Raises
    ------
    DataError
        If the folder cannot be written, or if the arrays read back differ.
    """
    write(folder, leaves, facts)
    if (stored := load(folder, types)) is None:
        raise DataError(
            "cannot-write",
            "the token cache differs from the data that was written",
            place=(str(folder.path),),
            hint="check the disk",
        )
    return stored[0]


def write(folder: Folder, leaves: Mapping[str, Leaf], facts: Mapping[str, Any]) -> None:
    """Write the arrays and facts about them (JSON).

    Raises
    ------
    DataError
        If the folder cannot be written.
    """
    with writing(folder.path.parent):
        for name, leaf in leaves.items():
            folder.write(file_of(name), _serialize(leaf))
        folder.commit(map(file_of, leaves), facts=facts, done=True)


def file_of(name: str) -> str:
    """Return the name of the file of an array."""
    return f"{name}.npy"


def _serialize(leaf: Leaf) -> Iterator[bytes | memoryview]:
    """Yield an array in NumPy's file format."""
    head = io.BytesIO()
    kind = np.lib.format.dtype_to_descr(np.dtype(leaf.dtype))
    shape = {"descr": kind, "fortran_order": False, "shape": (leaf.count,)}
    np.lib.format.write_array_header_1_0(head, shape)
    yield head.getvalue()
    for piece in leaf.pieces():
        yield np.ascontiguousarray(piece, leaf.dtype).data


def load(
    folder: Folder, types: Mapping[str, str]
) -> tuple[dict[str, Tensor], Mapping[str, Any]] | None:
    """Map the arrays of a folder into memory, and return them with the facts about them.

    Return None if the folder contains no arrays. Warn and return None if they are damaged. Cost:
    one pass over the files.
    """
    try:
        manifest = folder.manifest()
        if manifest.is_new:
            return None
        files = {name: folder.verified_path(file_of(name)) for name in types}
    except CheckpointError as error:
        warn(f"the cache entry {folder.path} is recomputed: {error.message}")
        return None
    # "c": torch requires writable arrays, and the file stays unchanged.
    leaves = {name: torch.from_numpy(np.load(file, mmap_mode="c")) for name, file in files.items()}
    return leaves, manifest.facts
