"""Reports over run folders, in several formats.

A report is a study of the runs, as a web page, LaTeX or Parquet.

A report can also draw figures for a paper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hgms.report.compute import build
from hgms.report.curves import Curve
from hgms.report.figures import COLOURS
from hgms.report.formats import SUFFIXES, report, suffix, write
from hgms.report.paper import draw_band, draw_curves, draw_mixtures, new_figure, save
from hgms.report.pictures import plot_curves, plot_forests, shown_in_notebook
from hgms.report.study import Section, Study
from hgms_core import hookimpl

if TYPE_CHECKING:
    import click

__all__ = [
    "COLOURS",
    "SUFFIXES",
    "Curve",
    "Section",
    "Study",
    "build",
    "draw_band",
    "draw_curves",
    "draw_mixtures",
    "new_figure",
    "plot_curves",
    "plot_forests",
    "report",
    "save",
    "shown_in_notebook",
    "suffix",
    "write",
]


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms.report.command import plot, report

    cli.add_command(report)
    cli.add_command(plot)
