"""Conversion of a method's state to files and back.

Nested values are stored as JSON, and their tensors as safetensors. Pickle is never used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from hgms.store import damaged_file, describe_error, read_file, replace_file
from hgms_core import ConfigError, State
from hgms_core.arguments import kind_of

TENSOR = "$tensor"


def pack(state: State) -> tuple[Any, dict[str, Tensor]]:
    """Return a nested state as (JSON structure, tensors by path).

    Examples
    --------
    >>> import torch
    >>> pack({"a": {"b": torch.ones(2)}, "n": 3})[0]
    {'a': {'b': {'$tensor': 'a/b'}}, 'n': 3}
    """
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            # A separate copy, because safetensors cannot store views or shared memory.
            tensors[path] = value.detach().to("cpu", copy=True).contiguous()
            return {TENSOR: path}
        if isinstance(value, Mapping):
            return {
                str(key): walk(item, f"{path}/{key}" if path else str(key))
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [walk(item, f"{path}/{i}") for i, item in enumerate(value)]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ConfigError(
            "wrong-type",
            f"the state contains {kind_of(value)}, which no file can store",
            place=("state", *path.split("/")),
            hint="use tensors, numbers, strings, None, dicts or lists",
        )

    return walk(state, ""), tensors


def unpack(
    structure: Any, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu"
) -> Any:
    """Restore the state from the result of :func:`pack`, on the device of the problem.

    Tuples become lists. Every loaded state passes through this function: from run folders, from
    files, and from the conformance kit. Tensors are copied to memory that torch allocates, because
    the memory address of a tensor affects the rounding of products with it.

    Examples
    --------
    >>> import torch
    >>> unpack(*pack({"step": 3, "m": torch.ones(2)}), "meta")["m"].device
    device(type='meta')
    """
    if isinstance(structure, dict):
        if set(structure) == {TENSOR}:
            return tensors[structure[TENSOR]].to(device, copy=True)
        return {key: unpack(item, tensors, device) for key, item in structure.items()}
    if isinstance(structure, list):
        return [unpack(item, tensors, device) for item in structure]
    return structure


def state_bytes(state: State) -> bytes:
    """Return a nested state in the format safetensors.

    The header contains the structure as JSON.
    """
    structure, tensors = pack(state)
    return safetensors.torch.save(tensors, metadata={"state": json.dumps(structure)})


def state_of(data: bytes, path: Path, device: torch.device | str = "cpu") -> State:
    """Return the state in the bytes of :func:`state_bytes`, which were read from ``path``.

    Raises
    ------
    CheckpointError
        ``damaged-file``.
    """
    try:
        tensors = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        structure = json.loads(header["__metadata__"]["state"])
        state: State = unpack(structure, tensors, device)
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise damaged_file(path, f"it does not contain a state: {describe_error(error)}") from None
    return state


def save_state(path: str | Path, state: State) -> None:
    """Write a nested state of tensors, numbers, strings and ``None`` into one file, atomically.

    The file has the format safetensors: the tensors, and the structure as JSON in the header.
    Tuples become lists, and keys become strings.

    Raises
    ------
    ConfigError
        If the state contains any other value.
    CheckpointError
        If the file cannot be written.

    Examples
    --------
    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_state(f"{folder}/state.safetensors", {"moments": {"m": torch.ones(2)}, "step": 3})
    ...     load_state(f"{folder}/state.safetensors")
    {'moments': {'m': tensor([1., 1.])}, 'step': 3}
    """
    replace_file(Path(path), state_bytes(state))


def load_state(path: str | Path, device: torch.device | str = "cpu") -> State:
    """Load a state from a file of :func:`save_state`, on the device of the problem.

    Pickle is not used.

    Raises
    ------
    CheckpointError
        With the name of the file, if it is missing or damaged.
    """
    return state_of(read_file(Path(path), sys.maxsize), Path(path), device)
