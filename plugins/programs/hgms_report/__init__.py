"""Reports over run folders: one study of what was run, written as a web page, Markdown, LaTeX or Parquet, or drawn for a paper.

The modules: ``study`` (what belongs together, means, differences), ``curves`` (bands and thinning), ``mixture`` (weights of
data sources), ``tables`` (as values), ``markdown``, ``latex``, ``figures`` and ``page`` (HTML), ``parquet``, ``paper`` (PNG,
SVG, PDF), ``whole`` (a file, or nothing).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hgms_core import ConfigError, hookimpl
from hgms_report import latex, markdown
from hgms_report.pictures import COLOURS, draw_accuracy, draw_weights
from hgms_report.study import Section, Study, build
from hgms_report.whole import whole

if TYPE_CHECKING:
    import click


def _html(study: Study) -> str:
    from hgms_report.page import html

    return html(study)


WRITERS: dict[str, Callable[[Study], str]] = {".html": _html, ".md": markdown.markdown, ".tex": latex.latex}
SUFFIXES = (*WRITERS, ".parquet")


def suffix(path: Path, known: tuple[str, ...], what: str) -> str:
    """The path's suffix, which decides the format; ConfigError where it is none of ``known``."""
    found = path.suffix.casefold()
    if found not in known:
        shown = f"the suffix of {path} is {found!r}" if found else f"{path} has no suffix"
        raise ConfigError(f"{shown}, which says nothing about the format of {what}; known: {', '.join(known)}")
    return found


def write(study: Study, path: Path, *, steps: bool = False) -> list[Path]:
    """Writes the report; its suffix decides the format. ``steps`` adds a table of all rows to Parquet. Returns the files.

    Raises:
        ConfigError: an unknown suffix, or ``steps`` for another format than Parquet.
        MissingExtra: the format's library is not installed.
    """
    found = suffix(path, SUFFIXES, "a report")
    if found == ".parquet":
        from hgms_report import parquet

        return parquet.write(study, path, steps=steps)
    if steps:
        raise ConfigError("--steps adds the rows of every step to a Parquet report only; add it to --out report.parquet")
    text = WRITERS[found](study)
    with whole(path) as aside:
        aside.write_bytes(text.encode(errors="backslashreplace"))  # paths may hold bytes that are no text
    return [path]


__all__ = [
    "COLOURS",
    "SUFFIXES",
    "Section",
    "Study",
    "build",
    "draw_accuracy",
    "draw_weights",
    "suffix",
    "write",
]


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms_report.command import plot, report

    cli.add_command(report)
    cli.add_command(plot)
