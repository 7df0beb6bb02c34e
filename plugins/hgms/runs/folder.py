"""A run on disk, readable and resumable after a kill at any time.

::

    config.toml                  the resolved configuration
    env.json                     versions, plugins, device, git commit
    steps.jsonl
        one line per outer step, flushed; the same for every run of one seed, resumed or not
    timings.jsonl
        the clock of each step, each line with its crc32; a separate file, since times vary
    checkpoint.json
        the state without its tensors, and the sha256 of the tensors, of steps.jsonl and of itself
    checkpoint-<step>.safetensors
    diagnosis.jsonl              one line per diagnosed step (run.diagnose), each with its crc32
    summary.json
        written last, with its checksum, the key of the configuration and the sha256 of steps.jsonl

If a file is unreadable, the error names it, and HGMS does not guess its contents. A resuming run
first checks all bytes that it depends on, and only then changes files. HGMS does not write through
symbolic links.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from attrs import field, frozen

from hgms import store
from hgms.config.tables import difference, flatten, parse_toml, show
from hgms.runs.checkpoint import pack, unpack
from hgms.runs.config import UNCOMPARED
from hgms.store import LEASE, Digest, Lease, damaged, digest, finite, leased
from hgms_core import ConfigError, State
from hgms_core.arguments import reports_errors
from hgms_core.components import read_by_annotation
from hgms_core.errors import CheckpointError

TIES = ("checksum", "key", "steps_sha256")
"""Entries of ``summary.json`` that link it to other data.

They link it to its own contents, to the configuration and to the rows.
"""
IDENTITY = "task.identity."
"""The prefix of the digests of a problem's fields in a configuration."""
SHOWN = 3
"""Maximum number of different settings that a message lists for two configurations."""


def _part_name(name: str) -> str:
    """Return the text for a field of a problem in messages."""
    return {"rows": "the losses of rows (rows)", "sources": "the losses of sources"}.get(name, name)


def compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the settings that may differ within the same run."""
    settings = config.get("run")
    if not isinstance(settings, Mapping):
        settings = {}
    return {
        **config,
        "run": {key: value for key, value in settings.items() if key not in UNCOMPARED},
    }


def config_key(config: Mapping[str, Any]) -> str:
    """Return the sha256 of a configuration, which its results store as their key.

    >>> config_key({"seed": 0}) == config_key({"seed": 0, "run": {"out": "runs"}})
    True
    >>> config_key({"seed": 0}) == config_key({"seed": 1})
    False
    """
    text = json.dumps(compared(config), sort_keys=True, default=str)
    return digest(text)


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
    """One run on disk: ``RunFolder("runs/mine")``.

    The constructor creates no files. :func:`run` and :meth:`create` do.

    ``config``, ``steps``, ``timings``, ``diagnosis``, ``checkpoint``, ``summary`` and ``traceback``
    are the paths of its files. ``begun`` is True if any of them exists. For such a run,
    :meth:`records` returns the rows with their ``seconds``. :meth:`read_summary` returns the result
    (``None`` if there is no result yet). :meth:`load` returns the state and step of the last
    checkpoint.

    Errors: CheckpointError with the name of the file, if a file is damaged, if the folder contains
        another run, or if a file cannot be written. The existing files stay intact.

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
    _rows: list[Digest] = field(factory=list, init=False, eq=False, repr=False)
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
        """Whether a run has written any of its files here."""
        return any(
            map(
                os.path.lexists,
                (self.config, self.steps, self.timings, self.checkpoint, self.summary),
            )
        )

    # --- claims

    @property
    def in_use(self) -> bool:
        """Whether there is a sign that a process has claimed the folder.

        A killed process also leaves this sign. For a reliable result, claim the folder
        (:meth:`claimed`).
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
        """Claim the folder for this process and the run of this configuration.

        If another process has claimed it, wait for ``patience`` seconds (``None``: until that
        process is known to be alive). The folder may be new, or contain this run and be resumed.
        ``word`` is the option that requests resuming, for messages.

        Raises:
            CheckpointError: the folder contains a run of another configuration, or a run that must
                not be resumed, or lost its ``config.toml``, or another process writes to it. No
                file was changed.
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
            except store.DiskError:
                # on a read-only disk, a finished run is only read back
                if not (resume and self.summary.exists()):
                    raise
            held.callback(self._held.clear)
            yield

    def ensure_held(self) -> None:
        """Raise FolderInUse if another process has taken over the claimed folder."""
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
        """Return whether the folder was created for this configuration.

        The folder may have been renamed or relabelled: ``run.out`` and the labels are ignored.
        """

        text = store.contents(self.config).decode(errors="replace")
        try:
            return text == config or self._compared(text) == self._compared(config)
        except (CheckpointError, AttributeError):  # not TOML, or not a configuration
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
        with store.writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self._rows.clear()
        store.replace_file(self.config, config.encode())
        store.replace_file(self.environment, store.as_json(environment, indent=2))

    def reopen(self) -> None:
        """Remove the summary of a failed run before its second execution.

        Until the run ends, it counts as unfinished.
        """
        self.ensure_held()
        with store.writing(self.summary):
            self.summary.unlink(missing_ok=True)

    def note(self, key: str, value: Any) -> None:
        """Set an entry of ``env.json``; other entries stay unchanged."""
        self.ensure_held()
        store.replace_file(
            self.environment, store.as_json({**self.read_environment(), key: value}, indent=2)
        )

    # --- contents

    def read_environment(self) -> dict[str, Any]:
        """Return ``env.json``, or an empty table if it is missing or unreadable.

        No results are computed from this file.
        """
        with contextlib.suppress(CheckpointError):
            return store.json_object(self.environment)
        return {}

    @property
    def key(self) -> str:
        """The key of the configuration; empty without ``config.toml``."""
        if not os.path.lexists(self.config):
            return ""
        text = store.contents(self.config).decode(errors="replace")
        try:
            return config_key(parse_toml(text, self.config.name))
        except CheckpointError:
            return digest(text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the result, linked to the configuration and to the rows in ``steps.jsonl``."""
        self.ensure_held()
        ties = {"key": self.key, "steps_sha256": self._written().text}
        store.replace_file(self.summary, store.sealed({**finite(summary), **ties}, indent=2))

    def read_summary(self) -> dict[str, Any] | None:
        """Return the result in ``summary.json``; ``None`` if the run is not finished."""
        if not os.path.lexists(self.summary):
            return None
        table = store.unsealed(self.summary)
        self._ensure_own(self.summary, table)
        return {name: value for name, value in table.items() if name not in TIES}

    def _ensure_own(self, path: Path, table: Mapping[str, Any]) -> None:
        """Raise CheckpointError if a file of another run was copied into this folder."""
        if table.get("key") != self.key:
            raise CheckpointError(
                "other-settings",
                "the file belongs to a run of another configuration or seed",
                place=(str(path),),
                hint=f"restore the file, or remove the folder {self.path}",
            )

    def records(self) -> list[dict[str, Any]]:
        """Return all complete lines of ``steps.jsonl``.

        Each has its ``seconds`` and the ``compile_seconds`` up to it.
        """
        names = ("seconds", "compile_seconds")
        clocks: dict[int, dict[str, Any]] = {}
        for row in store.lines(self.timings, stamped=True):
            clocks[row["step"]] = {name: row[name] for name in names if name in row}
        return [
            {**row, "seconds": None, **clocks.get(row["step"], {})}
            for row in store.lines(self.steps)
        ]

    def diagnoses(self) -> list[dict[str, Any]]:
        """Return all complete lines of ``diagnosis.jsonl``, each with its ``seconds``."""
        times = store.lines(self.timings, stamped=True)
        took = {row["step"]: row.get("diagnosis_seconds") for row in times}
        rows = store.lines(self.diagnosis, stamped=True)
        return [{**row, "seconds": took.get(row["step"])} for row in rows]

    def append_diagnosis(self, row: Mapping[str, Any]) -> None:
        """Append the line of a diagnosed step."""
        self.ensure_held()
        store.append(self.diagnosis, store.stamped(store.as_json(row)) + b"\n")

    def append(self, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """Append the lines of one outer step.

        The operating system has received the lines when this method returns.
        """
        self.ensure_held()
        rows = self._written()
        line = store.as_json(record) + b"\n"
        clock = store.as_json(timing)
        store.append(self.steps, line)
        store.append(self.timings, store.stamped(clock) + b"\n")
        rows.add(line)

    def _written(self) -> Digest:
        """Return the length and digest of ``steps.jsonl``, which is read only once."""
        if not self._rows:
            self._rows.append(Digest(store.contents(self.steps) if self.steps.exists() else b""))
        return self._rows[0]

    # --- checkpoints

    def save(self, state: State, step: int) -> None:
        """Write a checkpoint.

        The order is: the rows and the tensors under a new name, then the file that points to them,
        then the removal of old tensors. Each part is on the disk before the next part.
        """
        self.ensure_held()
        structure, tensors = pack(state)
        name = f"checkpoint-{step}.safetensors"
        data = safetensors.torch.save(tensors)
        rows = self._written()
        for path in (self.steps, self.timings):
            if path.exists():
                store.flush(path)
        store.replace_file(self.path / name, data)
        store.flush(self.path)
        pointer = {
            "step": step,
            "tensors": name,
            "key": self.key,
            "tensors_bytes": len(data),
            "sha256": digest(data),
            "steps_bytes": rows.size,
            "steps_sha256": rows.text,
            "state": structure,
        }
        store.replace_file(self.checkpoint, store.sealed(pointer, indent=1))
        store.flush(self.path)
        self._remove_others(name)

    def _remove_others(self, name: str) -> None:
        """Remove tensors without a checkpoint, and incomplete files of a killed process."""
        for old in self.path.glob("checkpoint-*.safetensors*"):
            if old.name != name:
                with contextlib.suppress(OSError):
                    old.unlink()

    def load(self, device: torch.device | str = "cpu") -> tuple[State, int] | None:
        """Return (state, step) of the checkpoint; ``None`` if there is no checkpoint yet.

        All files that a resumed run depends on are checked. A damaged file raises an error, and no
        file is changed.
        """
        for path in (self.steps, self.timings, self.diagnosis, self.environment):
            if os.path.lexists(path):
                # reject links, pipes and folders before any change
                with store.regular(path):
                    pass
        for _ in store.lines(self.diagnosis, stamped=True):
            pass  # reading rejects lines that are not rows, or were changed
        if not os.path.lexists(self.checkpoint):
            return None
        pointer = store.unsealed(self.checkpoint)
        self._ensure_own(self.checkpoint, pointer)
        try:
            step = int(pointer["step"])
            path = self.path / Path(pointer["tensors"]).name
            with store.regular(path, most=sys.maxsize) as stream:
                if os.fstat(stream.fileno()).st_size != int(pointer["tensors_bytes"]):
                    raise damaged(path, "its size does not match the recorded size")
                data = stream.read()
            if digest(data) != pointer["sha256"]:
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
                self.checkpoint, f"it does not contain a state: {store.described(error)}"
            ) from None

    def _check_digest(self, step: int, size: int, expected: str) -> None:
        """Check that the first ``size`` bytes of ``steps.jsonl`` are as in the checkpoint."""
        rows = store.contents(self.steps) if size or self.steps.exists() else b""
        if len(rows) < size:
            raise damaged(self.steps, f"it ends before step {step} of the checkpoint")
        if digest(rows[:size]) != expected:
            raise damaged(self.steps, "its contents do not match the recorded sha256")

    def _check_lines(self, path: Path, step: int) -> None:
        """Check that every step up to this step has an unchanged line."""
        expected = 0
        for row in store.lines(path, stamped=True):
            if expected > step:
                return
            if row["step"] != expected:
                break
            expected += 1
        if expected <= step:
            raise damaged(path, f"it lacks step {expected}")

    def rewind(self, step: int) -> float:
        """Remove all lines after ``step``, and the checkpoints of other steps.

        An incomplete last line is also removed. Return the seconds spent up to ``step``.
        """
        kept = {}
        for path in (self.steps, self.timings):
            data = store.contents(path) if path.exists() else b""
            rows = data.split(b"\n")[: step + 1]
            kept[path] = b"".join(row + b"\n" for row in rows)
            if kept[path] != data:
                store.replace_file(path, kept[path])
        if self.diagnosis.exists():
            data = store.contents(self.diagnosis)
            rows = data.split(b"\n")[:-1]
            early = b"".join(row + b"\n" for row in rows if json.loads(row)["step"] <= step)
            if early != data:
                store.replace_file(self.diagnosis, early)
        self._rows[:] = [Digest(kept[self.steps])]
        self._remove_others(f"checkpoint-{step}.safetensors")
        clock = kept[self.timings].split(b"\n")
        return float(json.loads(clock[-2])["seconds"]) if len(clock) > 1 else 0.0
