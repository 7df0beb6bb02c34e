"""Results on disk, by the code and the settings that determine them.

A result can be stored if pickle can read it, for example compiled functions and their structure. It
may refer to tensors of the code; the file contains their positions instead of their numbers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import pickle
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from hgms.config.fingerprinting import FIRST_PARTY, identify
from hgms.store import DIGITS, SavedFile, digest

SWITCHES = ("TORCH", "OMP_", "MKL_", "ONEDNN_", "HGMS_")
"""First letters of environment variables that may change results, except the folders."""
FOLDERS = ("HGMS_CACHE", "HGMS_DATA", "TORCHINDUCTOR_CACHE_DIR")


@frozen(eq=False)
class CodeCache:
    """A place on disk for a result of code; ``tensors`` are the tensors of the code."""

    file: SavedFile
    tensors: list[Tensor]

    @classmethod
    def of(cls, kind: str, code: Any, *more: Any, ignored: tuple[type, ...] = ()) -> CodeCache:
        """Return the place of a result of ``code``, in the folder ``kind`` of the cache.

        ``more`` are values that are read in addition; their ``repr`` identifies them. Objects of
        the ``ignored`` types are no part of the code.

        Raises
        ------
        Unidentified
            If a part of the code has no readable source or values.
        """
        known, tensors = identify(code, ignored)
        key = digest(repr((known, more, settings(), own_sources())))
        return cls(SavedFile(kind, key[:DIGITS], ".pickle"), tensors)

    def load(self) -> Any:
        """Return the stored result, or None if the result or a library is missing."""
        for path, content in self.file.contents():
            unpickler = pickle.Unpickler(io.BytesIO(content))
            unpickler.persistent_load = self._tensor  # type: ignore[method-assign]
            with contextlib.suppress(Exception):  # unpickling can raise any
                return unpickler.load()
            with contextlib.suppress(OSError):  # a cache that is not writable
                path.unlink()
        return None

    def store(self, result: Any) -> None:
        """Store a result, if pickle can read it and its tensors are tensors of the code."""
        stream = io.BytesIO()
        pickler = pickle.Pickler(stream)
        pickler.persistent_id = self._position  # type: ignore[method-assign]
        with contextlib.suppress(Exception):  # pickling can raise any
            pickler.dump(result)
            self.file.store(stream.getvalue())

    def _position(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        return [place_of(tensor) for tensor in self.tensors].index(place_of(value))

    def _tensor(self, position: int) -> Tensor:
        return self.tensors[position].detach()


def place_of(value: Tensor) -> Hashable:
    """Return a key of the memory and the shape of a tensor."""
    memory = value.untyped_storage()._cdata
    return memory, value.storage_offset(), value.shape, value.stride(), value.dtype


def settings() -> tuple[Any, ...]:
    """Return the settings of torch and of the environment that may change a result."""
    switches = [
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(SWITCHES) and name not in FOLDERS
    ]
    return (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        sorted(switches),
    )


@functools.cache
def own_sources() -> str:
    """Return a digest of the sources of HGMS."""
    specs = [importlib.util.find_spec(name) for name in sorted(FIRST_PARTY)]
    folders = [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    return digest(*(file.read_bytes() for file in files))
