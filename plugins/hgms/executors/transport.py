"""Messages that send a job to another machine and return its result.

Messages contain plain values only. Both machines must have the same code.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from hgms.arguments import require
from hgms.executors.jobs import Job, as_error, function_of, pack_error
from hgms.runs import ignore, stoppable
from hgms_core import ConfigError, __version__


def installation() -> dict[str, str]:
    """Return the versions that must be equal on both machines.

    The local part of torch's version, such as ``+cpu``, may differ: the machine that submits jobs
    may have no GPU.
    """
    torch_version, _, _ = torch.__version__.partition("+")
    return {"python": platform.python_version(), "torch": torch_version, "hgms": __version__}


def ensure_same(expected: Mapping[str, str], where: str) -> None:
    """Raise ConfigError if this machine has other versions than the requesting machine."""
    own = installation()
    lines = [
        f"{name}: {own[name]} there, {value} here"
        for name, value in expected.items()
        if own[name] != value
    ]
    require(
        not lines,
        "other-installation",
        "\n".join([f"the worker on {where} has other versions than this machine", *lines]),
        hint="install the same packages there",
    )


def pack_job(job: Job) -> dict[str, Any]:
    """Return the parts of a job that :func:`run_message` needs, as JSON values."""
    return {
        "title": job.title,
        "function": job.function,
        "arguments": dict(job.arguments),
        "cpus": job.needs.cpus,
        "installation": installation(),
        "folder": os.getcwd(),
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith("HGMS_")
        },
    }


def run_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Run the job of a message in this process.

    The result contains ``outcome`` or ``error``. If this machine has other versions or lacks the
    folder, the job does not run, and ``rejected`` contains the error. Events of the job are not
    sent.
    """
    try:
        ensure_same(message["installation"], platform.node())
        os.chdir(message["folder"])
    except ConfigError as error:
        return {"rejected": pack_error(error)}
    except OSError as error:
        missing = ConfigError(
            "missing-file",
            f"the machine {platform.node()} cannot open this folder: {error.strerror}",
            place=(message["folder"],),
            hint="use a folder on a disk that all machines share",
        )
        return {"rejected": pack_error(missing)}
    os.environ.update(message["environment"])  # locations of data and caches, and trust settings
    torch.set_num_threads(message["cpus"])
    try:
        with stoppable():
            outcome = function_of(message["function"])(message["arguments"], ignore)
            return {"outcome": dict(outcome)}
    except Exception as error:
        return {"error": pack_error(as_error(error))}
