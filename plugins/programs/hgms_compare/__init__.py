"""Methods × tasks × seeds under one budget; the commands `compare`, `merge` and `plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hgms_compare.comparison import Comparison
from hgms_compare.from_python import compare
from hgms_compare.grid import Grid
from hgms_compare.grid_file import load
from hgms_compare.scale import scaled
from hgms_compare.seeds import seeds_option
from hgms_compare.usage import measured
from hgms_core import hookimpl

if TYPE_CHECKING:
    import click

__all__ = ["Comparison", "Grid", "compare", "load", "measured", "scaled", "seeds_option"]


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms_compare.command import compare
    from hgms_compare.merge_command import merge
    from hgms_compare.plan_command import plan

    cli.add_command(compare)
    cli.add_command(merge)
    cli.add_command(plan)
