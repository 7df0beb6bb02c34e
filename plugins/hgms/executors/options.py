"""Command-line options of executors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from hgms.config.tables import lay_options
from hgms.executors.jobs import Executor
from hgms.executors.lookup import executor_of
from hgms.plugins import Host
from hgms_core import ConfigError

PREFIX = "executor."


def executor_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--executor`` and ``--address`` to a command."""
    name = click.option(
        "--executor",
        metavar="NAME",
        help="What carries it out instead of processes of this machine: ray, slurm.",
    )
    address = click.option(
        "--address",
        metavar="HOST:PORT",
        help="Where the executor's cluster is; short for --set executor.address=HOST:PORT.",
    )
    return name(address(command))


def stated_executor(
    name: str | None, address: str | None, jobs: int | None, sets: Sequence[str], host: Host
) -> tuple[Executor | None, list[str]]:
    """Return the executor of the command line, and each ``--set`` that belongs to something else.

    The executor is None if the command line names no executor.
    """
    own = [text for text in sets if text.startswith(PREFIX)]
    if name is None:
        if own or address is not None:
            what = f"--set {own[0]}" if own else f"--address {address}"
            raise ConfigError(
                "missing-option",
                "the option belongs to an executor, but --executor is not given",
                place=(what,),
                hint="add --executor ray",
            )
        return None, list(sets)
    table: dict[str, Any] = {}
    lay_options(table, [text.removeprefix(PREFIX) for text in own])
    table |= {
        key: value for key, value in {"address": address, "jobs": jobs}.items() if value is not None
    }
    return executor_of(name, table, host), [text for text in sets if text not in own]
