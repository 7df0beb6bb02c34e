"""A job on its way to another machine and back: what travels is plain values, and the code there has to be the same."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from hgms_core import ConfigError
from hgms_executors.digests import ensure_same, installation
from hgms_executors.jobs import Ending, Job, Report, called, described
from hgms_run import stoppable


def packed(job: Job) -> dict[str, Any]:
    """What :func:`carried_out` needs of a job, as JSON holds it.

    .. versionadded:: 0.8"""
    return {
        "function": job.function, "arguments": dict(job.arguments), "cpus": job.needs.cpus,
        "installation": installation(job.code), "folder": os.getcwd(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith("HGMS_")},
    }  # fmt: skip


def carried_out(message: Mapping[str, Any]) -> dict[str, Any]:
    """The job of a message, carried out in this process: ``outcome`` or ``error``, with the ``events`` that it told but for its
    steps, which stand in the run's folder; ``refused``, with nothing done, where this machine has other code or no such folder.

    .. versionadded:: 0.8"""
    events: list[dict[str, Any]] = []

    def tell(**event: Any) -> None:
        if event["event"] != "step":
            events.append(event)

    try:
        ensure_same(message["installation"], platform.node())
        os.chdir(message["folder"])
    except ConfigError as error:
        return {"refused": str(error)}
    except OSError as error:
        return {
            "refused": f"{platform.node()} has no folder {message['folder']}: {error.strerror}\n  work on a disk that all share"
        }
    os.environ.update(message["environment"])  # where data and caches are, what may be trusted
    torch.set_num_threads(message["cpus"])
    try:
        with stoppable():
            return {"outcome": dict(called(message["function"])(message["arguments"], tell)), "events": events}
    except Exception as error:
        return {"error": described(error), "events": events}


def ending_of(job: Job, result: Mapping[str, Any], report: Report) -> Ending:
    """How a job ended, by what :func:`carried_out` returned.

    Errors: ConfigError where it was refused, since no other job would fare better.

    .. versionadded:: 0.8"""
    if "refused" in result:
        raise ConfigError(result["refused"])
    for event in result["events"]:
        report(job, event)
    return Ending(job=job, outcome=result.get("outcome"), error=result.get("error", ""))
