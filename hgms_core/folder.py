"""A run on disk: everything needed to read it, and to go on after a kill at any instant.

::

    config.toml                  the resolved configuration
    env.json                     versions, plugins, device, git commit
    steps.jsonl                  one line per outer step, flushed; the same for every run of one seed, resumed or not
    timings.jsonl                the clock beside it (kept apart, since no two runs share it)
    checkpoint.json              the state without its tensors, and the name and sha256 of the file that holds them
    checkpoint-<step>.safetensors
    summary.json                 written last

Nothing here is ever unpickled. A file that cannot be read is named, never guessed around.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from attrs import field, frozen
from torch import Tensor

from hgms_core.errors import CheckpointError
from hgms_core.protocols import State

TENSOR = "$tensor"


class DiskError(CheckpointError):
    """Writing failed (a full disk, lost rights). What was on disk before is intact."""

    exit_code = 1


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        raise DiskError(
            f"cannot write {path}: {what}\n"
            "  the last complete checkpoint is untouched; free some space, then run the same command with --resume"
        ) from error


def replace_file(path: Path, data: bytes) -> None:
    """The whole file or the old one: written aside, flushed to the disk, renamed."""
    aside = path.with_name(path.name + ".part")
    with _writing(path):
        try:
            with aside.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            aside.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise


def plain(value: Any) -> Any:
    """The value with nothing that JSON lacks: a number that is not finite becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def pack(state: State) -> tuple[Any, dict[str, Tensor]]:
    """A nested state as (JSON structure, tensors by path).

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
            return {str(key): walk(each, f"{path}/{key}" if path else str(key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [walk(each, f"{path}/{i}") for i, each in enumerate(value)]
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
        return {key: unpack(each, tensors) for key, each in structure.items()}
    if isinstance(structure, list):
        return [unpack(each, tensors) for each in structure]
    return structure


def save_state(path: str | Path, state: State) -> None:
    """Writes a nested state of tensors, numbers, strings and None into one file, whole or not at all.

    A safetensors file: the tensors, and the structure as JSON in its header. Tuples come back as lists, keys as strings.

    Errors: TypeError for a state that holds anything else; CheckpointError where the disk refuses.

    >>> import tempfile
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
            structure = json.loads((stored.metadata() or {})["state"])
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}") from None
    except (safetensors.SafetensorError, KeyError, ValueError, OSError) as error:
        raise CheckpointError(_damaged(Path(path), f"{type(error).__name__}: {error}")) from None
    state: State = unpack(structure, tensors)
    return state


@frozen
class RunFolder:
    """The files of one run: what is written when, and how a killed run is found again (docs/reference/run-folder.md)."""

    path: Path = field(converter=Path)

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def steps(self) -> Path:
        return self.path / "steps.jsonl"

    @property
    def traceback(self) -> Path:
        return self.path / "traceback.txt"

    @property
    def timings(self) -> Path:
        return self.path / "timings.jsonl"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def create(self, config: str, environment: Mapping[str, Any]) -> None:
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        replace_file(self.config, config.encode())
        self.write_environment(environment)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        replace_file(self.path / "env.json", _json(environment, indent=2))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        replace_file(self.summary, _json(summary, indent=2))

    def read_summary(self) -> dict[str, Any] | None:
        """The summary, or None while the run is not finished."""
        if not self.summary.exists():
            return None
        return dict(_load(self.summary))

    def append(self, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """One outer step's lines; they are in the operating system's hands when this returns."""
        for path, row in ((self.steps, record), (self.timings, timing)):
            with _writing(path), path.open("ab") as stream:
                stream.write(_json(row) + b"\n")

    def records(self) -> list[dict[str, Any]]:
        """All complete lines of ``steps.jsonl``, each with its ``seconds``."""
        seconds = {row["step"]: row["seconds"] for row in _lines(self.timings)}
        return [{**row, "seconds": seconds.get(row["step"])} for row in _lines(self.steps)]

    def save(self, state: State, step: int) -> None:
        """A checkpoint: first the tensors under a new name, then the file that points to them, then the old ones go."""
        structure, tensors = pack(state)
        name = f"checkpoint-{step}.safetensors"
        data = safetensors.torch.save(tensors)
        replace_file(self.path / name, data)
        pointer = {"step": step, "tensors": name, "sha256": hashlib.sha256(data).hexdigest(), "state": structure}
        replace_file(self.checkpoint, json.dumps(pointer, indent=1).encode())
        self._remove_others(name)

    def _remove_others(self, name: str) -> None:
        """Tensors that no checkpoint points to, and what a kill left of half-written ones."""
        for old in self.path.glob("checkpoint-*.safetensors*"):
            if old.name != name:
                with contextlib.suppress(OSError):
                    old.unlink()

    def load(self, device: torch.device | str = "cpu") -> tuple[State, int] | None:
        """(state, step) of the checkpoint, None where there is none yet; a damaged one raises and is left as it is."""
        if not self.checkpoint.exists():
            return None
        pointer = _load(self.checkpoint)
        try:
            path = self.path / pointer["tensors"]
            structure, step, expected = pointer["state"], pointer["step"], pointer["sha256"]
        except (KeyError, TypeError) as error:
            raise CheckpointError(_damaged(self.checkpoint, f"it lacks {error}")) from None
        if not path.exists():
            raise CheckpointError(_damaged(path, "it is missing"))
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != expected:
            raise CheckpointError(_damaged(path, "its contents do not match the recorded sha256 (truncated or changed)"))
        tensors = {key: value.to(device) for key, value in safetensors.torch.load(data).items()}
        return unpack(structure, tensors), step

    def rewind(self, step: int) -> float:
        """Drops the lines after ``step`` (and a half-written last one), and checkpoints but that step's; returns the seconds
        spent up to it."""
        for path in (self.steps, self.timings):
            kept = [row for row in _lines(path) if row["step"] <= step]
            replace_file(path, b"".join(_json(row) + b"\n" for row in kept))
        self._remove_others(f"checkpoint-{step}.safetensors")
        rows = list(_lines(self.timings))
        return float(rows[-1]["seconds"]) if rows else 0.0


def _json(value: Mapping[str, Any], indent: int | None = None) -> bytes:
    return json.dumps(plain(value), indent=indent, allow_nan=False, ensure_ascii=False).encode()


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(_damaged(path, f"it is not valid JSON ({error})")) from None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines. Only the last line may be half-written (a kill while appending); any other damage is named."""
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            yield json.loads(line)
        except ValueError:
            raise CheckpointError(_damaged(path, f"line {number} is not valid JSON")) from None


def _damaged(path: Path, why: str) -> str:
    return (
        f"damaged run file {path}: {why}\n"
        f"  nothing was changed; restore the file, or remove the folder {path.parent} and run again without --resume"
    )
