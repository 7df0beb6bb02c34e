"""The sha256 of files, computed once in a process as long as a file's size and time of change stay:
it is asked for whenever a run's folder is."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

LARGE = 2**24
END = 2**20


def file_digest(path: Path, *, ends: bool = False) -> str:
    """The sha256 of a file; with ``ends``, for a file of 16 MiB or more, of its size and its first
    and last MiB. Errors: OSError."""
    about = path.stat()
    return _digest(
        path.absolute(), about.st_size, about.st_mtime_ns, ends and about.st_size >= LARGE
    )


@functools.cache
def _digest(path: Path, size: int, _time: int, ends: bool) -> str:
    with path.open("rb") as stream:
        if not ends:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        digest = hashlib.sha256(f"{size}:".encode() + stream.read(END))
        stream.seek(size - END)
        digest.update(stream.read())
    return digest.hexdigest()
