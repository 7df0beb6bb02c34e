"""Executors of jobs: their protocol, and the executor with processes of this machine."""

from __future__ import annotations

from typing import Any

from hgms.executors.board import Board, RemoteProgress, to_stderr
from hgms.executors.digests import code_of, ensure_same, installation
from hgms.executors.jobs import (
    TRIES,
    Ending,
    Executor,
    Here,
    Job,
    Needs,
    Report,
    Tell,
    as_error,
    called,
    pack_error,
    tried_again,
    unpack_error,
)
from hgms.executors.local import Local, cores
from hgms.executors.lookup import executor_of, executor_options, stated_executor
from hgms.executors.shared_work import BUSY, Piece, carried_out_together, unless_busy
from hgms.executors.transport import carried_out, carried_out_beside, ending_of, packed
from hgms_core import hookimpl

__all__ = [
    "BUSY",
    "TRIES",
    "Board",
    "Ending",
    "Executor",
    "Here",
    "Job",
    "Local",
    "Needs",
    "Piece",
    "RemoteProgress",
    "Report",
    "Tell",
    "as_error",
    "called",
    "carried_out",
    "carried_out_beside",
    "carried_out_together",
    "code_of",
    "cores",
    "ending_of",
    "ensure_same",
    "executor_of",
    "executor_options",
    "installation",
    "pack_error",
    "packed",
    "stated_executor",
    "to_stderr",
    "tried_again",
    "unless_busy",
    "unpack_error",
]


@hookimpl
def hgms_register_executors() -> list[type[Any]]:
    return [Local]
