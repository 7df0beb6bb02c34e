"""The formats of a report, by suffix; a file is written completely or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hgms.report import parquet
from hgms.report.compute import build
from hgms.report.latex import latex
from hgms.report.page import html
from hgms.report.study import Study
from hgms.store import replace_file, writing
from hgms_core import ConfigError

WRITERS: dict[str, Callable[[Study], str]] = {".html": html, ".tex": latex}
SUFFIXES = (*WRITERS, ".parquet")
"""The suffixes of a report's formats."""


def suffix(path: Path, known: Sequence[str], what: str) -> str:
    """Return the path's suffix, which determines the format.

    Raises ConfigError if it is not in ``known``.
    """
    ending = path.suffix.casefold()
    if ending not in known:
        shown = f"the suffix {ending!r}" if ending else "a path without a suffix"
        raise ConfigError(
            "unknown-suffix",
            f"{shown} does not select a format of {what}",
            place=(str(path),),
            hint=f"use one of {', '.join(known)}",
        )
    return ending


def write(study: Study, path: Path, *, steps: bool = False) -> list[Path]:
    """Write the report; the suffix determines the format. Return the files.

    ``steps`` adds a table of all rows to Parquet.

    Raises:
        ConfigError: an unknown suffix, or ``steps`` for another format than Parquet.
        MissingExtra: the format's library is not installed.
    """
    ending = suffix(path, SUFFIXES, "a report")
    if steps and ending != ".parquet":
        raise ConfigError(
            "conflicting-options",
            f"--steps requires a Parquet report, but the suffix is {ending!r}",
            place=("--steps",),
            hint="use --out report.parquet",
        )
    if ending in WRITERS:
        # paths can contain bytes that are not valid text
        write_file(path, WRITERS[ending](study).encode(errors="backslashreplace"))
        return [path]
    write_file(path, parquet.runs_file(study))
    if not steps:
        return [path]
    beside = path.with_suffix(".steps.parquet")
    write_file(beside, parquet.steps_file(study))
    return [path, beside]


def report(folders: Iterable[str | Path], path: str | Path) -> Path:
    """Write a report of all runs below ``folders``, and return its file.

    Raises the errors of :func:`build` and :func:`write`.
    """
    return write(build(folders), Path(path))[0]


def write_file(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Replace a file atomically, and create its folder. After an error, the file is unchanged.

    Errors: DiskError if the file is not writable.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data)
