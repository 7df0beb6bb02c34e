"""Digests: which contents a file, a table or an array had.

Modules that store or compare contents use these functions; no other module calls hashlib for that.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

Part = bytes | memoryview | str
"""Contents of a digest. Text is encoded as UTF-8; characters that UTF-8 lacks are escaped."""


class Digest:
    """The sha256 of contents that arrive in parts.

    ``size`` is the number of bytes so far, and ``text`` the digest in hexadecimal digits.

    Examples
    --------
    >>> running = Digest("a")
    >>> running.add(b"bc")
    >>> running.size, running.text == digest("abc")
    (3, True)
    """

    def __init__(self, *parts: Part) -> None:
        self.size = 0
        self._hash = hashlib.sha256()
        for part in parts:
            self.add(part)

    def add(self, part: Part) -> None:
        data = part.encode(errors="backslashreplace") if isinstance(part, str) else part
        self.size += memoryview(data).nbytes
        self._hash.update(data)

    @property
    def text(self) -> str:
        return self._hash.hexdigest()


def digest(*parts: Part) -> str:
    """Return the sha256 of the parts, joined, in hexadecimal digits."""
    return Digest(*parts).text


def json_digest(value: Any) -> str:
    """Return the sha256 of a value as canonical JSON: sorted keys, no escapes.

    Examples
    --------
    >>> json_digest({"b": 1, "a": 2}) == json_digest({"a": 2, "b": 1})
    True
    """
    return digest(json.dumps(value, sort_keys=True, ensure_ascii=False))


def short_number(data: bytes) -> int:
    """Return a signed 64-bit number that identifies ``data``.

    Among n values, two different values have equal numbers with probability n²/2⁶⁵.
    """
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


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

    A process recomputes the digest only if the file's size, its times or its inode have changed.

    Raises
    ------
    OSError
        Also if the path is not a regular file.
    """
    about = path.stat()
    if not path.is_file():  # a pipe or a device may have no end
        raise OSError(f"{path} is not a regular file")
    state = (about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino)
    return _digest(path.absolute(), state)


@functools.lru_cache(maxsize=4096)
def _digest(path: Path, state: tuple[int, ...]) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
