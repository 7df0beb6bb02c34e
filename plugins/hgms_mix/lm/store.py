"""Arrays on disk in safetensors files.

Arrays are written in pieces, so they may be larger than memory. They are memory-mapped for reading.

The file header contains the sha256 of the arrays. A file is written under a temporary name, flushed
and renamed. A file with the final name is therefore complete.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from hgms.store import Digest
from hgms_core.errors import DataError
from hgms_core.torch_errors import first_line

NAMES = {"int64": "I64", "int32": "I32", "bool": "BOOL"}
READ = 2**24
"""Bytes of a file that are read at a time."""


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
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise DataError(
            "cannot-write",
            f"the token cache cannot be written: {getattr(error, 'strerror', None) or error}",
            place=(str(folder),),
            hint="free disk space, or set HGMS_CACHE to another folder",
        ) from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Give this process exclusive access for writing the file ``path``.

    Create its folder if the folder does not exist.
    """
    from filelock import SoftFileLease

    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Use a lease: the cache may be on a disk shared by several machines, where locks of the
        # operating system may not work.
        lock = SoftFileLease(path.with_suffix(".lease"), lease_duration=60.0).acquire()
    with lock:
        yield


def save(
    path: Path,
    leaves: Mapping[str, Leaf],
    types: Mapping[str, str],
    what: str,
    about: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Write the arrays, then map the file into memory.

    Errors: DataError if the folder cannot be written, or if the arrays read back differ.
    """
    write(path, leaves, about)
    if (stored := load(path, types, what, about)) is None:
        raise DataError(
            "cannot-write",
            "the token cache differs from the data that was written",
            place=(str(path.parent),),
            hint="check the disk",
        )
    return stored[0]


def write(path: Path, leaves: Mapping[str, Leaf], about: Mapping[str, Any]) -> None:
    """Write the arrays, with ``about`` (JSON) in the header.

    The arrays with the widest numbers come first, so that each array is aligned.

    Errors: DataError if the folder cannot be written.
    """
    with writing(path.parent):
        _write(path, leaves, about)


def _write(path: Path, leaves: Mapping[str, Leaf], about: Mapping[str, Any]) -> None:
    ordered = sorted(leaves.items(), key=lambda item: -np.dtype(item[1].dtype).itemsize)
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    sha = Digest()
    at = 0
    head: dict[str, Any] = {"__metadata__": {"about": json.dumps(about), "sha256": "0" * 64}}
    for name, leaf in ordered:
        end = at + leaf.count * np.dtype(leaf.dtype).itemsize
        head[name] = {"dtype": NAMES[leaf.dtype], "shape": [leaf.count], "data_offsets": [at, end]}
        at = end
    try:
        with aside.open("wb") as stream:
            stream.write(_header(head))
            for name, leaf in ordered:
                written = 0
                for piece in leaf.pieces():
                    data = np.ascontiguousarray(piece, leaf.dtype)
                    sha.add(data.data)
                    stream.write(data.data)
                    written += len(data)
                if written != leaf.count:
                    raise ValueError(f"{name}: {written} numbers instead of {leaf.count}")
            head["__metadata__"]["sha256"] = sha.text
            stream.seek(0)
            stream.write(_header(head))
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def _header(head: Mapping[str, Any]) -> bytes:
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def load(
    path: Path, types: Mapping[str, str], what: str, about: Mapping[str, Any]
) -> tuple[dict[str, Tensor], Any] | None:
    """Map the arrays of a file into memory, and return them with the contents of the header.

    Return None if the file does not exist. Warn and return None if the file is damaged or its data
    differs from ``about``. Cost: one pass over the file.
    """
    if not path.exists():
        return None
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as stored:
            head = stored.metadata() or {}
            leaves = {leaf: stored.get_tensor(leaf) for leaf in types}
        written = json.loads(head.get("about", "{}"))
        if any(written.get(key) != value for key, value in about.items()):
            problem = f"it is of another {what}"
        elif any(str(leaves[leaf].dtype) != f"torch.{dtype}" for leaf, dtype in types.items()):
            problem = "a tensor of the wrong type"
        elif head.get("sha256") != _checksum(path):
            problem = "its contents do not match the recorded sha256"
        else:
            return leaves, written
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        problem = first_line(error)
    warn(f"the token cache entry {path} is damaged ({problem}): it is made anew")
    return None


def _checksum(path: Path) -> str:
    """Compute the checksum of the arrays.

    The file is read, not mapped, so that none of its pages stay in memory.
    """
    sha = Digest()
    with path.open("rb") as stream:
        stream.seek(8 + int.from_bytes(stream.read(8), "little"))
        while data := stream.read(READ):
            sha.add(data)
    return sha.text
