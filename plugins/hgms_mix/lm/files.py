"""The rows in files: JSON, JSON lines and Parquet.

Files may be plain or compressed.
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hgms.config import expand
from hgms.packages import optional_module
from hgms_core.errors import DataError, Place, closest
from hgms_core.torch_errors import first_line
from hgms_mix.lm.formats import BadRow, Row
from hgms_mix.lm.sources import Source

PACKED = (".gz", ".zst")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Rows = Iterator[tuple[str, Row | BadRow]]
"""Each row with its location; for a row that is not an object, the reason."""


Unread = Row | BadRow | bytes
"""A row before its line of JSON is parsed, and before its columns are renamed to fields."""
Raw = Iterator[tuple[str, Unread]]
"""As ``Rows``, for unread rows."""
WATCHED = 1024
"""Rows between two calls of ``watch``."""
Reader = Callable[[str, Place, Any], Raw]
"""A function that reads the rows of an open file: its name (for messages), the place of its path,
and the file.
"""


def without_expansion(text: str, path: str) -> str:
    """Return a message of a library with the path as in the configuration.

    The value of a variable may be confidential.
    """
    return text.replace(str(expand(path, ())), path)


def files_at(path: str, place: Place) -> list[Path]:
    """Return the existing files for ``path``, in the order of their paths.

    ``path`` is a file, a folder, or a pattern. Messages show the path as in the configuration;
    ``place`` is its place in errors.
    """
    file = expand(path, place)
    pattern = glob.has_magic(str(file)) and not file.exists()
    if pattern:
        found = sorted(map(Path, glob.glob(str(file), recursive=True)))
    elif file.is_dir() and os.access(file, os.R_OK):
        found = sorted(file.iterdir())
    else:
        found = [file] if file.is_file() else []
    if files := [each for each in found if each.is_file() and _ending(each) in READERS]:
        return files
    folder = file if file.is_dir() else file.parent
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(each.name for each in folder.iterdir() if _ending(each) in READERS)
    what = "matches no file" if pattern else "does not exist"
    raise DataError(
        "wrong-format" if file.is_file() else "missing-file",
        f"{path} {'has no file of a known kind' if found or file.is_dir() else what}",
        place=place,
        hint=f"known kinds: {', '.join(READERS)}, plain, {' or '.join(PACKED)}\n"
        f"available in its folder: {', '.join(names[:20]) or '(none)'}",
        did_you_mean=difflib.get_close_matches(file.name, names, n=1, cutoff=0.6),
    )


def _ending(file: Path) -> str:
    return Path(file.name.removesuffix(".gz").removesuffix(".zst")).suffix.casefold()


@contextlib.contextmanager
def reading(file: str, place: Place) -> Iterator[None]:
    """Convert errors below the rows into DataErrors with the file's name and place."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            "damaged-file",
            f"the gzip file {file} is truncated or damaged: {error}",
            place=place,
            hint="download a complete copy",
        ) from None
    except OSError as error:
        raise DataError(
            "unreadable-file",
            f"{file} cannot be read: {error.strerror or error}",
            place=place,
            hint="check the path and its permissions",
        ) from None


def raw_rows(
    where: Place, source: Source, watch: Callable[[int, int], None] = lambda done, total: None
) -> Raw:
    """Return all rows of a source, before it selects some, with lines of JSON unparsed.

    ``where`` is the source's place in errors. ``watch`` receives the number of bytes read, and the
    total.
    """
    at = (*where, "path")
    files = files_at(source.path, at)
    sizes = [file.stat().st_size for file in files]
    before = 0
    for file, size in zip(files, sizes, strict=True):
        name = source.path if len(files) == 1 else file.name
        with reading(name, at), file.open("rb") as raw, _open(name, at, file, raw) as stream:
            for number, (place, row) in enumerate(READERS[_ending(file)](name, at, stream)):
                if number % WATCHED == 0:
                    watch(before + raw.tell(), sum(sizes))
                yield (place if len(files) == 1 else f"{file.name}, {place}"), row
        before += size


def _open(name: str, at: Place, file: Path, raw: io.BufferedReader) -> Any:
    """Return the decompressed contents, as a stream with ``peek``."""
    if file.suffix == ".zst":
        pa = optional_module("pyarrow", f"reading {name}", "llm", place=at)
        return io.BufferedReader(pa.input_stream(raw, compression="zstd"), 2**20)
    return gzip.open(raw) if file.suffix == ".gz" else raw


def _json(name: str, at: Place, stream: Any) -> Raw:
    """Yield the rows of an array, or of one object per line; the name of the file has no effect."""
    if stream.peek(4096)[:4096].removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"[":
        yield from _array(name, at, stream.read())
        return
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield f"line {number}", line


def parse(row: Unread, fields: Mapping[str, str] | None) -> Row | BadRow:
    """Return the row with its columns renamed to ``fields``.

    A line of JSON is parsed; return BadRow with the reason if it is not an object.
    """
    row = _object(_load_json(row)) if isinstance(row, bytes) else row
    if not fields or isinstance(row, BadRow):
        return row
    for name, column in fields.items():
        if column not in row:
            near = closest(column, map(str, row))
            hint = f" (did you mean {near!r}?)" if near else ""
            return BadRow(
                f"no column {column!r}, which fields requires for {name!r}{hint}; it has: "
                f"{', '.join(map(str, row)) or '(none)'}"
            )
    own = {
        key: value for key, value in row.items() if key not in fields and key not in fields.values()
    }
    return own | {name: row[column] for name, column in fields.items()}


def _load_json(data: bytes) -> Any:
    """Return the value, or a BadRow if the data are malformed."""
    try:
        return json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return BadRow(f"malformed JSON: {error}")


def _object(row: Any) -> Row | BadRow:
    known = isinstance(row, dict | BadRow)
    return row if known else BadRow(f"it is a {type(row).__name__}, not an object")


def _array(name: str, at: Place, data: bytes) -> Rows:
    value = _load_json(data)
    if isinstance(value, BadRow):
        raise DataError(
            "wrong-format",
            f"{name} cannot be read: {value}",
            place=at,
            hint="correct it, or use JSON lines in UTF-8, where max_bad_rows skips bad rows",
        )
    for number, row in enumerate(value):
        yield f"row {number}", _object(row)


def _parquet(name: str, at: Place, stream: BinaryIO) -> Rows:
    pa = optional_module("pyarrow", f"reading {name}", "llm", place=at)
    pq = optional_module("pyarrow.parquet", f"reading {name}", "llm", place=at)
    try:
        plain = isinstance(stream, io.BufferedReader) and stream.seekable()
        batches = pq.ParquetFile(stream if plain else pa.BufferReader(stream.read())).iter_batches(
            batch_size=WATCHED
        )
        for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
            yield f"row {number}", row
    except pa.ArrowException as error:
        raise DataError(
            "damaged-file",
            f"{name} is not a complete Parquet file: {first_line(error)}",
            place=at,
            hint="download it again",
        ) from None


READERS: Mapping[str, Reader] = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), _json),
    ".parquet": _parquet,
}
