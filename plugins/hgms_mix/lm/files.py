"""The rows in files: JSON, JSON lines, Parquet, CSV and texts, plain or packed, and data sets of
the Hub.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import functools
import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from attrs import frozen

from hgms_core import ConfigError, DataError, MissingExtra, closest
from hgms_mix.lm.formats import RAW, BadRow, Row, detect

PACKED = (".gz", ".zst")
WRAPPERS = ("data", "items", "instances", "rows")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Rows = Iterator[tuple[str, Row | BadRow]]
"""Each row with where it stands; a row that is not an object as the reason why."""


class Place(Protocol):
    """Where a source's rows are: in the files of ``path``, or in a data set of the Hub. ``fields``
    says which column is which field.
    """

    @property
    def path(self) -> str | None: ...
    @property
    def hub(self) -> str | None: ...
    @property
    def subset(self) -> str | None: ...
    @property
    def split(self) -> str | None: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def fields(self) -> Mapping[str, str] | None: ...


@frozen
class Named:
    """A row whose columns have names of their own: ``fields`` says which of them is which field."""

    row: Unread
    fields: Mapping[str, str]

    def renamed(self) -> Row | BadRow:
        row = parsed(self.row)
        if isinstance(row, BadRow):
            return row
        if lacking := next(
            ((name, column) for name, column in self.fields.items() if column not in row), None
        ):
            name, column = lacking
            near = closest(column, map(str, row))
            hint = f" (did you mean {near!r}?)" if near else ""
            return BadRow(
                f"no {column!r}, which 'fields' has for {name!r}{hint}; it has: "
                f"{', '.join(map(str, row)) or 'nothing'}"
            )
        own = {
            key: value
            for key, value in row.items()
            if key not in self.fields and key not in self.fields.values()
        }
        return own | {name: row[column] for name, column in self.fields.items()}


Unread = Row | BadRow | bytes | Named
"""A row before its line of JSON is parsed, and before its columns have the names of fields."""
Raw = Iterator[tuple[str, Unread]]
"""The same as ``Rows``, of those."""
WATCHED = 1024
"""Rows between two calls of who watches the reading."""


def expand(path: str, where: str) -> Path:
    """The path with ``~`` and ``$VARIABLES`` replaced; a variable that is not set is named."""

    def value(match: re.Match[str]) -> str:
        variable = match[1] or match[2]
        if variable not in os.environ:
            near = difflib.get_close_matches(variable, os.environ, n=1, cutoff=0.75)
            hint = f" (did you mean ${near[0]}?)" if near else ""
            cure = f"export {variable}=FOLDER, or write the path out"
            raise ConfigError(
                f"{where}: the environment variable {variable} is not set{hint}\n  {cure}"
            )
        return os.environ[variable]

    return Path(re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, path)).expanduser()


def as_written(text: str, path: str) -> str:
    """A message of a library with the path as the configuration has it: a variable's value may
    be nobody else's business.
    """
    return text.replace(str(expand(path, path)), path)


def files_at(path: str, where: str) -> list[Path]:
    """The existing files that ``path`` names: one, those of a folder, or those that a pattern fits,
    in the order of their paths. Messages show the path as it is written."""
    file = expand(path, where)
    known = f"known: {', '.join(READERS)}, plain, {' or '.join(PACKED)}"
    if file.is_file():
        if _ending(file) in READERS:
            return [file]
        raise DataError(f"{where}: cannot tell what kind of file {path} is\n  {known}")
    pattern = glob.has_magic(str(file))
    matched = sorted(map(Path, glob.glob(str(file), recursive=True))) if pattern else []
    inside = sorted(file.iterdir()) if file.is_dir() and os.access(file, os.R_OK) else matched
    if files := [name for name in inside if name.is_file() and _ending(name) in READERS]:
        return files
    if pattern:
        other = f"; it fits {', '.join(name.name for name in matched[:5])}" if matched else ""
        raise DataError(f"{where}: {path}: no file fits the pattern{other}\n  {known}")
    folder = file if file.is_dir() else file.parent
    what = "is a folder without a file to read" if file.is_dir() else "there is no such file"
    try:
        names = sorted(other.name for other in folder.iterdir() if _ending(other) in READERS)
    except OSError:
        raise DataError(
            f"{where}: {path}: {what}, and its folder cannot be read\n  check the path"
        ) from None
    near = difflib.get_close_matches(file.name, names, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise DataError(
        f"{where}: {path}: {what}{hint}\n  available there: "
        f"{', '.join(names[:20]) or '(nothing to read)'}"
    )


def _ending(file: Path) -> str:
    return Path(file.name.removesuffix(".gz").removesuffix(".zst")).suffix.casefold()


@contextlib.contextmanager
def reading(where: str) -> Iterator[None]:
    """Errors below the rows become DataErrors that name the source."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{where}: the gzip stream is truncated or damaged ({error})\n  fetch the file again"
        ) from None
    except OSError as error:
        raise DataError(
            f"{where}: cannot be read: {error.strerror or error}\n  check the path and its rights"
        ) from None


def raw_rows(
    where: str, source: Place, watch: Callable[[int, int], None] = lambda done, total: None
) -> Raw:
    """All rows of a source, before it chooses among them, with lines of JSON unparsed; ``where``
    names it in messages. ``watch`` hears how many bytes of the files were read, of how many."""
    rows = _raw_rows(where, source, watch)
    fields = source.fields
    yield from ((place, Named(row, fields)) for place, row in rows) if fields else rows


def _raw_rows(where: str, source: Place, watch: Callable[[int, int], None]) -> Raw:
    if source.path is None:
        yield from _hub(where, source)
        return
    files = files_at(source.path, where)
    sizes = [file.stat().st_size for file in files]
    before = 0
    for file, size in zip(files, sizes, strict=True):
        at = where if len(files) == 1 else f"{where}, {file.name}"
        with reading(at), file.open("rb") as raw, _opened(at, file, raw) as stream:
            for number, (place, row) in enumerate(READERS[_ending(file)](at, stream)):
                if number % WATCHED == 0:
                    watch(before + raw.tell(), sum(sizes))
                yield (place if len(files) == 1 else f"{file.name}, {place}"), row
        before += size


def _opened(where: str, file: Path, raw: BinaryIO) -> BinaryIO:
    if file.suffix == ".zst":
        return cast(BinaryIO, io.BufferedReader(_Unpacked(where, file), 2**20))
    return cast(BinaryIO, gzip.open(raw)) if file.suffix == ".gz" else raw


class _Unpacked(io.RawIOBase):
    """A Zstandard stream that is unpacked as it is read, and can go back to its beginning."""

    def __init__(self, where: str, file: Path) -> None:
        self._pa, _ = _arrow(where, "zstd")
        self._file = str(file)
        self._stream = self._begun()

    def _begun(self) -> Any:
        self._at = 0
        return self._pa.input_stream(self._file, compression="zstd")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        if (offset, whence) == (0, 1):
            return self._at
        if offset or whence:
            raise io.UnsupportedOperation("only to the beginning")
        self._stream = self._begun()
        return 0


def _head(where: str, stream: BinaryIO) -> bytes:
    """The first bytes of a text. Refuses the encoding that spreadsheets and Windows write, which
    would else be a list of bad rows."""
    head = stream.read(4096)
    stream.seek(0)
    zeros = head.count(0)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or (zeros and zeros >= len(head) // 4):
        raise DataError(
            f"{where}: it is UTF-16 (or 32), not UTF-8\n"
            "  convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"
        )
    return head.removeprefix(BYTE_ORDER_MARK).lstrip()


def _numbered(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, counted from 1 with those that are."""
    for number, line in enumerate(stream, start=1):
        text = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if text.strip():
            yield number, text


def _lines(where: str, stream: BinaryIO) -> Rows:
    """A text a line."""
    _head(where, stream)
    for number, line in _numbered(stream):
        try:
            yield f"line {number}", {RAW: line.decode().rstrip("\r\n")}
        except UnicodeDecodeError as error:
            yield f"line {number}", BadRow(f"it is not UTF-8 (byte {error.start})")


def _delimited(where: str, stream: BinaryIO, *, delimiter: str) -> Rows:
    """The rows of a table whose first line names the fields; every value is text."""
    _head(where, stream)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    before = csv.field_size_limit(2**31 - 1)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
        for values in reader:
            if not values:
                continue
            place = f"line {reader.line_num}"
            if len(values) == len(names):
                yield place, dict(zip(names, values, strict=True))
            else:
                yield (
                    place,
                    BadRow(f"it has {len(values)} fields, and the first line names {len(names)}"),
                )
    except UnicodeDecodeError as error:
        at = f"{where}: line {reader.line_num + 1}"
        raise DataError(f"{at}: it is not UTF-8\n  convert it to UTF-8 ({error.reason})") from None
    except csv.Error as error:
        raise DataError(
            f"{where}: malformed CSV on line {reader.line_num}: {error}\n  mend the file"
        ) from None
    finally:
        csv.field_size_limit(before)
        text.detach()  # the file is its opener's to close


def _json(where: str, stream: BinaryIO, *, lines: bool) -> Raw:
    """What is inside decides, whatever the file is called: an array, an object around one, or an
    object a line.
    """
    start = _head(where, stream)[:1]
    first = stream.readline()
    rest = stream.readline()
    while rest and not rest.strip():
        rest = stream.readline()
    stream.seek(0)
    if start == b"[" or (
        not lines and start == b"{" and (not rest or isinstance(_parsed(first), BadRow))
    ):
        yield from _array(where, stream.read())
        return
    for number, line in _numbered(stream):
        yield f"line {number}", line


def parsed(row: Unread) -> Row | BadRow:
    """The row; of a line of JSON its object, or why it is none; with the names of fields that
    the source gives.
    """
    if isinstance(row, Named):
        return row.renamed()
    return _parsed(row) if isinstance(row, bytes) else row


def _parsed(line: bytes) -> Row | BadRow:
    try:
        return _object(json.loads(line.rstrip()))
    except UnicodeDecodeError as error:
        return BadRow(f"it is not UTF-8 (byte {error.start})")
    except ValueError as error:
        place = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        return BadRow(f"malformed JSON: {getattr(error, 'msg', error)}{place}")
    except RecursionError:
        return BadRow("malformed JSON: nested too deeply")


def _object(row: Any) -> Row | BadRow:
    return row if isinstance(row, dict) else BadRow(f"it is a {type(row).__name__}, not an object")


def _array(where: str, data: bytes) -> Rows:
    try:
        value = json.loads(data.removeprefix(BYTE_ORDER_MARK))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: it is not UTF-8 (byte {error.start})\n  convert it to UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: malformed JSON on line {error.lineno}, column {error.colno}: {error.msg}\n"
            "  an array is read whole or not at all: mend that line (JSON lines can leave out "
            "bad rows: max_bad_rows)"
        ) from None
    except RecursionError:
        raise DataError(f"{where}: malformed JSON: nested too deeply\n  mend the file") from None
    for number, row in enumerate(_unwrapped(where, value) if isinstance(value, dict) else value):
        yield f"row {number}", _object(row)


def _unwrapped(where: str, value: dict[str, Any]) -> list[Any]:
    """The rows in an object around them; or the object as the only row, if it is one (ShareGPT's
    turns are ``items`` too).
    """
    for key in WRAPPERS:
        rows = value.get(key)
        if isinstance(rows, list) and not (
            rows and isinstance(rows[0], dict) and {"from", "role"} & set(rows[0])
        ):
            return rows
    if detect([value]) is not None:
        return [value]
    raise DataError(
        f"{where}: one object that holds no rows (it has: {', '.join(value) or 'nothing'})\n"
        f"  rows are looked for in: {', '.join(WRAPPERS)}; or write an array, or one object a line"
    )


def _arrow(where: str, what: str) -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtra(
            f"{where}: {what} needs pyarrow, which is not installed\n  pip install 'hgms[llm]'"
        ) from error
    return pa, pq


def _parquet(where: str, stream: BinaryIO) -> Rows:
    pa, pq = _arrow(where, "Parquet")
    try:
        packed = not isinstance(stream, io.BufferedReader) or isinstance(stream.raw, _Unpacked)
        batches = pq.ParquetFile(pa.BufferReader(stream.read()) if packed else stream).iter_batches(
            batch_size=WATCHED
        )
        for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
            yield f"row {number}", row
    except pa.ArrowException as error:
        raise DataError(
            f"{where}: it is not a whole Parquet file ({str(error).splitlines()[0]})\n"
            "  fetch it again"
        ) from None


READERS: Mapping[str, Callable[[str, BinaryIO], Raw]] = {
    ".json": functools.partial(_json, lines=False),
    **dict.fromkeys((".jsonl", ".ndjson"), functools.partial(_json, lines=True)),
    ".parquet": _parquet,
    ".csv": functools.partial(_delimited, delimiter=","),
    ".tsv": functools.partial(_delimited, delimiter="\t"),
    ".txt": _lines,
}


def _hub(where: str, source: Place) -> Rows:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra(
            f"{where}: data sets of the Hub need `datasets`, which is not installed\n"
            "  pip install 'hgms[llm]', or download the file and give its path"
        ) from error
    try:
        table = datasets.load_dataset(
            source.hub, source.subset, split=source.split or "train", revision=source.revision
        )
    except Exception as error:
        # the library raises its own, requests', httpx' and pyarrow's errors: all mean the same here
        first = (str(error).splitlines() or [""])[0]
        raise DataError(
            f"{where}: could not be loaded from the Hub ({type(error).__name__}: {first})\n"
            "  check name, revision (all 40 digits of the commit), subset, split and network; or "
            "download a file: path = ..."
        ) from error
    for number, row in enumerate(table):
        yield f"row {number}", row
