"""Arrays on disk: safetensors files, written piece by piece (they may be larger than memory) and
mapped when they are read.

A file holds the sha256 of its arrays in its header. It is written aside, flushed and renamed: a
file of its name is whole.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
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

from hgms_core.errors import DataError
from hgms_core.torch_errors import first_line

NAMES = {"int64": "I64", "int32": "I32", "bool": "BOOL"}
READ = 2**24
"""Bytes of a file that are looked at together."""


@final
@frozen
class Leaf:
    """An array of ``count`` numbers that comes in ``pieces``; they are made anew each time they
    are asked for.
    """

    dtype: str
    count: int
    pieces: Callable[[], Iterator[np.ndarray]]

    @classmethod
    def of(cls, array: np.ndarray) -> Leaf:
        return cls(str(array.dtype), len(array), lambda: iter([array]))

    def tensor(self) -> Tensor:
        """All of it, in memory."""
        pieces = [np.asarray(piece, self.dtype) for piece in self.pieces()]
        return torch.from_numpy(np.concatenate(pieces) if len(pieces) != 1 else pieces[0].copy())


@functools.cache
def warn(message: str) -> None:
    """A message of the library, once in a process."""
    logging.getLogger("hgms").warning(message)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What cannot be written becomes a DataError that says where."""
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
    """While this process alone may make the file ``path``; its folder is made where there is
    none.
    """
    from filelock import SoftFileLease

    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        # a lease, since the cache may lie on a disk of several machines, where locks of the
        # operating system may not hold
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
    """Writes the arrays and maps what was written.

    Errors: DataError where the folder cannot be written, or what is read differs.
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
    """The arrays, widest numbers first so that each is aligned, with ``about`` (JSON) in the
    header.

    Errors: DataError where the folder cannot be written.
    """
    with writing(path.parent):
        _write(path, leaves, about)


def _write(path: Path, leaves: Mapping[str, Leaf], about: Mapping[str, Any]) -> None:
    ordered = sorted(leaves.items(), key=lambda item: -np.dtype(item[1].dtype).itemsize)
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    sha = hashlib.sha256()
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
                    sha.update(data.data)
                    stream.write(data.data)
                    written += len(data)
                if written != leaf.count:
                    raise ValueError(f"{name}: {written} numbers instead of {leaf.count}")
            head["__metadata__"]["sha256"] = sha.hexdigest()
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
    """The arrays, mapped into memory, with what the header says; None where there is no such file,
    or (with a warning) where it is damaged, or made of something else than ``about``. Cost: one
    pass over the file.
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
    """Of the arrays; read, not mapped, so that no page of them stays in memory."""
    sha = hashlib.sha256()
    with path.open("rb") as stream:
        stream.seek(8 + int.from_bytes(stream.read(8), "little"))
        while data := stream.read(READ):
            sha.update(data)
    return sha.hexdigest()
