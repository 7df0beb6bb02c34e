"""A run on disk: everything needed to read it, and to go on after a kill at any instant.

::

    config.toml                  the resolved configuration
    env.json                     versions, plugins, device, git commit
    steps.jsonl
        one line per outer step, flushed; the same for every run of one seed, resumed or not
    timings.jsonl
        the clock beside it (kept apart, since no two runs share it), each line with its crc32
    checkpoint.json
        the state without its tensors, and the sha256 of the tensors, of steps.jsonl and of itself
    checkpoint-<step>.safetensors
    diagnosis.jsonl              one line per diagnosed step (run.diagnose), each with its crc32
    summary.json
        written last, with its checksum, the key of the configuration and the sha256 of steps.jsonl

A file that cannot be read is named, never guessed around. What a run goes on from is checked byte
by byte before anything is changed. Nothing is written through a symbolic link.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from attrs import define, field, frozen

from hgms.config.json_values import finite
from hgms.config.tables import difference, flatten, parse_toml, show
from hgms.runs import files
from hgms.runs.checkpoint import pack, unpack
from hgms.runs.config import UNCOMPARED
from hgms.runs.files import damaged
from hgms.runs.lease import LEASE, Lease, leased
from hgms_core import ConfigError, State
from hgms_core.components import read_by_annotation, reports_errors
from hgms_core.errors import CheckpointError

TIES = ("checksum", "key", "steps_sha256")
"""Entries of ``summary.json`` that tie it to itself, to the configuration and to the rows."""
IDENTITY = "task.identity."
"""What the digests of the fields of a problem are called in a configuration."""
SHOWN = 3
"""Settings that a message names where two configurations differ."""


@define
class _Rows:
    """How long ``steps.jsonl`` is and its sha256, kept while it grows: no checkpoint has to read
    it again.
    """

    size: int
    digest: Any

    @classmethod
    def of(cls, data: bytes) -> _Rows:
        return cls(len(data), hashlib.sha256(data))

    def add(self, line: bytes) -> None:
        self.size += len(line)
        self.digest.update(line)


def _part_name(name: str) -> str:
    """A field of a problem in a message."""
    return {"rows": "the losses of rows (rows)", "sources": "the losses of sources"}.get(name, name)


def compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the settings in which a run may differ and still be the same run."""
    settings = config.get("run")
    if not isinstance(settings, Mapping):
        settings = {}
    return {
        **config,
        "run": {key: value for key, value in settings.items() if key not in UNCOMPARED},
    }


def config_key(config: Mapping[str, Any]) -> str:
    """The sha256 of a configuration: results with this key belong to it.

    >>> config_key({"seed": 0}) == config_key({"seed": 0, "run": {"out": "runs"}})
    True
    >>> config_key({"seed": 0}) == config_key({"seed": 1})
    False
    """
    text = json.dumps(compared(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


class _File:
    """The path of a file in a run's folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: RunFolder, _cls: type) -> Path:
        return folder.path / self.name


def _path(value: str | Path) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise ConfigError("wrong-type", f"path={value!r} must be a path", place=("path",))
    return Path(value)


@reports_errors
@frozen(field_transformer=read_by_annotation)
class RunFolder:
    """One run on disk: ``RunFolder("runs/mine")``. Nothing is made before :func:`run` or
    :meth:`create` does.

    ``config``, ``steps``, ``timings``, ``diagnosis``, ``checkpoint``, ``summary`` and ``traceback``
    are the paths of its files; ``begun`` says whether any of them is there. Of a run that has
    begun, :meth:`records` gives the rows with their ``seconds``, :meth:`read_summary` the result
    (None while there is none), :meth:`load` the state and step of the last checkpoint.

    Errors: CheckpointError, naming the file, where one is damaged or the folder holds another run,
    or where a file cannot be written; what was there before is intact.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     folder = RunFolder(f"{place}/mine")
    ...     folder.create("seed = 0", {"python": "3.12"})
    ...     folder.append({"step": 0, "upper_loss": 0.5}, {"step": 0, "seconds": 0.0})
    ...     folder.save({"x": torch.ones(2)}, 0)
    ...     folder.records(), folder.load(), folder.read_summary()
    ([{'step': 0, 'upper_loss': 0.5, 'seconds': 0.0}], ({'x': tensor([1., 1.])}, 0), None)
    """

    path: Path = field(converter=_path)
    _rows: list[_Rows] = field(factory=list, init=False, eq=False, repr=False)
    _held: list[Lease] = field(factory=list, init=False, eq=False, repr=False)

    config = _File("config.toml")
    environment = _File("env.json")
    steps = _File("steps.jsonl")
    timings = _File("timings.jsonl")
    diagnosis = _File("diagnosis.jsonl")
    checkpoint = _File("checkpoint.json")
    summary = _File("summary.json")
    traceback = _File("traceback.txt")

    @property
    def begun(self) -> bool:
        """Whether a run has written anything here."""
        return any(
            map(
                os.path.lexists,
                (self.config, self.steps, self.timings, self.checkpoint, self.summary),
            )
        )

    # --- whose it is

    @property
    def in_use(self) -> bool:
        """Whether there is a sign that a process has the folder claimed. One that was killed leaves
        it, too; who wants to know asks for the folder (:meth:`claimed`).
        """
        return os.path.lexists(self.path / LEASE)

    @contextlib.contextmanager
    def claimed(
        self,
        config: str,
        *,
        resume: bool = False,
        patience: float | None = None,
        word: str = "resume=True",
    ) -> Iterator[None]:
        """The folder for this process alone, for the run of this configuration; another process is
        waited for ``patience`` seconds (None: until it is seen to be alive). It may be new, or hold
        this very run and be resumed; ``word`` is what asks for that.

        Raises:
            CheckpointError: it holds a run of another configuration, or one that is not to be
                resumed, or lost its ``config.toml``, or another process writes to it. Nothing was
                changed.
        """
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(
                "not-a-folder",
                "the path is a file, but a run requires a folder",
                place=(str(self.path),),
                hint="use another path",
            )
        if self.begun:
            self._ensure_same(config, resume, word)
        with contextlib.ExitStack() as held:
            try:
                self._held[:] = [held.enter_context(leased(self.path, patience=patience))]
            except files.DiskError:
                # a finished run on a disk that cannot be written to is only read back
                if not (resume and self.summary.exists()):
                    raise
            held.callback(self._held.clear)
            yield

    def ensure_held(self) -> None:
        """FolderInUse where this process had claimed the folder, and another has taken it over
        since.
        """
        for lease in self._held:
            lease.ensure()

    def _ensure_same(self, config: str, resume: bool, word: str) -> None:
        if not self.config.exists():
            raise CheckpointError(
                "missing-file",
                "the folder contains a run without a config.toml",
                place=(str(self.config),),
                hint="restore this file, use another folder, or remove this one",
            )
        if not self.holds(config):
            raise CheckpointError(
                "other-settings",
                "\n".join(
                    [
                        "the folder contains a run of another configuration",
                        *self._differences(config),
                    ]
                ),
                place=(str(self.path),),
                hint=f"use another folder, or remove this one; see {self.config}",
            )
        if not resume:
            state = "finished" if self.summary.exists() else "unfinished"
            other = "another --out or --seed" if word.startswith("--") else "another folder"
            raise CheckpointError(
                "run-exists",
                f"the folder already contains this run, which is {state}",
                place=(str(self.path),),
                hint=f"use {word}, or {other}",
            )

    def holds(self, config: str) -> bool:
        """Whether the folder was made for this configuration. It may have moved or have got a
        label: ``run.out`` and the labels are not looked at."""

        text = files.contents(self.config).decode(errors="replace")
        try:
            return text == config or self._compared(text) == self._compared(config)
        except (CheckpointError, AttributeError):  # no TOML, or nothing like a configuration
            return False

    def _compared(self, text: str) -> dict[str, Any]:
        return compared(parse_toml(text, self.config.name))

    def _differences(self, config: str) -> list[str]:
        """Return the first settings in which the stored configuration differs, one per line."""
        try:
            own, other = (
                flatten(self._compared(text))
                for text in (self.config.read_text(errors="replace"), config)
            )
        except (CheckpointError, AttributeError):
            return []
        keys = list(difference([own, other]))
        parts = [key.removeprefix(IDENTITY) for key in keys if key.startswith(IDENTITY)]
        keys = [key for key in keys if not key.startswith(IDENTITY)]
        changed = (
            [f"the problem has other values or code in {', '.join(map(_part_name, parts))}"]
            if parts
            else []
        )
        pairs = [
            [show(table[key]) if key in table else "not set" for table in (own, other)]
            for key in keys[:SHOWN]
        ]
        lines = [
            f"{key}: {there} in the folder, {here} in this run"
            for key, (there, here) in zip(keys, pairs, strict=False)
        ]
        return changed + lines + ([f"and {len(keys) - SHOWN} more"] if len(keys) > SHOWN else [])

    def create(self, config: str, environment: Mapping[str, Any]) -> None:
        self.ensure_held()
        with files.writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self._rows.clear()
        files.replace_file(self.config, config.encode())
        files.replace_file(self.environment, files.as_json(environment, indent=2))

    def reopen(self) -> None:
        """Removes the summary of a run that failed and is carried out again: until it ends it is an
        unfinished one.
        """
        self.ensure_held()
        with files.writing(self.summary):
            self.summary.unlink(missing_ok=True)

    def note(self, key: str, value: Any) -> None:
        """An entry of ``env.json``, which keeps the others."""
        self.ensure_held()
        files.replace_file(
            self.environment, files.as_json({**self.read_environment(), key: value}, indent=2)
        )

    # --- what it holds

    def read_environment(self) -> dict[str, Any]:
        """``env.json``, empty where there is none that can be read: nothing is computed from it."""
        with contextlib.suppress(CheckpointError):
            return files.json_object(self.environment)
        return {}

    @property
    def key(self) -> str:
        """The key of the configuration; empty without ``config.toml``."""
        if not os.path.lexists(self.config):
            return ""
        text = files.contents(self.config).decode(errors="replace")
        try:
            return config_key(parse_toml(text, self.config.name))
        except CheckpointError:
            return hashlib.sha256(text.encode()).hexdigest()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the result, tied to the configuration and to the rows in ``steps.jsonl``."""
        self.ensure_held()
        ties = {"key": self.key, "steps_sha256": self._written().digest.hexdigest()}
        files.replace_file(self.summary, files.sealed({**finite(summary), **ties}, indent=2))

    def read_summary(self) -> dict[str, Any] | None:
        """The result in ``summary.json``, None while the run is not finished."""
        if not os.path.lexists(self.summary):
            return None
        table = files.unsealed(self.summary)
        self._ensure_own(self.summary, table)
        return {name: value for name, value in table.items() if name not in TIES}

    def _ensure_own(self, path: Path, table: Mapping[str, Any]) -> None:
        """CheckpointError if a file of another run was copied into this folder."""
        if table.get("key") != self.key:
            raise CheckpointError(
                "other-settings",
                "the file belongs to a run of another configuration or seed",
                place=(str(path),),
                hint=f"restore the file, or remove the folder {self.path}",
            )

    def records(self) -> list[dict[str, Any]]:
        """All complete lines of ``steps.jsonl``, each with its ``seconds`` and the
        ``compile_seconds`` up to it.
        """
        names = ("seconds", "compile_seconds")
        clocks: dict[int, dict[str, Any]] = {}
        for row in files.lines(self.timings, stamped=True):
            clocks[row["step"]] = {name: row[name] for name in names if name in row}
        return [
            {**row, "seconds": None, **clocks.get(row["step"], {})}
            for row in files.lines(self.steps)
        ]

    def diagnoses(self) -> list[dict[str, Any]]:
        """All complete lines of ``diagnosis.jsonl``, each with the ``seconds`` that it took."""
        times = files.lines(self.timings, stamped=True)
        took = {row["step"]: row.get("diagnosis_seconds") for row in times}
        rows = files.lines(self.diagnosis, stamped=True)
        return [{**row, "seconds": took.get(row["step"])} for row in rows]

    def append_diagnosis(self, row: Mapping[str, Any]) -> None:
        """The line of a diagnosed step."""
        self.ensure_held()
        files.append(self.diagnosis, files.stamped(files.as_json(row)) + b"\n")

    def append(self, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """One outer step's lines; they are in the operating system's hands when this returns."""
        self.ensure_held()
        rows = self._written()
        line = files.as_json(record) + b"\n"
        clock = files.as_json(timing)
        files.append(self.steps, line)
        files.append(self.timings, files.stamped(clock) + b"\n")
        rows.add(line)

    def _written(self) -> _Rows:
        """The length and digest of ``steps.jsonl``, which is read once."""
        if not self._rows:
            self._rows.append(_Rows.of(files.contents(self.steps) if self.steps.exists() else b""))
        return self._rows[0]

    # --- what it goes on from

    def save(self, state: State, step: int) -> None:
        """A checkpoint: first the rows and the tensors under a new name, then the file that points
        to them, then the old ones go. Each is on the disk before the next."""
        self.ensure_held()
        structure, tensors = pack(state)
        name = f"checkpoint-{step}.safetensors"
        data = safetensors.torch.save(tensors)
        rows = self._written()
        for path in (self.steps, self.timings):
            if path.exists():
                files.flush(path)
        files.replace_file(self.path / name, data)
        files.flush(self.path)
        pointer = {
            "step": step,
            "tensors": name,
            "key": self.key,
            "tensors_bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "steps_bytes": rows.size,
            "steps_sha256": rows.digest.hexdigest(),
            "state": structure,
        }
        files.replace_file(self.checkpoint, files.sealed(pointer, indent=1))
        files.flush(self.path)
        self._remove_others(name)

    def _remove_others(self, name: str) -> None:
        """Tensors that no checkpoint points to, and what a kill left of half-written ones."""
        for old in self.path.glob("checkpoint-*.safetensors*"):
            if old.name != name:
                with contextlib.suppress(OSError):
                    old.unlink()

    def load(self, device: torch.device | str = "cpu") -> tuple[State, int] | None:
        """(state, step) of the checkpoint, None where there is none yet. All files that it goes on
        from are checked; a damaged one raises, and everything is left as it is."""
        for path in (self.steps, self.timings, self.diagnosis, self.environment):
            if os.path.lexists(path):
                # a link, a pipe, a folder: refused before anything is changed
                with files.regular(path):
                    pass
        for _ in files.lines(self.diagnosis, stamped=True):
            pass  # and lines of it that are no rows, or were changed
        if not os.path.lexists(self.checkpoint):
            return None
        pointer = files.unsealed(self.checkpoint)
        self._ensure_own(self.checkpoint, pointer)
        try:
            step = int(pointer["step"])
            path = self.path / Path(pointer["tensors"]).name
            with files.regular(path, most=sys.maxsize) as stream:
                if os.fstat(stream.fileno()).st_size != int(pointer["tensors_bytes"]):
                    raise damaged(path, "its size does not match the recorded size")
                data = stream.read()
            if hashlib.sha256(data).hexdigest() != pointer["sha256"]:
                raise damaged(path, "its contents do not match the recorded sha256")
            size = int(pointer["steps_bytes"])
            self._check_digest(step, size, pointer["steps_sha256"])
            if size:
                self._check_lines(self.timings, step)
            return unpack(pointer["state"], safetensors.torch.load(data), device), step
        except (
            KeyError,
            TypeError,
            ValueError,
            RecursionError,
            safetensors.SafetensorError,
        ) as error:
            raise damaged(
                self.checkpoint, f"it does not contain a state: {files.described(error)}"
            ) from None

    def _check_digest(self, step: int, size: int, digest: str) -> None:
        """The first ``size`` bytes of ``steps.jsonl`` are as they were when the checkpoint was
        written.
        """
        rows = files.contents(self.steps) if size or self.steps.exists() else b""
        if len(rows) < size:
            raise damaged(self.steps, f"it ends before step {step} of the checkpoint")
        if hashlib.sha256(rows[:size]).hexdigest() != digest:
            raise damaged(self.steps, "its contents do not match the recorded sha256")

    def _check_lines(self, path: Path, step: int) -> None:
        """Every step up to this one has its line, as it was written."""
        expected = 0
        for row in files.lines(path, stamped=True):
            if expected > step:
                return
            if row["step"] != expected:
                break
            expected += 1
        if expected <= step:
            raise damaged(path, f"it lacks step {expected}")

    def rewind(self, step: int) -> float:
        """Drops the lines after ``step`` (and a half-written last one), and checkpoints but that
        step's; returns the seconds spent up to it."""
        kept = {}
        for path in (self.steps, self.timings):
            data = files.contents(path) if path.exists() else b""
            rows = data.split(b"\n")[: step + 1]
            kept[path] = b"".join(row + b"\n" for row in rows)
            if kept[path] != data:
                files.replace_file(path, kept[path])
        if self.diagnosis.exists():
            data = files.contents(self.diagnosis)
            rows = data.split(b"\n")[:-1]
            early = b"".join(row + b"\n" for row in rows if json.loads(row)["step"] <= step)
            if early != data:
                files.replace_file(self.diagnosis, early)
        self._rows[:] = [_Rows.of(kept[self.steps])]
        self._remove_others(f"checkpoint-{step}.safetensors")
        clock = kept[self.timings].split(b"\n")
        return float(json.loads(clock[-2])["seconds"]) if len(clock) > 1 else 0.0
