"""The command line: `hgms`, the commands `list` and `plugins`, and code shared by all commands."""

from __future__ import annotations

import click

from hgms.cli.docstrings import strip_markup
from hgms.cli.group import main
from hgms.cli.inspect import component_row, kind_called
from hgms.cli.terminal import (
    device_option,
    json_option,
    plugin_option,
    print_json,
    print_table,
    seed_option,
    set_option,
    terminal_width,
    track_option,
    trust_option,
    words,
    wrap_paragraph,
)
from hgms_core import hookimpl

__all__ = [
    "component_row",
    "device_option",
    "json_option",
    "kind_called",
    "main",
    "plugin_option",
    "print_json",
    "print_table",
    "seed_option",
    "set_option",
    "strip_markup",
    "terminal_width",
    "track_option",
    "trust_option",
    "words",
    "wrap_paragraph",
]


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms.cli.inspect import list_components, list_plugins

    cli.add_command(list_components)
    cli.add_command(list_plugins)
