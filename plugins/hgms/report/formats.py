"""The formats of a report, by suffix; a file is written completely or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hgms.arguments import require
from hgms.report import parquet
from hgms.report.compute import build
from hgms.report.files import write_file
from hgms.report.latex import latex
from hgms.report.page import html
from hgms.report.study import Study

WRITERS: dict[str, Callable[[Study], str]] = {".html": html, ".tex": latex}
SUFFIXES = (*WRITERS, ".parquet")
"""The suffixes of a report's formats."""


def suffix(path: Path, known: Sequence[str], what: str) -> str:
    """Return the path's suffix, which determines the format.

    Raises ConfigError if it is not in ``known``.
    """
    ending = path.suffix.casefold()
    require(
        ending in known,
        "unknown-suffix",
        f"the suffix {ending!r} does not select a format of {what}",
        place=(str(path),),
        hint=f"use one of {', '.join(known)}",
    )
    return ending


def write(study: Study, path: Path) -> Path:
    """Write the report; the suffix determines the format. Return the file.

    Raises
    ------
    ConfigError
        An unknown suffix.
    MissingExtra
        The format's library is not installed.
    """
    ending = suffix(path, SUFFIXES, "a report")
    if ending in WRITERS:
        # paths can contain bytes that are not valid text
        write_file(path, WRITERS[ending](study).encode(errors="backslashreplace"))
    else:
        write_file(path, parquet.runs_file(study))
    return path


def report(folders: Iterable[str | Path], path: str | Path) -> Path:
    """Write a report of all runs below ``folders``, and return its file.

    Raises the errors of :func:`build` and :func:`write`.
    """
    return write(build(folders), Path(path))
