"""The recorder: the rows of a run, in memory and in its folder if it has one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import torch
from attrs import define, field

from hgms.arguments import errors_at
from hgms.runs.checkpoint import pack
from hgms.runs.folder import RunFolder
from hgms.runs.stepper import Position
from hgms.store import finite
from hgms_core import ConfigError, Record, State
from hgms_core.errors import CheckpointError


@define(eq=False, kw_only=True)
class Recorder:
    """Stores the rows of a run, and writes the rows and the positions to ``folder``.

    ``resume`` is whether the run continues the run in the folder. ``patience`` is the number of
    seconds to wait for another process in the folder. ``word`` is the option with which a user
    requests resuming.

    Raises
    ------
    CheckpointError
        Of :class:`RunFolder`.
    ConfigError
        For a state that no file can store.
    """

    folder: RunFolder | None = None
    resume: bool = False
    patience: float | None = None
    word: str = "resume=True"
    rows: list[Record] = field(factory=list, init=False)
    diagnoses: list[Record] = field(factory=list, init=False)
    saved_at: float = field(factory=time.monotonic, init=False)
    saved_step: int = field(default=-1, init=False)

    def claim(self, config: str) -> contextlib.AbstractContextManager[Any]:
        """Claim the folder for this process, and compare its configuration with ``config``."""
        if self.folder is None:
            return contextlib.nullcontext()
        return self.folder.claim(config, resume=self.resume, patience=self.patience, word=self.word)

    def load(self, device: torch.device) -> tuple[State, int] | None:
        """Return the saved state and its step; ``None`` for a new run."""
        if self.folder is None or not self.resume:
            return None
        loaded = self.folder.load(device)
        if loaded is not None:
            self.saved_step = loaded[1]
        return loaded

    def environment(self) -> dict[str, Any]:
        """Return the recorded environment of the run that is resumed."""
        return self.folder.read_environment() if self.folder is not None and self.resume else {}

    def begin(self, config: str, environment: Mapping[str, Any]) -> float:
        """Create the folder, or cut its files back to the saved state.

        Return the seconds that were spent up to this state.
        """
        assert self.folder is not None
        self.folder.create(config, environment)
        if not self.resume:
            return 0.0
        seconds = self.folder.rewind()
        self.reread()
        return seconds

    def record(self, row: Record, timing: Mapping[str, float], **durations: float) -> None:
        """Append the row of a step with its seconds.

        ``durations`` are further durations of the step.
        """
        row = finite(row)
        if self.folder is not None:
            self.folder.append(row, {"step": row["step"], **timing, **durations})
        self.rows.append({**row, **timing})

    def record_diagnosis(self, row: Record, seconds: float) -> None:
        """Append the row of a diagnosed step."""
        if self.folder is not None:
            self.folder.append_diagnosis(row)
        self.diagnoses.append({**row, "seconds": seconds})

    def is_due(self, every: float) -> bool:
        """Return whether the last save is at least ``every`` seconds ago."""
        return time.monotonic() - self.saved_at >= every

    def save(self, position: Position) -> None:
        """Save a position, unless its step is saved already."""
        if self.folder is not None and self.saved_step != position.step:
            with errors_at("method", of=ConfigError):
                self.folder.save(position.state, position.step)
        self.saved_at = time.monotonic()
        self.saved_step = position.step

    def check_storable(self, state: State) -> None:
        """Require a state that a file can contain, if the run has a folder."""
        with errors_at("method", of=ConfigError):
            pack(state if self.folder is not None else {})

    def note(self, key: str, value: Any) -> None:
        """Record a fact about the environment of the run."""
        if self.folder is not None:
            self.folder.note(key, value)

    def finish(self, position: Position, summary: Mapping[str, Any]) -> None:
        """Write the summary of a run that has ended, and its last position."""
        if self.folder is None:
            return
        summary = finite(summary)
        if self.saved_step == position.step:
            self.folder.write_summary(summary)
            return
        with errors_at("method", of=ConfigError):
            self.folder.save(position.state, position.step, summary)
        self.saved_step = position.step

    def read_finished(self, device: torch.device) -> tuple[dict[str, Any], State] | None:
        """Return the summary and the last state; ``None`` if the run is not finished."""
        if self.folder is None or not self.resume:
            return None
        summary = self.folder.read_summary()
        if summary is None or summary.get("status") != "done":
            return None
        loaded = self.folder.load(device)
        if loaded is None:
            raise CheckpointError(
                "missing-file",
                "the folder has a summary, but no checkpoint",
                place=(str(self.folder.manifest),),
                hint="remove the folder, then run again",
            )
        return summary, loaded[0]

    def reread(self) -> None:
        """Read the rows in the folder."""
        assert self.folder is not None
        self.folder.remove_old_states()
        self.rows = self.folder.records()
        self.diagnoses = self.folder.diagnoses()
