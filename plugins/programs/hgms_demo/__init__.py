"""`hgms demo`: the main job on embedded data, in a minute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hgms_core import hookimpl
from hgms_demo.demo import run_demo

if TYPE_CHECKING:
    import click

__all__ = ["run_demo"]


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms_demo.command import demo

    cli.add_command(demo)
