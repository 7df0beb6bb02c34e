"""Jobs through SLURM: the executor `slurm`."""

from __future__ import annotations

from typing import Any

from hgms_core import hookimpl


@hookimpl
def hgms_register_executors() -> list[type[Any]]:
    from hgms.executors.slurm.executor import Slurm

    return [Slurm]
