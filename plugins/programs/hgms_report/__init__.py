"""Reports over run folders: a study of what was run, as a web page, Markdown, LaTeX or Parquet, or drawn for a paper."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hgms_core import hookimpl
from hgms_report.compute import build
from hgms_report.curves import Curve
from hgms_report.figures import COLOURS
from hgms_report.formats import SUFFIXES, report, suffix, write
from hgms_report.paper import draw_band, draw_curves, draw_mixtures, new_figure, save
from hgms_report.pictures import plot_curves, plot_forests, plot_run
from hgms_report.study import Section, Study

if TYPE_CHECKING:
    import click

__all__ = [
    "COLOURS", "SUFFIXES", "Curve", "Section", "Study", "build", "draw_band", "draw_curves", "draw_mixtures", "new_figure",
    "plot_curves", "plot_forests", "plot_run", "report", "save", "suffix", "write",
]  # fmt: skip


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms_report.command import plot, report

    cli.add_command(report)
    cli.add_command(plot)
