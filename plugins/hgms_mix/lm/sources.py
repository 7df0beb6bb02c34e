"""Named data sources: conversion of a file of rows, or a data set of the Hub, to conversations."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, final

import attrs
import torch
from attrs import field, validators
from torch import Tensor

from hgms.store import digest, file_digest
from hgms_core import ConfigError, Key, component
from hgms_core.errors import DataError, Place, unknown_name
from hgms_core.validators import at_least, not_empty, optional, whole_number
from hgms_mix.lm.files import Raw, Unread, files_at, parsed, raw_rows, reading
from hgms_mix.lm.formats import FORMATS, BadRow, Format, Message, Row, detect, read_row
from hgms_mix.lm.table import Report

SHOWN = 5
PROBED = 200
MOST_PROBED = 20_000
LONGEST_NAME = 120
OWN_NAMES = 'fields = { prompt = "COLUMN", completion = "COLUMN" }'
"""The example in messages for columns whose names no format knows."""


def _format(_source: object, _attribute: object, value: object) -> None:
    if value != "auto" and value not in FORMATS:
        raise unknown_name("format", str(value), ["auto", *FORMATS], ("format",))


def _fields(_source: object, _attribute: object, value: Mapping[str, str]) -> None:
    if not all(isinstance(text, str) and text for pair in value.items() for text in pair):
        raise ConfigError(
            "wrong-value",
            f"fields={dict(value)} must map names of fields to names of columns",
            place=("fields",),
            hint=f"write {OWN_NAMES}",
        )
    if twice := next(
        (column for column in value.values() if list(value.values()).count(column) > 1), None
    ):
        raise ConfigError(
            "wrong-value",
            f"fields={dict(value)} uses the column {twice!r} for two fields",
            place=("fields",),
        )


def _commit(_source: object, _attribute: object, value: str) -> None:
    if not re.fullmatch(r"[0-9a-f]{7,40}", value):
        raise ConfigError(
            "wrong-value",
            f"revision={value!r} is not a commit (7 to 40 hex digits)",
            place=("revision",),
            hint="use a commit: a branch or tag may change",
        )


text: Any = optional([validators.instance_of(str), not_empty])
count: Any = at_least(0)


@final
@component
class Source:
    """A source of rows of text: a local file, or a data set of the Hub at a pinned commit.

    A column that no format reads is named in a warning, unless it is known to be harmless (``id``,
    ``source``, ``language``, …). A row is bad if it has a column or key that changes its meaning
    and cannot be used: ``label = false`` (the answer is marked as bad), ``tools``, ``images``, a
    ``context`` or ``history`` outside an Alpaca row, ``tool_calls`` or ``reasoning_content`` of a
    turn. A turn with ``"weight": 0`` (or ``"train": false``, ``"loss": false``) is excluded from
    the loss. ``fields = { ignored = "COLUMN" }`` skips a column on purpose.

    A file is ``.json`` (an array of objects, or an object whose ``data``, ``items``, ``instances``
    or ``rows`` is an array), ``.jsonl`` (one object per line), ``.parquet``, ``.csv`` or ``.tsv``
    (the first line names the fields) or ``.txt`` (one text per line), plain, ``.gz`` or ``.zst``.
    The contents determine the format of JSON, so JSON lines may be named ``.json``. A path may also
    be a folder of such files, or a pattern with ``*`` (``**``: in subfolders, too): their rows
    follow each other in the order of the files' paths. ``$VARIABLES`` and ``~`` in a path are
    expanded.

    Use when data has a separate name and weight, or is a validation or test set. The loss is
    computed on answers only. For text without prompt and answer (``.txt``, or ``format = "text"``)
    it is computed on all of it.

    Arguments:
        path, or hub with revision (a commit) and optionally subset and split (default ``train``). A
            string in place of the table is its path: ``faq = "faq.jsonl"``.
        format: one of :data:`~hgms_mix.lm.formats.FORMATS`, or ``auto`` (the format of most of the
            first rows).
        fields: the file's own columns for the fields of the format, if their names differ (None: no
            difference): ``fields = { prompt = "frage", completion = "antwort" }``.
        skip, rows: select ``rows`` rows (None: all) after the first ``skip``, in the file's order
            or, with ``shuffle_seed``, in the order of a permutation drawn from it. Bad rows do not
            count.
        completion: the replacement of every answer (None: no replacement); ``"."`` is ScaleBiO's
            corruption.
        max_bad_rows: the number of skipped rows (malformed or without fields) before an error is
            raised.

    Errors: ConfigError for fields that do not fit together or a variable that is not set; DataError
    for data that is missing, empty, damaged, malformed or too short; MissingExtra without pyarrow
    or datasets. Cost: one pass over the file. A JSON array is read as a whole; every other type of
    file row by row, for any length.

    >>> Source(path="$HGMS_DATA/gsm8k/train.jsonl.gz", rows=1000, shuffle_seed=0).format
    'auto'

    Source: HG-MS paper, appendix "Controlled GPT-2" and "Real-world language models" (named sources
    of instruction rows).
    """

    shorthand: ClassVar[str] = "path"
    """The field that a string in place of the table sets."""

    path: str | None = field(default=None, validator=text)
    hub: str | None = field(default=None, validator=text)
    revision: str | None = field(
        default=None, validator=optional([validators.instance_of(str), _commit])
    )
    subset: str | None = field(default=None, validator=text)
    split: str | None = field(default=None, validator=text)
    format: str = field(default="auto", validator=_format)
    fields: Mapping[str, str] | None = field(default=None, validator=optional(_fields), hash=False)
    skip: int = field(default=0, validator=count)
    rows: int | None = field(default=None, validator=optional(at_least(1)))
    shuffle_seed: int | None = field(default=None, validator=optional([whole_number]))
    completion: str | None = field(default=None, validator=text)
    max_bad_rows: int = field(default=0, validator=count)

    def __attrs_post_init__(self) -> None:
        either = 'set path = "FILE.jsonl", or hub = "OWNER/NAME" with revision = "COMMIT"'
        if self.path is not None and self.hub is not None:
            raise ConfigError(
                "conflicting-options",
                f"path={self.path!r} and hub={self.hub!r} exclude each other",
                place=("path",),
                hint=either,
            )
        if self.path is None and self.hub is None:
            raise ConfigError(
                "missing-option",
                "a source requires a path or a hub data set",
                place=("path",),
                hint=either,
            )
        if self.hub is not None and self.revision is None:
            raise ConfigError(
                "missing-option",
                f"the hub data set {self.hub!r} requires a revision, which fixes its rows",
                place=("revision",),
                hint="set revision to the commit that `git ls-remote "
                f"https://huggingface.co/datasets/{self.hub} main` prints",
            )
        of_hub = [
            name for name in ("revision", "subset", "split") if getattr(self, name) is not None
        ]
        if self.path is not None and of_hub:
            raise ConfigError(
                "conflicting-options",
                f"{', '.join(of_hub)} cannot be combined with path={self.path!r}",
                place=(of_hub[0],),
                hint=f"remove {' and '.join(of_hub)}, or set hub in place of path",
            )

    @property
    def origin(self) -> str:
        """The option that names the file or data set: ``path`` or ``hub``."""
        return "hub" if self.path is None else "path"

    @property
    def where(self) -> str:
        """The file or data set, for messages."""
        if self.path is not None:
            return self.path
        return (
            f"hub:{self.hub}@{self.revision}"
            + (f" {self.subset}" if self.subset else "")
            + f" {self.split or 'train'}"
        )


@final
@attrs.frozen
class Example:
    """A conversation that ends with an answer.

    ``row`` is its number in the source, counted from 0 with the bad rows. ``unread`` names the
    unread parts of the row (:func:`~hgms_mix.lm.formats.read_row`).
    """

    messages: tuple[Message, ...]
    row: int
    unread: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        """The prompt for exact matching.

        It is the user's text, case folded, with white space collapsed; answers and system prompts
        do not count. For a text without a prompt it is the text.
        """
        prompts = [message.text for message in self.messages if message.role == "user"]
        return " ".join(" ".join(prompts or [self.messages[-1].text]).casefold().split())

    @property
    def blank(self) -> bool:
        """Whether every answer is empty or not learned, so that the row has no loss."""
        return not any(
            message.text.strip()
            for message in self.messages
            if message.role == "assistant" and message.learned
        )


def check_names(names: Iterable[str], what: str = "source", place: Place = ()) -> None:
    """Raise ConfigError for invalid names of sources.

    Names must not be empty, equal, or differ by case only (a file system or a reader confuses
    them). They must be valid parts of file names, since files of results contain them. ``place`` is
    the place of their table.
    """
    seen: dict[str, str] = {}
    for number, name in enumerate(names):
        folded = name.strip().casefold()
        if not folded:
            raise ConfigError(
                "wrong-value",
                f"the name {name!r} of a {what} is empty",
                place=place,
                hint="use a different name for each: names connect weights and data",
            )
        if bad := next((mark for mark in name if mark in "/\\" or not mark.isprintable()), ""):
            raise ConfigError(
                "wrong-value",
                f"the name {name[:80]!r} of a {what} contains {bad!r}",
                place=place,
                hint="remove the character: names of files include the name",
            )
        if len(name.encode()) > LONGEST_NAME:
            raise ConfigError(
                "wrong-length",
                f"the name {name[:40]!r}… of a {what} has {len(name.encode())} bytes, but at most "
                f"{LONGEST_NAME} are possible",
                place=place,
                hint="use a shorter name: names of files include it",
            )
        other = seen.setdefault(folded, name)
        if len(seen) <= number:
            differ = (
                f"the names {other!r} and {name!r} of two {what}s differ only in case or spaces"
            )
            raise ConfigError(
                "duplicate-name",
                f"two {what}s have the name {name!r}" if other == name else differ,
                place=place,
                hint="rename one of them: names connect weights and data",
            )


def read_examples(name: str, source: Source) -> list[Example]:
    """Return the examples of ``source``, as in :func:`read`.

    Places of errors begin with ``name``.
    """
    return read(name, source)[0]


def read(name: str, source: Source) -> tuple[list[Example], Report]:
    """Return the rows of ``source`` as conversations, and the counts of rows; all in memory."""
    where = (name,)
    form, records = begun(where, source)
    examples: list[Example] = []
    bad: list[str] = []
    unread: set[str] = set()
    total = 0
    for total, (line, row) in enumerate(records, start=1):
        try:
            examples.append(example_of(row, total - 1, form, source.completion))
        except BadRow as error:
            bad.append(f"{line}: {error}")
        else:
            unread |= examples[-1].unread
    check_bad(where, source, form, len(bad), bad, total)
    examples = [examples[i] for i in chosen(where, len(examples), source).tolist()]
    return examples, Report(
        format=form.name if form else "",
        total=total,
        bad=len(bad),
        examples=len(examples),
        unread=tuple(sorted(unread)),
    )


def begun(
    where: Place, source: Source, watch: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Format | None, Raw]:
    """Return the format of a source's rows, and all rows.

    A file without a single object has no format (None): all its rows are bad. ``where`` is the
    place of the source in errors.

    Errors: DataError if there is no row, or if the rows have no known format.
    """
    records = raw_rows(where, source, watch)
    first: list[tuple[str, Unread]] = []
    whole: list[Row] = []  # enough rows to detect the format
    while len(whole) < PROBED and len(first) < MOST_PROBED and (record := next(records, None)):
        first.append(record)
        if not isinstance(row := parsed(record[1]), BadRow):
            whole.append(row)
    if not first:
        raise DataError(
            "no-rows",
            f"{source.where} has no rows",
            place=(*where, source.origin),
            hint="replace the file, or remove the source",
        )
    form = (
        FORMATS[source.format]
        if source.format != "auto"
        else _detected(where, source, whole)
        if whole
        else None
    )
    return form, itertools.chain(first, records)


def look(name: str, source: Source) -> None:
    """Raise DataError if the first rows of ``source`` cannot be read, or have no known format.

    This check is possible before a model is loaded.
    """
    begun((name,), source)


def example_of(row: Unread, number: int, form: Format | None, completion: str | None) -> Example:
    """Return a row as a conversation. Raise BadRow if it is not a conversation."""
    row = parsed(row)
    if form is None or isinstance(row, BadRow):
        raise row if isinstance(row, BadRow) else BadRow("it has no known format")
    messages, unread = read_row(form, row)
    return Example(_replaced(messages, completion), number, unread)


def check_bad(
    where: Place, source: Source, form: Format | None, bad: int, some: Sequence[str], total: int
) -> None:
    """Raise DataError for more ``bad`` rows than the source allows, or if no row is left.

    The message names the rows in ``some``.
    """
    if bad <= source.max_bad_rows and bad < total:
        return
    whole = [
        row
        for _, raw in itertools.islice(raw_rows(where, source), PROBED)
        if not isinstance(row := parsed(raw), BadRow)
    ]
    raise _bad(where, form, bad, some, total, detect(whole), source)


def _detected(where: Place, source: Source, rows: list[Row]) -> Format:
    if (form := detect(rows)) is not None:
        return form
    keys = list(dict.fromkeys(str(key) for row in rows for key in row))
    wanted = (
        "instruction",
        "output",
        "messages",
        "conversations",
        "prompt",
        "completion",
        "question",
        "answer",
        "problem",
    )
    near = [
        (key, m)
        for key in keys
        if key not in wanted
        for m in difflib.get_close_matches(key.casefold(), wanted, n=1, cutoff=0.75)
    ]
    advice = [f"rename the column {near[0][0]!r} to {near[0][1]!r}"] if near else []
    if "text" in keys:
        advice.append("set format = \"text\" to learn the column 'text' from its beginning")
    if "chosen" in keys and "prompt" in keys:
        advice.append('set fields = { completion = "chosen" } to learn the preferred answers')
    known = [f"  {form.name}: {form.looks}" for form in FORMATS.values()]
    raise DataError(
        "wrong-format",
        f"the rows of {source.where} have no known format: their fields are "
        f"{', '.join(keys) or '(none)'}",
        place=(*where, source.origin),
        hint="\n".join(
            [
                *advice,
                f"set {OWN_NAMES}, or set format to see which fields a row lacks",
                "available formats:",
                *known,
            ]
        ),
    )


def _replaced(messages: tuple[Message, ...], completion: str | None) -> tuple[Message, ...]:
    for message in messages:
        try:
            message.text.encode()
        except UnicodeEncodeError as error:
            raise BadRow(
                f"half a surrogate pair ({message.text[error.start]!a}) is not text"
            ) from None
    if completion is None:
        return messages
    return tuple(
        attrs.evolve(message, text=completion) if message.role == "assistant" else message
        for message in messages
    )


def _bad(
    where: Place,
    form: Format | None,
    count: int,
    some: Sequence[str],
    total: int,
    better: Format | None,
    source: Source,
) -> DataError:
    shape = f" as {form.name!r}" if form else ""
    lines = [
        f"{count} of {total} rows of {source.where} cannot be read{shape}, but "
        f"max_bad_rows={source.max_bad_rows}"
        if count < total
        else f"none of the {total} rows of {source.where} can be read{shape}"
    ]
    lines += [f"{form.name}: {form.looks}"] if form else []
    lines += some[:SHOWN]
    lines += [f"… and {count - SHOWN} more"] if count > SHOWN else []
    if count < total:
        hint = f"correct these rows, or skip them with max_bad_rows = {count} or more"
    elif better is not None and better is not form:
        hint = f'set format = "{better.name}" or "auto": the rows look like {better.name!r}'
    elif source.fields:
        hint = "correct fields, or the file"
    else:
        first = "" if source.format == "auto" else f"remove format = {source.format!r} and "
        hint = f"correct the file; if columns have other names, {first}set {OWN_NAMES}"
    return DataError("wrong-row", "\n".join(lines), place=(*where, source.origin), hint=hint)


def chosen(where: Place, have: int, source: Source) -> Tensor:
    """Return the positions, among ``have`` valid rows, that the source selects, in its order."""
    skip = source.skip
    if skip + (source.rows or 1) > have:
        rows = "" if source.rows is None else f"rows={source.rows}"
        both = " and ".join(filter(None, [rows, f"skip={skip}" if skip else ""]))
        too_few = have > skip
        raise DataError(
            "too-few-rows",
            f"{both} requires {skip + (source.rows or 1)} rows, but {source.where} has {have} "
            "valid rows",
            place=(*where, "rows" if too_few else "skip"),
            hint=f"set rows = {have - skip} or less, or remove it to use all rows"
            if too_few
            else f"set skip = {have - 1} or less",
        )
    if source.shuffle_seed is None:
        return torch.arange(skip, have if source.rows is None else skip + source.rows)
    order = torch.randperm(have, generator=Key(source.shuffle_seed).fold("rows").generator())
    return order[skip : None if source.rows is None else skip + source.rows]


def content(name: str, source: Source) -> str:
    """Return an identifier of the rows before ``source`` selects some of them.

    It is the sha256 of the file (for several files: of their digests), or the pinned data set.
    """
    if source.path is None:
        return source.where
    place = (name, "path")
    with reading(source.path, place):
        digests = [file_digest(file) for file in files_at(source.path, place)]
    return digests[0] if len(digests) == 1 else digest(*digests)


def mixture_shares(
    mixture: Mapping[str, float], sources: Collection[str], what: str
) -> list[float]:
    """Return the weights of all sources in their order, summing to one.

    ``what`` is the option that sets them.
    """
    for name, share in mixture.items():
        if name not in sources:
            raise unknown_name("source", name, sources, (what, name))
        if not 0 <= share < math.inf:
            raise ConfigError(
                "out-of-range",
                f"the weight {share} of {name!r} must be at least 0 and finite",
                place=(what, name),
            )
    total = sum(mixture.values())
    if not total:
        raise ConfigError(
            "wrong-value", f"{what}={dict(mixture)} has no positive weight", place=(what,)
        )
    return [mixture.get(name, 0.0) / total for name in sources]
