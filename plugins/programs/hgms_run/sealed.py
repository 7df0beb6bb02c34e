"""The forms of a run's files: JSON with a checksum, and lines of JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from hgms_cli import finite
from hgms_core import CheckpointError
from hgms_run.files import ROWS, opened


@contextlib.contextmanager
def regular(path: Path, most: int = ROWS) -> Iterator[IO[bytes]]:
    """A file of a run's folder, open for reading: a regular one, and no link."""
    try:
        with opened(path, most) as stream:
            yield stream
    except CheckpointError as error:
        raise CheckpointError(damaged(path, str(error))) from None


def contents(path: Path, most: int = ROWS) -> bytes:
    with regular(path, most) as stream:
        return stream.read()


def as_json(value: Mapping[str, Any], indent: int | None = None) -> bytes:
    return json.dumps(finite(value), indent=indent, allow_nan=False, ensure_ascii=False).encode(errors="backslashreplace")


def sealed(table: Mapping[str, Any], indent: int) -> bytes:
    """The table as JSON, with the sha256 of all the rest as its last entry."""
    table = {**table, "checksum": _checksum(table)}
    return json.dumps(table, indent=indent, ensure_ascii=False).encode(errors="backslashreplace")


def unsealed(path: Path) -> dict[str, Any]:
    """What :func:`sealed` wrote, if nothing of it has changed. Versions up to 0.2 wrote no checksum."""
    table = json_object(path)
    if "checksum" in table and table["checksum"] != _checksum({key: table[key] for key in table if key != "checksum"}):
        raise CheckpointError(damaged(path, "its contents do not match its checksum (changed)"))
    return table


def _checksum(table: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()


def json_object(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(contents(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(damaged(path, f"it is not valid JSON ({error})")) from None
    if not isinstance(table, dict):
        raise CheckpointError(damaged(path, "it holds no JSON object"))
    return table


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines. Only the last line may be half-written (a kill while appending); any other damage is named."""
    if not path.exists():
        return
    for number, line in enumerate(contents(path).split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            if not isinstance(row["step"], int):
                raise TypeError
        except (ValueError, RecursionError):
            raise CheckpointError(damaged(path, f"line {number} is not valid JSON")) from None
        except (TypeError, KeyError, IndexError):
            raise CheckpointError(damaged(path, f"line {number} is no row of a step")) from None
        yield row


def stamped(line: bytes) -> bytes:
    """A line of JSON with its own crc32 as the last entry."""
    return b'%s, "crc32": %d}' % (line[:-1], zlib.crc32(line))


def is_stamped(row: Mapping[str, Any]) -> bool:
    """Whether a row is as :func:`stamped` wrote it."""
    return row.get("crc32") == zlib.crc32(as_json({key: row[key] for key in row if key != "crc32"}))


def damaged(path: Path, why: str) -> str:
    """The message of a file that cannot be used as it is."""
    return (
        f"damaged run file {path}: {why}\n"
        f"  nothing was changed; restore the file, or remove the folder {path.parent} and start anew"
    )
