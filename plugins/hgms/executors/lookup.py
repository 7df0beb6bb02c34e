"""Create an executor from its name and its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from hgms.arguments import require
from hgms.config.tables import merge_options
from hgms.executors.jobs import Executor
from hgms.plugins import Host
from hgms_core import ConfigError, HgmsError
from hgms_core.errors import PluginError, unknown_name

HOOK = "hgms_register_executors"


def executor_classes(host: Host) -> dict[str, type[Any]]:
    """Return the executors of all plugins by name.

    If two executors have the same name, the first is used; HGMS's executors come first.
    """
    classes: dict[str, type[Any]] = {}
    for info, implementation in host.implementations(HOOK):
        for cls in host.call_hook(info, implementation):
            lacking = [name for name in ("name", "carry_out", "close") if not hasattr(cls, name)]
            if lacking:
                message = f"{cls!r} is not an executor: it lacks {', '.join(lacking)}"
                host.blame(info, PluginError("wrong-plugin", message, place=(HOOK,)), part=True)
            else:
                classes.setdefault(cls.name, cls)
    return classes


def executor_of(name: str, settings: Mapping[str, Any], host: Host) -> Executor:
    """Return the executor of that name with these settings.

    Raises
    ------
    ConfigError
        ``unknown-executor`` with the nearest name.
    ConfigError
        For an unknown setting or an invalid value.
    MissingExtra
        With the command that installs its package.
    """
    classes = executor_classes(host)
    if name not in classes:
        error = unknown_name("executor", name, classes, ("--executor",))
        for info in host.infos.values():
            if info.status == "missing-extra" and info.name.startswith(name):
                error = ConfigError(**{**error.as_dict(), "install": info.install})
        raise error
    try:
        executor: Executor = classes[name](**settings)
    except HgmsError as error:
        raise error.at("executor") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "wrong-value",
            f"the executor {name!r} rejects its settings: {error}",
            place=("executor",),
        ) from None
    return executor


PREFIX = "executor."


def executor_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--executor`` and ``--address`` to a command."""
    name = click.option(
        "--executor",
        metavar="NAME",
        help="Where to run instead of processes of this machine: ray, slurm.",
    )
    address = click.option(
        "--address",
        metavar="HOST:PORT",
        help="The address of the executor's cluster; short for --set executor.address=HOST:PORT.",
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
        require(
            not own and address is None,
            "missing-option",
            "the option belongs to an executor, but --executor is not given",
            place=(f"--set {own[0]}" if own else f"--address {address}",),
            hint="add --executor ray",
        )
        return None, list(sets)
    table: dict[str, Any] = {}
    merge_options(table, [text.removeprefix(PREFIX) for text in own])
    table |= {
        key: value for key, value in {"address": address, "jobs": jobs}.items() if value is not None
    }
    return executor_of(name, table, host), [text for text in sets if text not in own]
