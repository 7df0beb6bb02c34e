"""Paths as users write them, and the files of a problem."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from hgms.arguments import require
from hgms.store import file_digest
from hgms_core import ConfigError


def expand(path: str, place: tuple[str | int, ...] = ()) -> Path:
    """Replace ``~`` and ``$VARIABLES`` in a path.

    Raises
    ------
    ConfigError
        At ``place`` if a variable is not set, a user has no home, or the path contains a character
        that paths cannot have.

    Examples
    --------
    >>> expand("~/runs") == Path.home() / "runs"
    True
    """
    require(
        "\0" not in path, "wrong-value", f"the path {path!r} contains a null character", place=place
    )
    expanded = os.path.expandvars(path)
    if unset := re.search(r"\$(\w+|\{\w+\})", expanded):
        raise ConfigError(
            "missing-variable",
            f"the environment variable {unset[0]} in {path!r} is not set",
            place=place,
            hint="export the variable, or write the full path",
        )
    expanded = os.path.expanduser(expanded)
    require(
        not expanded.startswith("~"),
        "missing-file",
        f"the home folder in {path!r} is unknown",
        hint="write the full path",
        place=place,
    )
    return Path(expanded)


def data_fingerprint(files: Iterable[Path]) -> dict[str, list[str]]:
    """Return the sha256 of each file that a problem is built from.

    A task returns this value from ``data_fingerprint``, and passes all files that ``problem``
    reads. The digests have the order of the files. Without files the result is empty.

    A run belongs to the contents of its files, so a run on other files is another run.

    Raises
    ------
    OSError
        If a file cannot be read.

    Examples
    --------
    >>> data_fingerprint([])
    {}
    """
    digests = [file_digest(path) for path in files]
    return {"files": digests} if digests else {}
