"""Programs on disk by the code and the settings that they are made from.

A process that finds a program there does not trace the functions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from hgms.compiled.library import DIGITS, Library, SavedFile, is_on_cpu, software
from hgms.compiled.trace import place_of
from hgms.config.fingerprinting import FIRST_PARTY, identify
from hgms.store import digest

SWITCHES = ("TORCH", "OMP_", "MKL_", "ONEDNN_", "HGMS_")
"""First letters of environment variables that may change a program, except folders."""
FOLDERS = ("HGMS_CACHE", "HGMS_DATA", "TORCHINDUCTOR_CACHE_DIR")


@frozen(eq=False)
class Entry:
    """A place on disk for a program.

    ``tensors`` are the tensors of this process that the program may read in addition to its
    arguments. The stored program contains their positions instead of their numbers.
    """

    file: SavedFile
    tensors: list[Tensor]

    @classmethod
    def of(
        cls, parts: tuple[Any, ...], leaves: Sequence[Tensor], ignored: tuple[type, ...]
    ) -> Entry | None:
        """Return the place of a program made from ``parts``, for inputs like ``leaves``.

        The result is None on a GPU, and if a part has no readable code.
        """
        if not is_on_cpu(leaves):
            return None
        with contextlib.suppress(Exception):  # code of users can raise any
            code, tensors = identify(parts, ignored)
            kinds = [(leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves]
            key = digest(repr((code, kinds, *software(), settings(), own_sources())))
            return cls(SavedFile(key[:DIGITS], ".program"), tensors)
        return None

    def load(self) -> Any:
        """Return the stored program; None if it is missing or damaged."""
        for path, content in self.file.contents():
            unpickler = pickle.Unpickler(io.BytesIO(content))
            unpickler.persistent_load = self._find  # type: ignore[method-assign]
            with contextlib.suppress(Exception):  # as many kinds as pickle has
                return unpickler.load()
            path.unlink(missing_ok=True)
        return None

    def store(self, program: Any) -> None:
        """Store a program, if all its functions and tensors can be found by another process."""
        stream = io.BytesIO()
        pickler = pickle.Pickler(stream)
        pickler.persistent_id = self._name  # type: ignore[method-assign]
        with contextlib.suppress(Exception):
            pickler.dump(program)
            self.file.store(stream.getvalue())

    def _name(self, value: Any) -> Any:
        if isinstance(value, Library):
            return "library", value.key
        if not isinstance(value, Tensor):
            return None
        places = [place_of(tensor) for tensor in self.tensors]
        return "tensor", places.index(place_of(value))

    def _find(self, name: tuple[str, Any]) -> Any:
        kind, key = name
        if kind == "tensor":
            return self.tensors[key].detach()
        library = Library.load(key)
        if library is None:
            raise FileNotFoundError(key)
        return library


def settings() -> tuple[Any, ...]:
    """Return the settings of torch and of the environment that may change a program."""
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
    parts = []
    for name in sorted(FIRST_PARTY):
        spec = importlib.util.find_spec(name)
        folders = [] if spec is None else list(spec.submodule_search_locations or ())
        for path in sorted(file for folder in folders for file in Path(folder).rglob("*.py")):
            parts.append(path.read_bytes())
    return digest(*parts)
