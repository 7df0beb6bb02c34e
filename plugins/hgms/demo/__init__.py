"""``hgms demo``: the comparison of the README, in about two minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hgms.demo.demo import run_demo
from hgms_core import hookimpl

if TYPE_CHECKING:
    import click

__all__ = ["run_demo"]


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms.demo.command import demo

    cli.add_command(demo)
