"""The saved state of fine-tuning: sealed checkpoints, and the losses so far."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hgms import store
from hgms.runs import Interrupts
from hgms.store import appending, file_digest, replace_file
from hgms_core import NumericalError
from hgms_core.errors import CheckpointError

SEAL = "sha256.json"
"""The file in a checkpoint's folder that is written last. It contains the digests of the
other files, and of the losses so far.
"""

Watch = Callable[[int, int, float], None]
"""``watch(optimiser step, total steps, loss of the step)``."""


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint; a checkpoint without a seal is incomplete.

    Errors: CheckpointError if a file does not match the seal.
    """
    for checkpoint in (
        sorted(folder.glob("checkpoint-*"), key=step_of, reverse=True) if folder.is_dir() else []
    ):
        if not (checkpoint / SEAL).exists():
            continue
        try:
            seal = json.loads((checkpoint / SEAL).read_bytes())
            whole = seal["files"] == digests(checkpoint) and {"bytes", "sha256"} == set(
                seal["losses"]
            )
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            whole = False
        if not whole:
            raise CheckpointError(
                "damaged-file",
                f"the files of the checkpoint do not match the checksums in {SEAL}",
                place=(str(checkpoint),),
                hint="remove it to resume from an earlier checkpoint, or to restart fine-tuning",
            )
        return checkpoint
    return None


def seal(checkpoint: Path, log: LossLog) -> None:
    """Mark a checkpoint as complete, and remove all earlier checkpoints."""
    content = {"files": digests(checkpoint), "losses": log.digest()}
    replace_file(checkpoint / SEAL, json.dumps(content, indent=1).encode())
    remove(
        earlier
        for earlier in checkpoint.parent.glob("checkpoint-*")
        if step_of(earlier) < step_of(checkpoint)
    )


def remove(checkpoints: Iterable[Path]) -> None:
    """Remove checkpoints, each seal first.

    After an interrupted removal, a checkpoint without seal is incomplete and ignored.
    """
    for checkpoint in sorted(checkpoints, key=step_of):
        (checkpoint / SEAL).unlink(missing_ok=True)
        shutil.rmtree(checkpoint, ignore_errors=True)


def digests(checkpoint: Path) -> dict[str, str]:
    """Return the digests of all files except the seal, complete or partly written."""
    files = (
        path
        for path in sorted(checkpoint.iterdir())
        if path.is_file() and not path.name.startswith(SEAL)
    )
    return {path.name: file_digest(path) for path in files}


def step_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])


class LossLog:
    """``losses.jsonl``: one line per optimiser step."""

    def __init__(self, path: Path, watch: Watch, interrupts: Interrupts) -> None:
        self.path = path
        self.watch = watch
        self.interrupts = interrupts

    @property
    def data(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for number, line in enumerate(self.data.split(b"\n")[:-1], start=1):
            try:
                row = json.loads(line)
                rows.append({**row, "step": int(row["step"]), "loss": float(row["loss"])})
            except (ValueError, TypeError, KeyError, RecursionError):
                raise self._damaged("the line is not the loss of a step", number) from None
        return rows

    def digest(self) -> dict[str, Any]:
        return {"bytes": len(self.data), "sha256": store.digest(self.data)}

    def rewind(self, checkpoint: Path | None) -> None:
        """Remove the losses after the checkpoint; check the earlier losses against its seal."""
        step = step_of(checkpoint)
        if checkpoint is not None:
            sealed = json.loads((checkpoint / SEAL).read_bytes())["losses"]
            if store.digest(self.data[: sealed["bytes"]]) != sealed["sha256"]:
                raise self._damaged(f"the file does not match the checksum of step {step}")
        kept = [row for row in self.rows() if row["step"] <= step]
        replace_file(self.path, b"".join(json.dumps(row).encode() + b"\n" for row in kept))

    def append(self, row: Mapping[str, Any], steps: int) -> None:
        if not math.isfinite(row["loss"]):
            raise NumericalError(
                "not-finite",
                f"the loss of fine-tuning step {row['step']} is {row['loss']}; earlier checkpoints "
                "are saved",
                place=("finetune", "lr"),
                hint="decrease lr, or set clip = 1.0",
            )
        with appending(self.path) as stream:
            stream.write(json.dumps(row).encode() + b"\n")
        self.watch(row["step"], steps, row["loss"])

    def _damaged(self, message: str, *line: int) -> CheckpointError:
        return CheckpointError(
            "damaged-file",
            message,
            place=(str(self.path), *line),
            hint=f"remove the folder {self.path.parent} to repeat the stage",
        )
