"""Paths as users write them, and digests of files."""

from __future__ import annotations

import difflib
import functools
import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from hgms_core import ConfigError

LARGE = 2**26
"""Minimum size in bytes for storing the digest of a file in the cache too.

Hashing takes about 0.1 s for this size.
"""


def expand(path: str, place: tuple[str | int, ...] = ()) -> Path:
    """Replace ``~`` and ``$VARIABLES`` in a path.

    Errors: ConfigError at ``place`` if a variable is not set, a user has no home, or the path
        contains a character that paths cannot have.

    >>> expand("~/runs") == Path.home() / "runs"
    True
    """

    def value(match: re.Match[str]) -> str:
        variable = match[1] or match[2]
        if variable not in os.environ:
            near = difflib.get_close_matches(variable, os.environ, n=1, cutoff=0.75)
            raise ConfigError(
                "missing-variable",
                f"the environment variable {variable} in {path!r} is not set",
                place=place,
                hint=f"export {variable}=FOLDER, or write the full path",
                did_you_mean=[f"${name}" for name in near],
            )
        return os.environ[variable]

    if "\0" in path:
        message = f"the path {path!r} contains a null character"
        raise ConfigError("wrong-value", message, place=place)
    try:
        return Path(re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, path)).expanduser()
    except RuntimeError:
        message = f"the home folder in {path!r} is unknown"
        raise ConfigError(
            "missing-file", message, place=place, hint="write the full path"
        ) from None


def cache_folder(kind: str = "tokens") -> Path:
    """Return the cache folder for results of one kind.

    Cached results are not recomputed. The folder is in ``$HGMS_CACHE``, or in ``hgms`` in the
    user's cache.
    """
    own = os.environ.get("HGMS_CACHE")
    root = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "hgms"
    return Path(os.path.expanduser(root), kind)


def file_digest(path: Path) -> str:
    """Return the sha256 of all bytes of a file.

    The digest is recomputed only if the file's size, its times or its inode have changed. For files
    of at least 64 MiB, this also applies in other processes.

    Errors: OSError, also if the path is not a regular file.
    """
    about = path.stat()
    if not path.is_file():  # a pipe or a device may have no end
        raise OSError(f"{path} is not a regular file")
    state = (about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino)
    return _digest(path.absolute(), state)


@functools.lru_cache(maxsize=4096)
def _digest(path: Path, state: tuple[int, ...]) -> str:
    key = hashlib.sha256(repr((os.fspath(path), state)).encode(errors="surrogateescape"))
    stored = cache_folder("digests") / key.hexdigest()
    large = state[0] >= LARGE
    if large and stored.is_file() and re.fullmatch(r"[0-9a-f]{64}", text := stored.read_text()):
        return text
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if large:
        _store(stored, digest)
    return digest


def _store(path: Path, text: str) -> None:
    """Write a small file in one step.

    Errors are ignored, because without the file the digest is only recomputed.
    """
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text)
        aside.replace(path)
    except OSError:
        return


def data_fingerprint(files: Iterable[Path]) -> dict[str, list[str]]:
    """Return the sha256 of each file that a problem is built from.

    A task returns this value from ``made_of``, and passes all files that ``problem`` reads. The
    digests have the order of the files. Without files the result is empty.

    A run belongs to the contents of its files, so a run on other files is another run.

    Errors: OSError if a file cannot be read.

    >>> data_fingerprint([])
    {}
    """
    digests = [file_digest(path) for path in files]
    return {"files": digests} if digests else {}
