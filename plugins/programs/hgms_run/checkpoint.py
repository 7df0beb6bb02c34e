"""A method's state as files and back: nested values as JSON, their tensors as safetensors. Nothing is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from hgms_core import CheckpointError, State
from hgms_run.files import replace_file
from hgms_run.sealed import damaged

TENSOR = "$tensor"


def pack(state: State) -> tuple[Any, dict[str, Tensor]]:
    """A nested state as (JSON structure, tensors by path).

    >>> import torch
    >>> pack({"a": {"b": torch.ones(2)}, "n": 3})[0]
    {'a': {'b': {'$tensor': 'a/b'}}, 'n': 3}
    """
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            # A copy of its own: safetensors stores no views and no shared memory.
            tensors[path] = value.detach().to("cpu", copy=True).contiguous()
            return {TENSOR: path}
        if isinstance(value, Mapping):
            return {str(key): walk(item, f"{path}/{key}" if path else str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [walk(item, f"{path}/{i}") for i, item in enumerate(value)]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(
            f"state holds a {type(value).__name__} at {path!r}; use tensors, numbers, strings, None, dicts or lists"
        )

    return walk(state, ""), tensors


def unpack(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`pack` (tuples come back as lists)."""
    if isinstance(structure, dict):
        if set(structure) == {TENSOR}:
            return tensors[structure[TENSOR]]
        return {key: unpack(item, tensors) for key, item in structure.items()}
    return [unpack(item, tensors) for item in structure] if isinstance(structure, list) else structure


def save_state(path: str | Path, state: State) -> None:
    """Writes a nested state of tensors, numbers, strings and None into one file, whole or not at all.

    A safetensors file: the tensors, and the structure as JSON in its header. Tuples come back as lists, keys as strings.

    Errors: TypeError for a state that holds anything else; CheckpointError where the disk refuses.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_state(f"{folder}/state.safetensors", {"moments": {"m": torch.ones(2)}, "step": 3})
    ...     load_state(f"{folder}/state.safetensors")
    {'moments': {'m': tensor([1., 1.])}, 'step': 3}

    .. versionadded:: 0.2
    """
    structure, tensors = pack(state)
    replace_file(Path(path), safetensors.torch.save(tensors, metadata={"state": json.dumps(structure)}))


def load_state(path: str | Path) -> State:
    """What :func:`save_state` wrote, on the CPU. Nothing is unpickled.

    Errors: CheckpointError, naming the file, where it is missing or damaged.

    .. versionadded:: 0.2
    """
    try:
        with safetensors.safe_open(path, "pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - it is no dictionary
            state: State = unpack(json.loads((stored.metadata() or {})["state"]), tensors)
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}") from None
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, RecursionError, OSError) as error:
        raise CheckpointError(damaged(Path(path), f"{type(error).__name__}: {error}")) from None
    return state
