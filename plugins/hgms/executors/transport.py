"""A job on its way to another machine and back: what travels is plain values, and the code there
has to be the same.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from hgms.executors.digests import ensure_same, installation
from hgms.executors.jobs import (
    Ending,
    Job,
    Needs,
    Report,
    Tell,
    as_error,
    called,
    pack_error,
    unpack_error,
)
from hgms.executors.local import Local
from hgms.runs import stoppable
from hgms_core import ConfigError


def packed(job: Job) -> dict[str, Any]:
    """What :func:`carried_out` needs of a job, as JSON holds it."""
    return {
        "title": job.title,
        "function": job.function,
        "arguments": dict(job.arguments),
        "prepare": job.prepare,
        "cpus": job.needs.cpus,
        "gpus": job.needs.gpus,
        "installation": installation(job.code),
        "folder": os.getcwd(),
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith("HGMS_")
        },
    }


def carried_out(message: Mapping[str, Any]) -> dict[str, Any]:
    """The job of a message, carried out in this process: ``outcome`` or ``error``, with the
    ``events`` that it told but for its steps and stages, which are nothing to a person afterwards;
    ``refused``, an error, with nothing done, where this machine has other code or no such folder.
    """
    events: list[dict[str, Any]] = []

    def tell(**event: Any) -> None:
        if event["event"] not in ("step", "stage"):
            events.append(event)

    try:
        ensure_same(message["installation"], platform.node())
        os.chdir(message["folder"])
    except ConfigError as error:
        return {"refused": pack_error(error)}
    except OSError as error:
        missing = ConfigError(
            "missing-file",
            f"the machine {platform.node()} cannot open this folder: {error.strerror}",
            place=(message["folder"],),
            hint="use a folder on a disk that all machines share",
        )
        return {"refused": pack_error(missing)}
    os.environ.update(message["environment"])  # where data and caches are, what may be trusted
    torch.set_num_threads(message["cpus"])
    try:
        with stoppable():
            return {
                "outcome": dict(called(message["function"])(message["arguments"], tell)),
                "events": events,
            }
    except Exception as error:
        return {"error": pack_error(as_error(error)), "events": events}


def carried_out_beside(message: Mapping[str, Any]) -> dict[str, Any]:
    """As :func:`carried_out`, in a process beside this one: ``lost`` says why where that was
    killed, and this process, which took long to start, is there for the next message.
    """
    needs = Needs(cpus=message["cpus"], gpus=message["gpus"])
    job = Job(
        title=message["title"],
        function=f"{__name__}:_carried_out",
        prepare=f"{__name__}:_prepared",
        arguments=message,
        needs=needs,
    )
    for ending in _beside().carry_out(iter([job]), lambda job, event: None):
        if ending.outcome is not None:
            return dict(ending.outcome)
        if ending.error is not None:
            return {"error": pack_error(ending.error), "events": []}
        return {"lost": ending.lost}
    raise AssertionError("an executor gives every job an ending")


@functools.cache
def _beside() -> Local:
    return Local(jobs=1)


def _carried_out(message: Mapping[str, Any], _tell: Tell) -> dict[str, Any]:
    return carried_out(message)


def _prepared(message: Mapping[str, Any], tell: Tell) -> None:
    called(message["function"])
    if message["prepare"]:
        called(message["prepare"])(message["arguments"], tell)


def ending_of(job: Job, result: Mapping[str, Any], report: Report) -> Ending:
    """How a job ended, by what :func:`carried_out` or :func:`carried_out_beside` returned.

    Errors: ConfigError where it was refused, since no other job would fare better.
    """
    if "refused" in result:
        raise unpack_error(result["refused"])
    if "lost" in result:
        return Ending(job=job, lost=result["lost"])
    for event in result["events"]:
        report(job, event)
    error = unpack_error(result["error"]) if "error" in result else None
    return Ending(job=job, outcome=result.get("outcome"), error=error)
