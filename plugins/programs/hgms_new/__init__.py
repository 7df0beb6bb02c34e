"""`hgms new`: a distribution of one's own, from a template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hgms_core import hookimpl

if TYPE_CHECKING:
    import click

__all__ = []


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms_new.command import new

    cli.add_command(new)
