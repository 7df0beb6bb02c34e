"""`hgms mix`: from named data sources and a base model to a learned mixture, a fine-tuned adapter and its scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hgms_core import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms_mix.command import mix

    cli.add_command(mix)
