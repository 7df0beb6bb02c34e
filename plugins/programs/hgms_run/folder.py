"""A run on disk: everything needed to read it, and to go on after a kill at any instant.

::

    config.toml                  the resolved configuration
    env.json                     versions, plugins, device, git commit
    steps.jsonl                  one line per outer step, flushed; the same for every run of one seed, resumed or not
    timings.jsonl                the clock beside it (kept apart, since no two runs share it), each line with its crc32
    checkpoint.json              the state without its tensors, and the sha256 of the tensors, of steps.jsonl and of itself
    checkpoint-<step>.safetensors
    summary.json                 written last, with its checksum

Nothing here is ever unpickled. A file that cannot be read is named, never guessed around. What a run goes on from is checked
byte by byte before anything is changed. Nothing is written through a symbolic link.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import safetensors
import safetensors.torch
import torch
from attrs import define, field, frozen
from filelock import FileLock, Timeout
from torch import Tensor

from hgms_core import CheckpointError, State
from hgms_run.untrusted import ROWS, opened, parse_toml

TENSOR = "$tensor"
_OWN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


class DiskError(CheckpointError):
    """Writing failed (a full disk, lost rights). What was on disk before is intact."""

    exit_code = 1


class FolderInUse(CheckpointError):
    """Another process writes to the folder."""


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        advice = "free some space" if full else f"see to it that {path.parent} is there and may be written to"
        raise DiskError(
            f"cannot write {path}: {what}\n"
            f"  what was complete before is untouched; {advice}, then run the same again (hgms run: with --resume)"
        ) from error


def _opened(path: Path, flags: int, mode: str) -> IO[bytes]:
    """The file itself, open for writing: never what a symbolic link of its name points to."""
    return os.fdopen(os.open(path, flags | _OWN, 0o666), mode)


def _append(path: Path, data: bytes) -> None:
    """Writes at the end of a file without a buffer, which would cost more than the writing."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _OWN, 0o666)
    try:
        while data:
            data = data[os.write(handle, data) :]
    finally:
        os.close(handle)


def appending(path: Path) -> IO[bytes]:
    """The file, opened to write at its end; OSError where it is a symbolic link."""
    return _opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, "ab")


def replace_file(path: Path, data: bytes) -> None:
    """The whole file or the old one: written aside, flushed to the disk, renamed. A symbolic link is replaced, not followed."""
    aside = path.with_name(path.name + ".part")
    with _writing(path):
        try:
            aside.unlink(missing_ok=True)  # of a write that was killed
            with _opened(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            aside.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise


def _flush(path: Path) -> None:
    """What was written to a file, or which files a folder has, survives a loss of power from here on."""
    if os.name == "nt" and path.is_dir():
        return  # Windows has no such call for folders
    with _writing(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _read(path: Path, most: int = ROWS) -> bytes:
    """The bytes of a file of a run's folder: a regular one, and no link."""
    with _own(path, most) as stream:
        return stream.read()


@contextlib.contextmanager
def _own(path: Path, most: int = ROWS) -> Iterator[IO[bytes]]:
    try:
        with opened(path, most) as stream:
            yield stream
    except CheckpointError as error:
        raise CheckpointError(_damaged(path, str(error))) from None


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
            state: State = unpack(json.loads((stored.metadata() or {})["state"]), tensors)
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}") from None
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, RecursionError, OSError) as error:
        raise CheckpointError(_damaged(Path(path), f"{type(error).__name__}: {error}")) from None
    return state


@define
class _Rows:
    """How long ``steps.jsonl`` is and its sha256, kept while it grows: no checkpoint has to read it again."""

    size: int
    digest: Any

    @classmethod
    def of(cls, data: bytes) -> _Rows:
        return cls(len(data), hashlib.sha256(data))

    def add(self, line: bytes) -> None:
        self.size += len(line)
        self.digest.update(line)


@frozen
class RunFolder:
    """One run on disk: ``RunFolder("runs/mine")``. Nothing is made before :func:`run` or :meth:`create` does.

    ``config``, ``steps``, ``timings``, ``checkpoint``, ``summary`` and ``traceback`` are the paths of its files; ``begun`` says
    whether any of them is there. Of a run that has begun, :meth:`records` gives the rows with their ``seconds``,
    :meth:`read_summary` the result (None while there is none), :meth:`load` the state and step of the last checkpoint.

    Errors: CheckpointError, naming the file, where one is damaged or the folder holds another run, or where a file cannot be
    written; what was there before is intact.

    >>> import tempfile
    >>> from hgms_core import Budget, Pipeline, Problem
    >>> from hgms_run import run
    >>> from hgms_branches import Branches
    >>> from hgms_solvers import CG
    >>> from hgms_hypergradients import Implicit
    >>> from hgms_outer import Sgd
    >>> from hgms_selectors import BestOfN
    >>> problem = Problem(theta0={"t": torch.zeros(1)}, x0={"x": torch.ones(1)},
    ...                   g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(), f=lambda t, x, _: ((x["x"] - 2) ** 2).sum())
    >>> method = Pipeline(generator=Branches(count=2, steps=20, lr=0.2), selector=BestOfN(),
    ...                   hypergradient=Implicit(solver=CG()), outer=Sgd(lr=0.2))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     folder = RunFolder(f"{place}/mine")
    ...     _ = run(method, problem, Budget(outer_steps=3), folder=folder)
    ...     len(folder.records()), folder.read_summary()["status"], folder.load()[1]
    (4, 'done', 3)
    """

    path: Path = field(converter=Path)
    _rows: list[_Rows] = field(factory=list, init=False, eq=False, repr=False)

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

    @property
    def begun(self) -> bool:
        """Whether a run has written anything here."""
        return any(map(os.path.lexists, (self.config, self.steps, self.timings, self.checkpoint, self.summary)))

    @contextlib.contextmanager
    def claimed(self, config: str, *, resume: bool = False, patience: float = 0.0, word: str = "resume=True") -> Iterator[None]:
        """The folder for this process alone, for the run of this configuration; another process is waited for ``patience``
        seconds. It may be new, or hold this very run and be resumed; ``word`` is what asks for that.

        Raises:
            CheckpointError: it holds a run of another configuration, or one that is not to be resumed, or lost its
                ``config.toml``, or another process writes to it. Nothing was changed.
        """
        if self.begun and not self.config.exists():
            raise CheckpointError(
                f"{self.path} holds a run whose config.toml is missing, so nothing says which run it is\n"
                "  restore that file, choose another folder, or remove this one"
            )
        if self.begun and not self.holds(config):
            raise CheckpointError(
                f"{self.path} holds a run of another configuration\n"
                f"  compare {self.config} with yours; choose another folder, or remove this one"
            )
        if self.begun and not resume:
            state = "finished" if self.summary.exists() else "begun"
            elsewhere = "--out or --seed" if word.startswith("--") else "one"
            raise CheckpointError(
                f"{self.path} holds this run already ({state})\n"
                f"  add {word} to go on from its checkpoint, choose another {elsewhere}, or remove the folder"
            )
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / ".lock", timeout=patience)
            if (self.path / ".lock").is_symlink():
                (self.path / ".lock").unlink()
            try:
                lock.acquire()
            except Timeout:
                raise FolderInUse(f"another process is writing to {self.path}; wait for it, or choose another folder") from None
        try:
            yield
        finally:
            lock.release()

    def holds(self, config: str) -> bool:
        """Whether the folder was made for this configuration. It may have moved or have got a label: ``run.out`` and the labels
        are not looked at."""

        def compared(text: str) -> dict[str, Any]:
            table = parse_toml(text, self.config.name)
            settings = {key: value for key, value in table.get("run", {}).items() if key not in ("out", "label", "task_label")}
            return {**table, "run": settings}

        text = _read(self.config).decode(errors="replace")
        try:
            return text == config or compared(text) == compared(config)
        except (CheckpointError, AttributeError):  # no TOML, or nothing like a configuration
            return False

    def create(self, config: str, environment: Mapping[str, Any]) -> None:
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self._rows.clear()
        replace_file(self.config, config.encode())
        replace_file(self.path / "env.json", _json(environment, indent=2))

    def read_environment(self) -> dict[str, Any]:
        """``env.json``, empty where there is none that can be read: nothing is computed from it."""
        with contextlib.suppress(CheckpointError):
            return _object(self.path / "env.json")
        return {}

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        replace_file(self.summary, _sealed(plain(summary), indent=2))

    def read_summary(self) -> dict[str, Any] | None:
        """What ``summary.json`` says, None while the run is not finished."""
        if not os.path.lexists(self.summary):
            return None
        table = _unsealed(self.summary)
        table.pop("checksum", None)
        return table

    def append(self, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """One outer step's lines; they are in the operating system's hands when this returns."""
        rows, line, clock = self._written(), _json(record) + b"\n", _json(timing)
        for path, data in ((self.steps, line), (self.timings, b'%s, "crc32": %d}\n' % (clock[:-1], zlib.crc32(clock)))):
            with _writing(path):
                _append(path, data)
        rows.add(line)

    def _written(self) -> _Rows:
        """The length and digest of ``steps.jsonl``, which is read once."""
        if not self._rows:
            self._rows.append(_Rows.of(_read(self.steps) if self.steps.exists() else b""))
        return self._rows[0]

    def records(self) -> list[dict[str, Any]]:
        """All complete lines of ``steps.jsonl``, each with its ``seconds``."""
        seconds = {row["step"]: row.get("seconds") for row in _lines(self.timings)}
        return [{**row, "seconds": seconds.get(row["step"])} for row in _lines(self.steps)]

    def save(self, state: State, step: int) -> None:
        """A checkpoint: first the rows and the tensors under a new name, then the file that points to them, then the old ones
        go. Each is on the disk before the next."""
        structure, tensors = pack(state)
        name = f"checkpoint-{step}.safetensors"
        data = safetensors.torch.save(tensors)
        rows = self._written()
        for path in (self.steps, self.timings):
            if path.exists():
                _flush(path)
        replace_file(self.path / name, data)
        _flush(self.path)
        pointer = {
            "step": step, "tensors": name, "sha256": hashlib.sha256(data).hexdigest(),
            "steps_bytes": rows.size, "steps_sha256": rows.digest.hexdigest(), "state": structure,
        }  # fmt: skip
        replace_file(self.checkpoint, _sealed(pointer, indent=1))
        _flush(self.path)
        self._remove_others(name)

    def _remove_others(self, name: str) -> None:
        """Tensors that no checkpoint points to, and what a kill left of half-written ones."""
        for old in self.path.glob("checkpoint-*.safetensors*"):
            if old.name != name:
                with contextlib.suppress(OSError):
                    old.unlink()

    def load(self, device: torch.device | str = "cpu") -> tuple[State, int] | None:
        """(state, step) of the checkpoint, None where there is none yet. All files that it goes on from are checked; a damaged
        one raises, and everything is left as it is."""
        for path in (self.steps, self.timings, self.path / "env.json"):
            if os.path.lexists(path):
                with _own(path):  # a link, a pipe, a folder: refused before anything is changed
                    pass
        if not os.path.lexists(self.checkpoint):
            return None
        pointer = _unsealed(self.checkpoint)
        if "checksum" not in pointer:
            raise CheckpointError(
                _damaged(self.checkpoint, "it has no checksum (hgms 0.2 wrote none; finish its runs with it)")
            )
        try:
            step, size, path = int(pointer["step"]), int(pointer["steps_bytes"]), self.path / Path(pointer["tensors"]).name
            data = _read(path, most=sys.maxsize)
            if hashlib.sha256(data).hexdigest() != pointer["sha256"]:
                raise CheckpointError(_damaged(path, "its contents do not match the recorded sha256 (truncated or changed)"))
            rows = _read(self.steps) if size or self.steps.exists() else b""
            if len(rows) < size:
                raise CheckpointError(_damaged(self.steps, f"it ends before step {step} of the checkpoint"))
            if hashlib.sha256(rows[:size]).hexdigest() != pointer["steps_sha256"]:
                raise CheckpointError(_damaged(self.steps, "its contents do not match the recorded sha256 (changed)"))
            if size:
                self._check_timings(step)
            tensors = {key: value.to(device) for key, value in safetensors.torch.load(data).items()}
            return unpack(pointer["state"], tensors), step
        except (KeyError, TypeError, ValueError, RecursionError, safetensors.SafetensorError) as error:
            raise CheckpointError(_damaged(self.checkpoint, f"it holds no state ({type(error).__name__}: {error})")) from None

    def _check_timings(self, step: int) -> None:
        """Every step up to this one has its line, as it was written."""
        expected = 0
        for row in _lines(self.timings):
            if expected > step:
                return
            if row.get("crc32") != zlib.crc32(_json({key: value for key, value in row.items() if key != "crc32"})):
                raise CheckpointError(_damaged(self.timings, f"line {expected + 1} does not match its crc32 (changed)"))
            if row["step"] != expected:
                break
            expected += 1
        if expected <= step:
            raise CheckpointError(_damaged(self.timings, f"it lacks step {expected}"))

    def rewind(self, step: int) -> float:
        """Drops the lines after ``step`` (and a half-written last one), and checkpoints but that step's; returns the seconds
        spent up to it."""
        kept = {}
        for path in (self.steps, self.timings):
            data = _read(path) if path.exists() else b""
            kept[path] = b"".join(line + b"\n" for line in data.split(b"\n")[: step + 1])
            if kept[path] != data:
                replace_file(path, kept[path])
        self._rows[:] = [_Rows.of(kept[self.steps])]
        self._remove_others(f"checkpoint-{step}.safetensors")
        lines = kept[self.timings].split(b"\n")
        return float(json.loads(lines[-2])["seconds"]) if len(lines) > 1 else 0.0


def _json(value: Mapping[str, Any], indent: int | None = None) -> bytes:
    return json.dumps(plain(value), indent=indent, allow_nan=False, ensure_ascii=False).encode(errors="backslashreplace")


def _sealed(table: Mapping[str, Any], indent: int) -> bytes:
    """The table as JSON, with the sha256 of all the rest as its last entry."""
    table = {**table, "checksum": _checksum(table)}
    return json.dumps(table, indent=indent, ensure_ascii=False).encode(errors="backslashreplace")


def _unsealed(path: Path) -> dict[str, Any]:
    """What :func:`_sealed` wrote, if nothing of it has changed. Versions up to 0.2 wrote no checksum."""
    table = _object(path)
    if "checksum" in table and table["checksum"] != _checksum({key: table[key] for key in table if key != "checksum"}):
        raise CheckpointError(_damaged(path, "its contents do not match its checksum (changed)"))
    return table


def _checksum(table: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()


def _object(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(_damaged(path, f"it is not valid JSON ({error})")) from None
    if not isinstance(table, dict):
        raise CheckpointError(_damaged(path, "it holds no JSON object"))
    return table


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines. Only the last line may be half-written (a kill while appending); any other damage is named."""
    if not path.exists():
        return
    for number, line in enumerate(_read(path).split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            if not isinstance(row["step"], int):
                raise TypeError
        except (ValueError, RecursionError):
            raise CheckpointError(_damaged(path, f"line {number} is not valid JSON")) from None
        except (TypeError, KeyError, IndexError):
            raise CheckpointError(_damaged(path, f"line {number} is no row of a step")) from None
        yield row


def _damaged(path: Path, why: str) -> str:
    return (
        f"damaged run file {path}: {why}\n"
        f"  nothing was changed; restore the file, or remove the folder {path.parent} and start anew"
    )
