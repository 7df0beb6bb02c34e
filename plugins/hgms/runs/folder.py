"""A run on disk, readable and resumable after a kill at any time.

::

    config.toml                      the resolved configuration
    env.json                         versions, plugins, device, git commit
    steps.jsonl                      one line per outer step; the same for every run of one seed
    timings.jsonl                    the clock of each step; a separate file, since times vary
    diagnosis.jsonl                  one line per diagnosed step (run.diagnose)
    checkpoint-<step>.safetensors    the state of the method
    summary.json                     the result, written last
    manifest.json                    the files that belong together (:class:`hgms.store.Folder`)

The key of the manifest is the digest of the configuration. If a file is unreadable, the error
names it, and HGMS does not guess its contents. A resuming run first checks all bytes that it
depends on, and only then changes files. HGMS does not write through symbolic links.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import define, field

from hgms import store
from hgms.arguments import require
from hgms.runs.checkpoint import state_bytes, state_of
from hgms.runs.identity import differences, is_same, text_key
from hgms.store import Folder
from hgms_core import State
from hgms_core.arguments import reports_errors
from hgms_core.components import read_by_annotation
from hgms_core.errors import CheckpointError

CONFIG = "config.toml"
ENVIRONMENT = "env.json"
STEPS = "steps.jsonl"
TIMINGS = "timings.jsonl"
DIAGNOSIS = "diagnosis.jsonl"
SUMMARY = "summary.json"
LOGS = (STEPS, TIMINGS, DIAGNOSIS)


class _File:
    """The path of a file in a run's folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: RunFolder, _cls: type) -> Path:
        return folder.path / self.name


def _path(value: str | Path) -> Path:
    require(
        isinstance(value, str | os.PathLike),
        "wrong-type",
        f"path={value!r} must be a path",
        place=("path",),
    )
    return Path(value)


@reports_errors
@define(eq=False, field_transformer=read_by_annotation)
class RunFolder:
    """One run on disk: ``RunFolder("runs/mine")``.

    The constructor creates no files. :func:`run` and :meth:`create` do.

    ``config``, ``steps``, ``timings``, ``diagnosis``, ``manifest``, ``summary`` and ``traceback``
    are the paths of its files. ``has_begun`` is True if any of them exists. For such a run,
    :meth:`records` returns the rows with their ``seconds``. :meth:`read_summary` returns the result
    (``None`` if there is no result yet). :meth:`load` returns the state and step of the last
    checkpoint.

    Raises
    ------
    CheckpointError
        With the name of the file, if a file is damaged, if the folder contains another run, or if a
        file cannot be written. The existing files stay intact.

    Examples
    --------
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
    _own: Folder | None = field(default=None, init=False, repr=False)
    """The folder in the store while this object writes to it."""

    config = _File(CONFIG)
    environment = _File(ENVIRONMENT)
    steps = _File(STEPS)
    timings = _File(TIMINGS)
    diagnosis = _File(DIAGNOSIS)
    manifest = _File(store.MANIFEST)
    summary = _File(SUMMARY)
    traceback = _File("traceback.txt")

    @property
    def has_begun(self) -> bool:
        """Whether a run has written any of its files here."""
        paths = (self.config, self.steps, self.timings, self.manifest, self.summary)
        return any(map(os.path.lexists, paths))

    @property
    def artifact(self) -> Folder:
        """The folder in the store, with the key of the configuration."""
        if self._own is not None:
            return self._own
        exists = os.path.lexists(self.config)
        text = store.contents(self.config).decode(errors="replace") if exists else ""
        return Folder(self.path, text_key(text))

    # --- claims

    @contextlib.contextmanager
    def claim(
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

        Raises
        ------
        CheckpointError
            The folder contains a run of another configuration, or a run that must not be resumed,
            or lost its ``config.toml``, or another process writes to it. No file was changed.
        """
        require(
            self.path.is_dir() or not self.path.exists(),
            "not-a-folder",
            "the path is a file, but a run requires a folder",
            hint="use another path",
            place=(str(self.path),),
            error=CheckpointError,
        )
        if self.has_begun:
            self._ensure_same(config, resume, word)
        own = Folder(self.path, text_key(config))
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(own.lease(patience=patience))
            except store.DiskError:
                # on a read-only disk, a finished run is only read back
                if not (resume and self.summary.exists()):
                    raise
            self._own = own
            held.callback(self._release)
            yield

    def _release(self) -> None:
        self._own = None

    def _ensure_same(self, config: str, resume: bool, word: str) -> None:
        require(
            self.config.exists(),
            "missing-file",
            "the folder contains a run without a config.toml",
            hint="restore this file, use another folder, or remove this one",
            place=(str(self.config),),
            error=CheckpointError,
        )
        if not self.holds(config):
            text = self.config.read_text(errors="replace")
            message = "the folder contains a run of another configuration"
            raise CheckpointError(
                "other-settings",
                "\n".join([message, *differences(text, config)]),
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
        return is_same(store.contents(self.config).decode(errors="replace"), config)

    # --- writing

    def create(self, config: str, environment: Mapping[str, Any]) -> None:
        """Write the configuration and ``env.json``."""
        if self._own is None:
            self._own = Folder(self.path, text_key(config))
        self._own.write(CONFIG, config.encode())
        self._own.write(ENVIRONMENT, store.as_json(environment, indent=2))

    def note(self, key: str, value: Any) -> None:
        """Set an entry of ``env.json``; other entries stay unchanged."""
        table = {**self.read_environment(), key: value}
        self.artifact.write(ENVIRONMENT, store.as_json(table, indent=2))

    def append(self, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """Append the lines of one outer step.

        The operating system has received the lines when this method returns.
        """
        line = store.as_json(record) + b"\n"
        self.artifact.append({STEPS: line, TIMINGS: store.as_json(timing) + b"\n"})

    def append_diagnosis(self, row: Mapping[str, Any]) -> None:
        """Append the line of a diagnosed step."""
        self.artifact.append({DIAGNOSIS: store.as_json(row) + b"\n"})

    def save(self, state: State, step: int, summary: Mapping[str, Any] | None = None) -> None:
        """Record the rows, a state and, at the end of the run, its summary in one atomic step."""
        own = self.artifact
        name = f"checkpoint-{step}.safetensors"
        own.write(name, state_bytes(state))
        self._commit(own, [name, *self._logs()], {"step": step, "state": name}, summary)
        self.remove_old_states()

    def remove_old_states(self) -> None:
        """Remove the states that a killed process left next to the recorded state."""
        self.artifact.remove_unrecorded("checkpoint-*.safetensors*")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Record the result. The recorded state and the recorded rows stay as they are."""
        own = self.artifact
        before = own.manifest()
        keep = [name for name in before.files if name != SUMMARY]
        logs = [name for name in self._logs() if name not in keep]
        self._commit(own, logs, before.facts, summary, keep)

    def _commit(
        self,
        own: Folder,
        names: list[str],
        facts: Mapping[str, Any],
        summary: Mapping[str, Any] | None,
        keep: list[str] | None = None,
    ) -> None:
        done = False
        if summary is not None:
            own.write(SUMMARY, store.as_json(summary, indent=2))
            names = [*names, SUMMARY]
            done = summary.get("status") == "done"
        facts = {**facts, "seconds": last_seconds(self.timings)}
        own.commit(names, keep=keep or (), facts=facts, done=done)

    def _logs(self) -> list[str]:
        return [name for name in LOGS if os.path.lexists(self.path / name)]

    def rewind(self) -> float:
        """Cut the rows back to the last recorded state, or to none. Remove the summary.

        Return the seconds spent up to this state.
        """
        own = self.artifact
        own.ensure_held()
        manifest = own.manifest()
        has_state = "state" in manifest.facts
        if SUMMARY in manifest.files or not (has_state or manifest.status == "new"):
            own.commit(
                [],
                keep=[name for name in manifest.files if name != SUMMARY] if has_state else [],
                facts=manifest.facts if has_state else {},
            )
        with store.writing(self.summary):
            self.summary.unlink(missing_ok=True)
        for name in LOGS:
            own.rewind(name)
        return last_seconds(self.timings) or 0.0

    # --- reading

    def read_environment(self) -> dict[str, Any]:
        """Return ``env.json``, or an empty table if it is missing or unreadable.

        No results are computed from this file.
        """
        with contextlib.suppress(CheckpointError):
            return store.json_object(self.environment)
        return {}

    def read_summary(self) -> dict[str, Any] | None:
        """Return the result in ``summary.json``; ``None`` if the run is not finished."""
        if not (os.path.lexists(self.manifest) and os.path.lexists(self.summary)):
            return None
        own = self.artifact
        if SUMMARY not in own.manifest().files:
            return None
        return store.as_object(own.read(SUMMARY), self.summary)

    def records(self) -> list[dict[str, Any]]:
        """Return all complete lines of ``steps.jsonl``.

        Each has its ``seconds`` and the ``compile_seconds`` up to it.
        """
        names = ("seconds", "compile_seconds")
        clocks: dict[int, dict[str, Any]] = {}
        for row in self._rows(TIMINGS):
            clocks[row["step"]] = {name: row[name] for name in names if name in row}
        return [
            {**row, "seconds": None, **clocks.get(row["step"], {})} for row in self._rows(STEPS)
        ]

    def diagnoses(self) -> list[dict[str, Any]]:
        """Return all complete lines of ``diagnosis.jsonl``, each with its ``seconds``."""
        took = {row["step"]: row.get("diagnosis_seconds") for row in self._rows(TIMINGS)}
        return [{**row, "seconds": took.get(row["step"])} for row in self._rows(DIAGNOSIS)]

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        """Return the complete lines of a log, after a check of its recorded part."""
        return step_rows(self.artifact.read_log(name), self.path / name)

    def load(self, device: torch.device | str = "cpu") -> tuple[State, int] | None:
        """Return (state, step) of the checkpoint; ``None`` if there is no checkpoint yet.

        All files that a resumed run depends on are checked. A damaged file raises an error, and no
        file is changed.
        """
        for path in (self.path / name for name in (*LOGS, ENVIRONMENT, SUMMARY)):
            if os.path.lexists(path):
                # reject links, pipes and folders before any change
                with store.open_file(path, store.ROWS, store.remedy(path)):
                    pass
        if not os.path.lexists(self.manifest):
            return None
        own = self.artifact
        manifest = own.manifest()
        if "state" not in manifest.facts:
            return None
        for name in LOGS:
            own.read_log(name)
        try:
            name = manifest.facts["state"]
            step = int(manifest.facts["step"])
            data = own.read(name)
        except (KeyError, TypeError, ValueError):
            raise store.damaged_file(self.manifest, "it does not record a state") from None
        return state_of(data, self.path / name, device), step

    def results_digest(self) -> str:
        """Return a digest of the rows and the last state: the same for every run of one seed."""
        manifest = self.artifact.manifest()
        names = (STEPS, manifest.facts["state"])
        return store.json_digest([manifest.files[name].sha256 for name in names])


def last_seconds(path: Path) -> float | None:
    """Return the clock in the last complete line of a file of timings; None without one."""
    if not os.path.lexists(path):
        return None
    with store.open_file(path, store.ROWS) as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(-min(stream.tell(), 1 << 16), os.SEEK_CUR)
        lines = stream.read().split(b"\n")
    with contextlib.suppress(ValueError, IndexError, AttributeError, RecursionError):
        seconds = json.loads(lines[-2]).get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else None
    return None


def step_rows(data: bytes, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of steps in ``data``, which was read from the log ``path``.

    Only the last line may be incomplete (after a kill while appending). Any other damage raises an
    error with the line number.
    """
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            if not isinstance(row["step"], int):
                raise TypeError
        except (ValueError, RecursionError):
            raise store.damaged_file(path, "the line is not valid JSON", number) from None
        except (TypeError, KeyError, IndexError):
            raise store.damaged_file(path, "the line is not the row of a step", number) from None
        yield row
