"""Methods × tasks × seeds under one budget; the command `compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hgms.comparison.comparison import Comparison
from hgms.comparison.from_python import compare
from hgms.comparison.grid import Grid
from hgms.comparison.grid_file import load
from hgms.comparison.options import seeds_option
from hgms.comparison.scale import apply_scale
from hgms.comparison.usage import measure_usage, peak_memory
from hgms_core import hookimpl

if TYPE_CHECKING:
    import click

__all__ = [
    "Comparison",
    "Grid",
    "apply_scale",
    "compare",
    "load",
    "measure_usage",
    "peak_memory",
    "seeds_option",
]


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms.comparison.command import compare

    cli.add_command(compare)
