"""Named data sources: from a file of rows, or a data set of the Hub, to conversations."""

from __future__ import annotations

import contextlib
import csv
import difflib
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast, final

import torch
from attrs import Attribute, field, frozen, validators

from hgms_core import ConfigError, DataError, Key, MissingExtra, unknown
from hgms_llm.formats import FORMATS, RAW, BadRow, Format, Message, Row, detect, formats

ENDINGS = (".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".tsv", ".txt")
PACKED = (".gz", ".zst")
WRAPPERS = ("data", "items", "instances", "rows")
SHOWN = 5
PROBED = 200
LONGEST_NAME = 120
COMMIT = re.compile(r"[0-9a-f]{7,40}")


def _format(_source: object, attribute: Attribute[str], value: object) -> None:
    if value != "auto" and value not in FORMATS:
        raise ValueError(unknown("format", str(value), ["auto", *FORMATS]))


def _commit(_source: object, attribute: Attribute[str], value: str) -> None:
    if not COMMIT.fullmatch(value):
        raise ValueError(f"'revision' must be a commit (hex digits; a branch or tag may move): {value!r}")


def _text(minimum: int = 1) -> Any:
    return validators.optional([validators.instance_of(str), validators.min_len(minimum)])


@final
@frozen(kw_only=True)
class Source:
    """Where rows of text come from: a local file, or a data set of the Hub at a pinned commit.

    A file is ``.json`` (an array of objects, or an object whose ``data``, ``items``, ``instances`` or ``rows`` is one),
    ``.jsonl`` (one object a line), ``.parquet``, ``.csv`` or ``.tsv`` (the first line names the fields) or ``.txt`` (a text a
    line), plain, ``.gz`` or ``.zst``. What is inside is looked at, so JSON lines may be called ``.json``. A path may also be a
    folder of such files, or a pattern with ``*`` (``**``: in folders below, too): their rows follow each other in the order of
    the files' paths. ``$VARIABLES`` and ``~`` in a path are expanded.

    Use when data has a name and a weight of its own, or is a validation or test set. The loss is taken on answers only; of text
    without prompt and answer (``.txt``, or ``format = "text"``) it is taken on all of it.

    Arguments:
        path, or hub with revision (a commit) and optionally subset and split (default ``train``).
        format: one of :data:`~hgms_llm.formats.FORMATS`, or ``auto`` (the one that most of the first rows look like).
        skip, rows: take ``rows`` rows (None: all there are) after leaving out the first ``skip``, in the file's order or, with
            ``shuffle_seed``, in the order of a permutation drawn from it. Bad rows do not count.
        completion: what every answer is replaced by (None: nothing); ``"."`` is ScaleBiO's corruption.
        max_bad_rows: how many rows may be malformed or lack fields, and are left out, before that is an error.

    Errors: ConfigError for fields that do not fit together or a variable that is not set; DataError for what is missing, empty,
    damaged, malformed or too short; MissingExtra without pyarrow or datasets. Cost: one pass over the file.

    >>> Source(path="$HGMS_DATA/gsm8k/train.jsonl.gz", rows=1000, shuffle_seed=0).format
    'auto'

    Source: HG-MS paper, appendix "Controlled GPT-2" and "Real-world language models" (named sources of instruction rows).
    """

    path: str | None = field(default=None, validator=_text())
    hub: str | None = field(default=None, validator=_text())
    revision: str | None = field(default=None, validator=validators.optional([validators.instance_of(str), _commit]))
    subset: str | None = field(default=None, validator=_text())
    split: str | None = field(default=None, validator=_text())
    format: str = field(default="auto", validator=_format)
    skip: int = field(default=0, validator=[validators.instance_of(int), validators.ge(0)])
    rows: int | None = field(default=None, validator=validators.optional([validators.instance_of(int), validators.ge(1)]))
    shuffle_seed: int | None = field(default=None, validator=validators.optional([validators.instance_of(int)]))
    completion: str | None = field(default=None, validator=_text())
    max_bad_rows: int = field(default=0, validator=[validators.instance_of(int), validators.ge(0)])

    def __attrs_post_init__(self) -> None:
        if (self.path is None) == (self.hub is None):
            raise ConfigError(
                f"a source is either a path or a hub data set ({'both' if self.path else 'neither'} given)\n"
                '  path = "FILE.jsonl", or hub = "OWNER/NAME" with revision = "COMMIT"'
            )
        if self.hub is not None and self.revision is None:
            raise ConfigError(
                f"the hub data set {self.hub!r} needs a revision, so that its rows cannot change\n"
                f"  revision = the commit that `git ls-remote https://huggingface.co/datasets/{self.hub} main` prints"
            )
        if self.path is not None:
            given = [name for name in ("revision", "subset", "split") if getattr(self, name) is not None]
            if given:
                raise ConfigError(f"{', '.join(given)} go with hub, not with a path ({self.path})")

    @property
    def where(self) -> str:
        """The file or data set, for messages."""
        if self.path is not None:
            return self.path
        return f"hub:{self.hub}@{self.revision}" + (f" {self.subset}" if self.subset else "") + f" {self.split or 'train'}"


@final
@frozen
class Example:
    """A conversation that ends with an answer; ``row`` is its number in the source, counted from 0 with the bad rows."""

    messages: tuple[Message, ...]
    row: int

    @property
    def key(self) -> str:
        """The prompt for exact matching: what the user said, case folded, white space collapsed; answers and system prompts
        do not count. Of a text without a prompt it is the text."""
        said = [message.text for message in self.messages if message.role == "user"]
        return " ".join(" ".join(said or [self.messages[-1].text]).casefold().split())

    @property
    def blank(self) -> bool:
        """Whether every answer is empty, so that there is nothing to learn."""
        return not any(message.text.strip() for message in self.messages if message.role == "assistant")


@final
@frozen
class Reading:
    """What reading a source gave: the examples asked for, how many rows there were, how many of them bad, and the format."""

    examples: list[Example]
    total: int
    bad: int
    format: str


def check_names(names: Iterable[str], what: str = "source") -> None:
    """Raises ConfigError for names that are empty, equal, or differ by case only (a file system or a reader mixes them up), and
    for those that cannot be part of a file's name: files of results are called after them."""
    seen: dict[str, str] = {}
    for name in names:
        folded = name.strip().casefold()
        if not folded:
            raise ConfigError(f"a {what} has an empty name\n  names tie weights to data: give each one of its own")
        if bad := next((mark for mark in name if mark in "/\\" or not mark.isprintable()), ""):
            raise ConfigError(f"the {what} {name[:80]!r} has {bad!r} in its name\n  files are called after it: leave that out")
        if len(name.encode()) > LONGEST_NAME:
            raise ConfigError(
                f"the {what} {name[:40]!r}… has a name of {len(name.encode())} bytes\n"
                f"  files are called after it: at most {LONGEST_NAME} bytes"
            )
        if folded in seen:
            other = seen[folded]
            how = (
                f"two {what}s are called {name!r}"
                if other == name
                else f"the {what}s {other!r} and {name!r} differ by case only"
            )
            raise ConfigError(f"{how}\n  names tie weights to data: rename one of them")
        seen[folded] = name


def read_examples(name: str, source: Source) -> list[Example]:
    """The examples of ``source`` (called ``name`` in messages), as :func:`read` gives them."""
    return read(name, source).examples


def read(name: str, source: Source) -> Reading:
    """The rows of ``source`` as conversations, and the counts of what was read."""
    where = f"source {name!r} ({source.where})"
    records = _records(where, source)
    first = _first(records)
    if not first:
        raise DataError(f"{where} is empty: it has no rows\n  fetch it again, or leave the source out")
    whole = [record for _, record in first if not isinstance(record, BadRow)]
    # a file without a single object has no format: all its rows go into the list of bad ones
    form = FORMATS[source.format] if source.format != "auto" else _detected(where, whole) if whole else None
    examples: list[Example] = []
    bad: list[str] = []
    total = 0
    for line, record in itertools.chain(first, records):
        try:
            if form is None or isinstance(record, BadRow):
                raise record if isinstance(record, BadRow) else BadRow("of no known format")
            examples.append(Example(_replaced(form.read(record), source.completion), total))
        except BadRow as error:
            bad.append(f"{line}: {error}")
        total += 1
    if len(bad) > source.max_bad_rows or not examples:
        raise DataError(_bad(where, form, bad, total, detect(whole), source))
    return Reading(_chosen(where, examples, source), total, len(bad), form.name if form else "")


def _first(records: Iterator[tuple[str, Row | BadRow]]) -> list[tuple[str, Row | BadRow]]:
    """Enough rows to tell the format by."""
    first: list[tuple[str, Row | BadRow]] = []
    whole = 0
    for record in records:
        first.append(record)
        whole += not isinstance(record[1], BadRow)
        if whole == PROBED:
            break
    return first


def _detected(where: str, rows: list[Row]) -> Format:
    form = detect(rows)
    if form is None:
        keys = list(dict.fromkeys(str(key) for row in rows for key in row))
        wanted = ("instruction", "output", "messages", "conversations", "prompt", "completion", "question", "answer", "problem")
        near = [(key, m) for key in keys for m in difflib.get_close_matches(key.casefold(), wanted, n=1, cutoff=0.75)]
        hint = f"; is {near[0][0]!r} meant to be {near[0][1]!r}?" if near else ""
        raise DataError(
            f"{where}: its rows look like no known format (they have: {', '.join(keys) or 'no fields'}){hint}\n"
            f"  known formats:\n{formats()}\n  rename the fields, or name the nearest format to see what each row lacks"
        )
    return form


def _replaced(messages: tuple[Message, ...], completion: str | None) -> tuple[Message, ...]:
    for message in messages:
        try:
            message.text.encode()
        except UnicodeEncodeError as error:
            raise BadRow(f"half a surrogate pair ({message.text[error.start]!a}), which is no text") from None
    if completion is None:
        return messages
    return tuple(Message("assistant", completion) if message.role == "assistant" else message for message in messages)


def _bad(where: str, form: Format | None, bad: list[str], total: int, better: Format | None, source: Source) -> str:
    count = len(bad)
    shape = f" as {form.name!r}" if form else ""
    lines = [
        f"{where}: {count} of {total} rows cannot be read{shape} (max_bad_rows = {source.max_bad_rows})",
        *([f"  {form.name}: {form.looks}"] if form else []),
        *(f"  {line}" for line in bad[:SHOWN]),
    ]
    if count > SHOWN:
        lines.append(f"  … and {count - SHOWN} more")
    if count < total:
        lines.append(f"  mend these rows, or leave them out with max_bad_rows = {count} or more")
    elif better is not None and better is not form:
        lines.append(f'  the rows look like {better.name!r}: set format = "{better.name}" (or "auto")')
    else:
        lines.append("  no row is left: mend or replace the file")
    return "\n".join(lines)


def _chosen(where: str, examples: list[Example], source: Source) -> list[Example]:
    have, skip = len(examples), source.skip
    if skip + (source.rows or 1) > have:
        asked = f"{source.rows} rows" if source.rows else "rows"
        after = f" after the first {skip}" if skip else ""
        most = f"rows = {have - skip} is the most there is" if have > skip else f"skip can be at most {have - 1}"
        raise DataError(
            f"{where} is shorter than asked: {asked}{after}, but it has {have} good rows\n"
            f"  {most if source.rows is None or have <= skip else most + ', or leave rows out to take all'}"
        )
    if source.shuffle_seed is not None:
        order = torch.randperm(have, generator=Key(source.shuffle_seed).fold("rows").generator()).tolist()
        examples = [examples[i] for i in order]
    return examples[skip : None if source.rows is None else skip + source.rows]


# -- files ------------------------------------------------------------------------------------------------------------


def expand(path: str, where: str) -> Path:
    """The path with ``~`` and ``$VARIABLES`` replaced; a variable that is not set is named."""

    def value(match: re.Match[str]) -> str:
        variable = match[1] or match[2]
        if variable not in os.environ:
            near = difflib.get_close_matches(variable, os.environ, n=1, cutoff=0.75)
            hint = f" (did you mean ${near[0]}?)" if near else ""
            raise ConfigError(
                f"{where}: the environment variable {variable} is not set{hint}\n"
                f"  export {variable}=FOLDER, or write the path out"
            )
        return os.environ[variable]

    return Path(re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, path)).expanduser()


def as_written(text: str, path: str) -> str:
    """A message of a library with the path as the configuration has it: a variable's value may be nobody else's business."""
    return text.replace(str(expand(path, path)), path)


def found(path: str, where: str) -> list[Path]:
    """The existing files that ``path`` names: one, those of a folder, or those that a pattern fits, in the order of their
    paths. Messages show the path as it is written."""
    file = expand(path, where)
    known = f"known: {', '.join(ENDINGS)}, plain, {' or '.join(PACKED)}"
    if file.is_file():
        if _ending(file) in ENDINGS:
            return [file]
        raise DataError(f"{where}: cannot tell what kind of file {path} is\n  {known}")
    pattern = glob.has_magic(str(file))
    matched = sorted(map(Path, glob.glob(str(file), recursive=True))) if pattern else []
    inside = sorted(file.iterdir()) if file.is_dir() and os.access(file, os.R_OK) else matched
    if files := [each for each in inside if each.is_file() and _ending(each) in ENDINGS]:
        return files
    if pattern:
        other = f"; it fits {', '.join(each.name for each in matched[:5])}" if matched else ""
        raise DataError(f"{where}: {path}: no file fits the pattern{other}\n  {known}")
    folder = file if file.is_dir() else file.parent
    what = "is a folder without a file to read" if file.is_dir() else "there is no such file"
    try:
        names = sorted(each.name for each in folder.iterdir() if _ending(each) in ENDINGS)
    except OSError:
        raise DataError(f"{where}: {path}: {what}, and its folder cannot be read\n  check the path") from None
    near = difflib.get_close_matches(file.name, names, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise DataError(f"{where}: {path}: {what}{hint}\n  available there: {', '.join(names[:20]) or '(nothing to read)'}")


def _ending(file: Path) -> str:
    """What is inside, by the name."""
    return Path(file.name.removesuffix(".gz").removesuffix(".zst")).suffix.casefold()


def content(name: str, source: Source) -> str:
    """What identifies the rows before ``source`` chooses among them: the sha256 of the file (of several: of their digests), or
    the pinned data set."""
    if source.path is None:
        return source.where
    where = f"source {name!r} ({source.where})"
    digests = []
    for file in found(source.path, where):
        with _reading(where), file.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


@contextlib.contextmanager
def _reading(where: str) -> Iterator[None]:
    """What goes wrong below the rows, in words."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{where}: the gzip stream is truncated or damaged ({error})\n  fetch the file again") from None
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror or error}\n  check the path and its rights") from None


def _records(where: str, source: Source) -> Iterator[tuple[str, Row | BadRow]]:
    """Each row with where it stands; a row that is not an object as the reason why."""
    if source.path is None:
        yield from _hub(where, source)
        return
    files = found(source.path, where)
    for file in files:
        ending, at = _ending(file), where if len(files) == 1 else f"{where}, {file.name}"
        with _reading(at), _opened(at, file) as stream:
            rows = _READERS.get(ending, functools.partial(_json, ending=ending))(at, stream)
            for place, row in rows:
                yield (place if len(files) == 1 else f"{file.name}, {place}"), row


def _opened(where: str, file: Path) -> BinaryIO:
    if file.suffix == ".zst":
        pa, _ = _arrow(where, "zstd")
        with pa.input_stream(str(file), compression="zstd") as stream:
            return io.BytesIO(stream.read())
    return cast(BinaryIO, gzip.open(file)) if file.suffix == ".gz" else file.open("rb")


def _utf8(where: str, head: bytes) -> None:
    """Refuses the encoding that spreadsheets and Windows write, which would else be a list of bad rows."""
    zeros = head.count(0)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or (zeros and zeros >= len(head) // 4):
        raise DataError(f"{where}: it is UTF-16 (or 32), not UTF-8\n  convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW")


def _delimited(where: str, stream: BinaryIO, *, delimiter: str) -> Iterator[tuple[str, Row | BadRow]]:
    """The rows of a table whose first line names the fields; every value is text."""
    _utf8(where, stream.read(4096))
    stream.seek(0)
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
                yield place, BadRow(f"it has {len(values)} fields, and the first line names {len(names)}")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: line {reader.line_num + 1}: it is not UTF-8\n  convert it to UTF-8 ({error.reason})"
        ) from None
    except csv.Error as error:
        raise DataError(f"{where}: malformed CSV on line {reader.line_num}: {error}\n  mend the file") from None
    finally:
        csv.field_size_limit(before)
        text.detach()  # the file is its opener's to close


def _lines(where: str, stream: BinaryIO) -> Iterator[tuple[str, Row | BadRow]]:
    """A text a line."""
    _utf8(where, stream.read(4096))
    stream.seek(0)
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            try:
                yield f"line {number}", {RAW: line.decode().rstrip("\r\n")}
            except UnicodeDecodeError as error:
                yield f"line {number}", BadRow(f"it is not UTF-8 (byte {error.start})")


def _json(where: str, stream: BinaryIO, ending: str) -> Iterator[tuple[str, Row | BadRow]]:
    head = stream.read(4096)
    stream.seek(0)
    _utf8(where, head)
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if start == b"[":  # whatever the file is called: a row is never an array
        yield from _array(where, stream.read())
        return
    first = stream.readline()
    rest = stream.readline()
    while rest and not rest.strip():
        rest = stream.readline()
    stream.seek(0)
    if ending == ".json" and start == b"{" and (not rest or not _whole(first)):
        yield from _array(where, stream.read())
        return
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield f"line {number}", _parsed(line)


def _whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _parsed(line: bytes) -> Row | BadRow:
    try:
        row = json.loads(line.rstrip())
    except UnicodeDecodeError as error:
        return BadRow(f"it is not UTF-8 (byte {error.start})")
    except ValueError as error:
        place = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        return BadRow(f"malformed JSON: {getattr(error, 'msg', error)}{place}")
    except RecursionError:
        return BadRow("malformed JSON: nested too deeply")
    return row if isinstance(row, dict) else BadRow(f"it is a {type(row).__name__}, not an object")


def _array(where: str, data: bytes) -> Iterator[tuple[str, Row | BadRow]]:
    try:
        value = json.loads(data.removeprefix(b"\xef\xbb\xbf"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: it is not UTF-8 (byte {error.start})\n  convert it to UTF-8") from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: malformed JSON on line {error.lineno}, column {error.colno}: {error.msg}\n"
            "  an array is read whole or not at all: mend that line (JSON lines can leave out bad rows: max_bad_rows)"
        ) from None
    except RecursionError:
        raise DataError(f"{where}: malformed JSON: nested too deeply\n  mend the file") from None
    if isinstance(value, dict):
        value = _unwrapped(where, value)
    for number, row in enumerate(value):
        yield f"row {number}", row if isinstance(row, dict) else BadRow(f"it is a {type(row).__name__}, not an object")


def _unwrapped(where: str, value: dict[str, Any]) -> list[Any]:
    """The rows in an object around them; or the object as the only row, if it is one (ShareGPT's turns are ``items`` too)."""
    for key in WRAPPERS:
        rows = value.get(key)
        if isinstance(rows, list) and not (rows and isinstance(rows[0], dict) and {"from", "role"} & set(rows[0])):
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
        raise MissingExtra(f"{where}: {what} needs pyarrow, which is not installed\n  pip install 'hgms[llm]'") from error
    return pa, pq


def _parquet(where: str, stream: BinaryIO) -> Iterator[tuple[str, Row | BadRow]]:
    pa, pq = _arrow(where, "Parquet")
    number = 0
    try:
        for batch in pq.ParquetFile(pa.BufferReader(stream.read())).iter_batches():
            for row in batch.to_pylist():
                yield f"row {number}", row
                number += 1
    except pa.ArrowException as error:
        raise DataError(f"{where}: it is not a whole Parquet file ({str(error).splitlines()[0]})\n  fetch it again") from None


_READERS: Mapping[str, Callable[[str, BinaryIO], Iterator[tuple[str, Row | BadRow]]]] = {
    ".parquet": _parquet,
    ".csv": functools.partial(_delimited, delimiter=","),
    ".tsv": functools.partial(_delimited, delimiter="\t"),
    ".txt": _lines,
}


def _hub(where: str, source: Source) -> Iterator[tuple[str, Row | BadRow]]:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra(
            f"{where}: data sets of the Hub need `datasets`, which is not installed\n"
            "  pip install 'hgms[llm]', or download the file and give its path"
        ) from error
    try:
        table = datasets.load_dataset(source.hub, source.subset, split=source.split or "train", revision=source.revision)
    except Exception as error:  # the library raises its own, requests', httpx' and pyarrow's errors: all mean the same here
        said = str(error).splitlines()
        raise DataError(
            f"{where}: could not be loaded from the Hub ({type(error).__name__}: {said[0] if said else ''})\n"
            "  check name, revision (all 40 digits of the commit), subset, split and network; or download a file: path = ..."
        ) from error
    number = 0
    for batch in table.iter(batch_size=1000):
        columns: Mapping[str, list[Any]] = batch
        for values in zip(*columns.values(), strict=True):
            yield f"row {number}", dict(zip(columns, values, strict=True))
            number += 1
