"""Files that strangers made, read without trust: no links, pipes or devices, bounds on size, depth and numbers, no control
characters on the terminal."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from hgms_core import CheckpointError

SMALL, ROWS = 2 * 2**20, 2 * 2**30
"""The most bytes of a file that is parsed as a whole, and of one that holds the rows of a run."""
_DEPTH = 64
# a dotted key of more than that depth, for which tomllib takes time in the square of it
_DEEP = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){64}""")


@contextlib.contextmanager
def opened(path: Path, most: int) -> Iterator[IO[bytes]]:
    """A regular file, open for reading.

    Raises:
        CheckpointError: it is a link, a pipe, a device or larger than ``most`` bytes, or cannot be read.
    """
    # without O_NONBLOCK, opening a pipe waits for its other end
    flags = sum(getattr(os, name, 0) for name in ("O_RDONLY", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
    try:
        if path.is_symlink():
            raise OSError(errno.ELOOP, "")
        with os.fdopen(os.open(path, flags), "rb") as stream:
            about = os.fstat(stream.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise CheckpointError(f"{path.name} is no regular file")
            if about.st_size > most:
                size = f"{most >> 20} MiB" if most >> 20 else f"{most >> 10} KiB"
                raise CheckpointError(f"{path.name} is larger than {size}")
            yield stream
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path.name} is a link, and links out of a folder are not followed") from None
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror or error}") from None


def read_file(path: Path, most: int = SMALL) -> bytes:
    """The bytes of a regular file, as :func:`opened` opens it."""
    with opened(path, most) as stream:
        return stream.read(os.fstat(stream.fileno()).st_size)  # no more than was allowed, should it grow


def parse_json(data: bytes, name: str) -> Any:
    """A value of JSON; CheckpointError, naming the file, for any other text and for what :func:`check` refuses."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise CheckpointError(f"{name} is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{name} is not valid JSON ({error})") from None
    check(value, name)
    return value


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """A table of TOML; CheckpointError, naming the file, for any other text and for what :func:`check` refuses."""
    try:
        if _DEEP.search(text):
            raise RecursionError
        table = tomllib.loads(text)
    except RecursionError:
        raise CheckpointError(f"{name} is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{name} is not valid TOML: {error}") from None
    check(table, name)
    return table


def check(value: object, name: str) -> None:
    """CheckpointError where a value is nested too deeply to be walked, or holds a whole number of more than 64 bits or text
    that no encoding has."""
    level = [value]
    for _ in range(_DEPTH):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str):
                if not item.isascii() and any("\ud800" <= letter <= "\udfff" for letter in item):
                    raise CheckpointError(f"{name} holds text that is not Unicode")
            elif isinstance(item, int) and not -(2**63) <= item < 2**63:
                raise CheckpointError(f"{name} holds a whole number of more than 64 bits")
        level = below
    if level:
        raise CheckpointError(f"{name} is nested too deeply")


def shorten(text: str, most: int = 400) -> str:
    """The text, or its beginning and how long it is.

    >>> shorten("a" * 5000, most=10)
    'aaaaaaaaaa… (5,000 characters)'
    """
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


__all__ = ["ROWS", "SMALL", "check", "opened", "parse_json", "parse_toml", "read_file", "shorten"]
