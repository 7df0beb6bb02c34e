"""Executors of jobs: their protocol, and the executor with processes of this machine."""

from __future__ import annotations

from typing import Any

from hgms.executors.board import Board, RemoteProgress, to_stderr
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
    function_of,
    pack_error,
    run_with_retries,
    unpack_error,
)
from hgms.executors.local import Local, cores
from hgms.executors.lookup import executor_of, executor_options, stated_executor
from hgms.executors.shared_work import BUSY, Piece, run_together, unless_busy
from hgms.executors.transport import pack_job, run_message
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
    "cores",
    "executor_of",
    "executor_options",
    "function_of",
    "pack_error",
    "pack_job",
    "run_message",
    "run_together",
    "run_with_retries",
    "stated_executor",
    "to_stderr",
    "unless_busy",
    "unpack_error",
]


@hookimpl
def hgms_register_executors() -> list[type[Any]]:
    return [Local]
