"""Where jobs are carried out: the protocol of executors, and the one that has processes of this machine."""

from __future__ import annotations

from typing import Any

from hgms_core import hookimpl
from hgms_executors.again import TRIES, tried_again
from hgms_executors.chosen import executor_of
from hgms_executors.digests import code_of, ensure_same, installation
from hgms_executors.elsewhere import carried_out, carried_out_beside, ending_of, packed
from hgms_executors.jobs import Ending, Executor, Job, Needs, Report, Tell, called, described
from hgms_executors.local import Local, cores
from hgms_executors.options import executor_options, stated_executor
from hgms_run import unannounced

__all__ = [
    "TRIES", "Ending", "Executor", "Job", "Local", "Needs", "Report", "Tell", "called", "carried_out", "carried_out_beside",
    "code_of", "cores", "described", "ending_of", "ensure_same", "executor_of", "executor_options", "installation", "packed",
    "stated_executor", "tried_again", "unannounced",
]  # fmt: skip


@hookimpl
def hgms_register_executors() -> list[type[Any]]:
    return [Local]
