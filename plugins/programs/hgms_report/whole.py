"""Reports are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from hgms_run import DiskError


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file to write to in the place of ``path``, which it takes at the end; after an error ``path`` is as it was.

    Raises:
        DiskError: the file cannot be written.
    """
    aside = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield aside
            aside.replace(path)
        finally:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
    except OSError as error:
        old = "; the old file is as it was" if path.is_file() else ""
        raise DiskError(f"cannot write {path}: {(error.strerror or str(error)).lower()}{old}") from error


__all__ = ["whole"]
