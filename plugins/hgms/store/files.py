"""Files with checksums.

Reading does not trust the files: links, pipes and devices are rejected, and sizes are limited.
Writing is atomic.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from hgms.arguments import require
from hgms_core.errors import CheckpointError
from hgms_core.torch_errors import first_line

SMALL = 2 * 2**20
"""Limit in bytes of a file that is parsed at once."""
ROWS = 2 * 2**30
"""Limit in bytes of a file with the rows of a run."""

Buffer = bytes | memoryview

if sys.platform == "win32":
    _NO_LINK = os.O_BINARY
    _NO_WAIT = 0
else:
    _NO_LINK = os.O_NOFOLLOW
    _NO_WAIT = os.O_NONBLOCK
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NO_LINK


class DiskError(CheckpointError):
    """Writing failed (a full disk, missing rights). Existing files on the disk are intact."""

    exit_code = 1


@contextlib.contextmanager
def open_file(path: Path, most: int, hint: str | None = None) -> Iterator[IO[bytes]]:
    """Open a regular file for reading; ``hint`` is the remedy in errors.

    Raises
    ------
    CheckpointError
        The path is a link, a pipe or a device, or the file is larger than ``most`` bytes or
        unreadable.
    """
    # without O_NONBLOCK, opening a pipe waits for its other end
    flags = os.O_RDONLY | _NO_LINK | _NO_WAIT
    try:
        if sys.platform == "win32" and path.is_symlink():
            raise OSError(errno.ELOOP, "")
        with os.fdopen(os.open(path, flags), "rb") as stream:
            about = os.fstat(stream.fileno())
            require(
                stat.S_ISREG(about.st_mode),
                "not-a-file",
                "the path is not a regular file",
                place=(str(path),),
                hint=hint,
                error=CheckpointError,
            )
            require(
                about.st_size <= most,
                "too-large",
                f"the file is larger than {most / 2**20:,.4g} MiB",
                place=(str(path),),
                hint=hint,
                error=CheckpointError,
            )
            yield stream
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(
                "not-a-file",
                "the file is a symbolic link, and links are not followed",
                place=(str(path),),
                hint=hint,
            ) from None
        raise CheckpointError(
            "unreadable-file",
            f"the file cannot be read: {error.strerror or error}",
            place=(str(path),),
            hint=hint,
        ) from None


def read_file(path: Path, most: int = SMALL, hint: str | None = None) -> bytes:
    """Return the bytes of a regular file; see :func:`open_file`."""
    with open_file(path, most, hint) as stream:
        # the file may grow, so read at most its checked size
        return stream.read(os.fstat(stream.fileno()).st_size)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise DiskError, with a remedy, if ``path`` cannot be written inside."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        advice = (
            "free disk space" if full else f"make sure that {path.parent} exists and is writable"
        )
        raise DiskError(
            "cannot-write",
            f"writing failed: {what}",
            place=(str(path),),
            hint=f"{advice}, then resume; complete files are unchanged",
        ) from error


def append(path: Path, data: bytes) -> None:
    """Append data to a file without a buffer, which would cost more than writing."""
    with writing(path):
        handle = os.open(path, _APPEND, 0o666)
        try:
            while data:
                data = data[os.write(handle, data) :]
        finally:
            os.close(handle)


def replace_file(path: Path, data: Buffer | Iterable[Buffer]) -> None:
    """Replace a file atomically by ``data``, or by its pieces in order.

    The data is written to a temporary file, flushed to the disk, and renamed. A symbolic link is
    replaced, not followed.
    """
    pieces = [data] if isinstance(data, bytes | memoryview) else data
    aside = path.with_name(path.name + ".part")
    with writing(path):
        try:
            aside.unlink(missing_ok=True)  # the rest of a killed write
            with os.fdopen(
                os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666), "wb"
            ) as stream:
                stream.writelines(pieces)
                stream.flush()
                os.fsync(stream.fileno())
            aside.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise


def flush(path: Path) -> None:
    """Flush a file, or the list of files of a folder, to the disk.

    The data then survives a loss of power.
    """
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot flush folders
    with writing(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# --- JSON
# --------------------------------------------------------------------------------------------------


def contents(path: Path) -> bytes:
    """Return the bytes of a regular file of a folder; errors contain a remedy."""
    return read_file(path, ROWS, hint=remedy(path))


def as_json(value: Mapping[str, Any], indent: int | None = None) -> bytes:
    return json.dumps(finite(value), indent=indent, allow_nan=False, ensure_ascii=False).encode(
        errors="backslashreplace"
    )


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    return as_object(contents(path), path)


def as_object(data: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object in ``data``, which was read from ``path``."""
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged_file(path, f"it is not valid JSON: {first_line(error)}") from None
    if not isinstance(table, dict):
        raise damaged_file(path, "it does not contain a JSON object")
    return table


def damaged_file(path: Path, why: str, *line: int) -> CheckpointError:
    """Return the error for a file whose contents cannot be used."""
    return CheckpointError(
        "damaged-file", f"the file is damaged: {why}", place=(str(path), *line), hint=remedy(path)
    )


def remedy(path: Path) -> str:
    """Return the remedy for a file of a folder that cannot be used."""
    return f"restore the file, or remove the folder {path.parent}; it is unchanged"


def describe_error(error: Exception) -> str:
    """Return the type and the first line of an error of another library.

    Examples
    --------
    >>> describe_error(KeyError("x"))
    "KeyError: 'x'"
    """
    return f"{type(error).__name__}: {first_line(error)}"


def finite(value: Any) -> Any:
    """Return the value in a form that JSON can store.

    Numbers that are not finite become null, and keys become strings.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
