"""`hgms new`: create a distribution from a template."""

from __future__ import annotations

import click

from hgms_core import hookimpl

__all__ = []


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms.cli.new.command import new

    cli.add_command(new)
