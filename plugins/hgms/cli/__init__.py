"""The command line: `hgms`, the commands `list` and `plugins`, and code shared by all commands."""

from __future__ import annotations

import click

from hgms.cli.complete import (
    Completer,
    component_names,
    kind_names,
    kind_then_name,
    quietly,
    with_commas,
)
from hgms.cli.docstrings import folded, unmarked
from hgms.cli.group import main
from hgms.cli.inspect import component_row, kind_called
from hgms.cli.terminal import (
    json_option,
    plugin_option,
    print_json,
    print_table,
    terminal_width,
    track_option,
    trust_option,
    words,
    wrapped,
)
from hgms_core import hookimpl

__all__ = [
    "Completer",
    "component_names",
    "component_row",
    "folded",
    "json_option",
    "kind_called",
    "kind_names",
    "kind_then_name",
    "main",
    "plugin_option",
    "print_json",
    "print_table",
    "quietly",
    "terminal_width",
    "track_option",
    "trust_option",
    "unmarked",
    "with_commas",
    "words",
    "wrapped",
]


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms.cli.inspect import list_components, list_plugins

    cli.add_command(list_components)
    cli.add_command(list_plugins)
