"""The executor `slurm` with submitit's local processes in place of batch jobs: a plugin."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, ClassVar

from attrs import define

from hgms.executors.slurm.executor import Slurm
from hgms_core import hookimpl


@define(eq=False)
class SlurmHere(Slurm):
    name: ClassVar[str] = "slurm-here"

    def _queue(self, submitit: Any, folder: Path) -> Any:
        submitit.LocalJob.cancel = cancel
        return submitit.AutoExecutor(folder=folder, cluster="local")


def cancel(job: Any, check: bool = True) -> None:
    """Send SIGTERM, as scancel does."""
    job._process.send_signal(signal.SIGTERM)


@hookimpl
def hgms_register_executors() -> list[type[Any]]:
    return [SlurmHere]
