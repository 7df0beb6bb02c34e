"""Where jobs are carried out: the protocol of executors, and the one that has processes of this machine."""

from __future__ import annotations

from typing import Any

from hgms_core import hookimpl
from hgms_executors.chosen import executor_of
from hgms_executors.digests import code_of, ensure_same, installation
from hgms_executors.jobs import Ending, Executor, Job, Needs, Report, Tell, called
from hgms_executors.local import Local, cores

__all__ = [
    "Ending", "Executor", "Job", "Local", "Needs", "Report", "Tell", "called", "code_of", "cores", "ensure_same", "executor_of",
    "installation",
]  # fmt: skip


@hookimpl
def hgms_register_executors() -> list[type[Any]]:
    return [Local]
