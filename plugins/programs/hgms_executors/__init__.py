"""Where jobs are carried out: the protocol of executors, and the one that has processes of this machine."""

from __future__ import annotations

from typing import Any

from hgms_core import hookimpl
from hgms_executors.again import TRIES, tried_again
from hgms_executors.board import Board, to_stderr
from hgms_executors.chosen import executor_of
from hgms_executors.digests import code_of, ensure_same, installation
from hgms_executors.elsewhere import carried_out, carried_out_beside, ending_of, packed
from hgms_executors.here import Here
from hgms_executors.jobs import Ending, Executor, Job, Needs, Report, Tell, called, described
from hgms_executors.local import Local, cores
from hgms_executors.options import executor_options, stated_executor
from hgms_executors.remote_progress import RemoteProgress
from hgms_executors.together import BUSY, Piece, carried_out_together, unless_busy

__all__ = [
    "BUSY", "TRIES", "Board", "Ending", "Executor", "Here", "Job", "Local", "Needs", "Piece", "RemoteProgress", "Report",
    "Tell", "called", "carried_out", "carried_out_beside", "carried_out_together", "code_of", "cores", "described", "ending_of",
    "ensure_same", "executor_of", "executor_options", "installation", "packed", "stated_executor", "to_stderr",
    "tried_again", "unless_busy",
]  # fmt: skip


@hookimpl
def hgms_register_executors() -> list[type[Any]]:
    return [Local]
