"""The command line: `hgms`, its own commands `list` and `plugins`, and what the commands of all programs share."""

from __future__ import annotations

import gc

import click

from hgms_cli.bars import Bars
from hgms_cli.terminal import (
    json_option,
    plugin_option,
    print_json,
    print_table,
    printable,
    track_option,
    trust_option,
)
from hgms_core import hookimpl

__all__ = [
    "Bars",
    "json_option",
    "main",
    "plugin_option",
    "print_json",
    "print_table",
    "printable",
    "track_option",
    "trust_option",
]


def main() -> None:
    """``hgms``, and ``python -m hgms_cli``.

    Torch is in memory by now: hundreds of thousands of objects that stay. Without freezing them every full collection goes
    through all of them, while plugins are imported and in runs alike (a quarter of a second of `hgms list`).
    """
    gc.freeze()
    from hgms_cli.group import main as group

    group()


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms_cli.inspect import list_components, list_plugins

    cli.add_command(list_components)
    cli.add_command(list_plugins)
