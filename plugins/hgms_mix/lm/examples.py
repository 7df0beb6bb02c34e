"""Conversations from the rows of a source."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import final

import attrs
import torch
from torch import Tensor

from hgms.arguments import require
from hgms.store import digest, file_digest
from hgms_core import Key
from hgms_core.errors import DataError, Place
from hgms_mix.lm.files import Raw, Unread, files_at, parse, raw_rows, reading
from hgms_mix.lm.formats import FORMATS, BadRow, Format, Message, Row, detect
from hgms_mix.lm.sources import OWN_NAMES, Source

SHOWN = 5
PROBED = 200
MOST_PROBED = 20_000


@final
@attrs.frozen
class Example:
    """A conversation that ends with an answer.

    ``row`` is its number in the source, counted from 0 with the bad rows.
    """

    messages: tuple[Message, ...]
    row: int

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


def open_rows(
    where: Place, source: Source, watch: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Format | None, Raw]:
    """Return the format of a source's rows, and all rows.

    A file without a single object has no format (``None``): all its rows are bad. ``where`` is the
    place of the source in errors.

    Raises
    ------
    DataError
        If there is no row, or if the rows have no known format.
    """
    records = raw_rows(where, source, watch)
    first: list[tuple[str, Unread]] = []
    whole: list[Row] = []  # enough rows to detect the format
    while len(whole) < PROBED and len(first) < MOST_PROBED and (record := next(records, None)):
        first.append(record)
        if not isinstance(row := parse(record[1], source.fields), BadRow):
            whole.append(row)
    require(
        first,
        "no-rows",
        f"{source.path} has no rows",
        place=(*where, "path"),
        hint="replace the file, or remove the source",
        error=DataError,
    )
    form = (
        FORMATS[source.format]
        if source.format != "auto"
        else _detect_format(where, source, whole)
        if whole
        else None
    )
    return form, itertools.chain(first, records)


def example_of(row: Unread, number: int, form: Format | None, source: Source) -> Example:
    """Return a row as a conversation. Raise BadRow if it is not a conversation."""
    row = parse(row, source.fields)
    if form is None or isinstance(row, BadRow):
        raise row if isinstance(row, BadRow) else BadRow("it has no known format")
    return Example(_replace_answers(form.read(row), source.completion), number)


def check_bad(
    where: Place, source: Source, form: Format | None, bad: int, some: Sequence[str], total: int
) -> None:
    """Raise DataError for more ``bad`` rows than the source allows, or if no row is left.

    The message names the rows in ``some``.
    """
    if bad <= source.max_bad_rows and bad < total:
        return
    shape = f" as {form.name!r}" if form else ""
    lines = [
        f"{bad} of {total} rows of {source.path} cannot be read{shape}, but "
        f"max_bad_rows={source.max_bad_rows}"
        if bad < total
        else f"none of the {total} rows of {source.path} can be read{shape}"
    ]
    lines += [f"{form.name}: {form.looks}"] if form else []
    lines += some[:SHOWN]
    lines += [f"… and {bad - SHOWN} more"] if bad > SHOWN else []
    hint = (
        f"correct these rows, or skip them with max_bad_rows = {bad} or more"
        if bad < total
        else f'correct the file, set format = "auto", or set {OWN_NAMES}'
    )
    raise DataError("wrong-row", "\n".join(lines), place=(*where, "path"), hint=hint)


def _detect_format(where: Place, source: Source, rows: list[Row]) -> Format:
    if (form := detect(rows)) is not None:
        return form
    keys = list(dict.fromkeys(str(key) for row in rows for key in row))
    known = [f"  {form.name}: {form.looks}" for form in FORMATS.values()]
    raise DataError(
        "wrong-format",
        f"the rows of {source.path} have no known format: their fields are "
        f"{', '.join(keys) or '(none)'}",
        place=(*where, "path"),
        hint="\n".join(
            [
                f"set {OWN_NAMES}, or set format to see which fields a row lacks",
                "available formats:",
                *known,
            ]
        ),
    )


def _replace_answers(messages: tuple[Message, ...], completion: str | None) -> tuple[Message, ...]:
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


def select_rows(where: Place, have: int, source: Source) -> Tensor:
    """Return the positions, among ``have`` valid rows, that the source selects, in its order."""
    skip = source.skip
    needed = skip + (source.rows or 1)
    require(
        needed <= have,
        "too-few-rows",
        f"skip={skip} and rows={source.rows or 'all'} require {needed} rows, but {source.path} has "
        f"{have} valid rows",
        place=(*where, "skip" if source.rows is None else "rows"),
        hint=f"decrease skip and rows to at most {have} rows in total",
        error=DataError,
    )
    if source.shuffle_seed is None:
        return torch.arange(skip, have if source.rows is None else skip + source.rows)
    order = torch.randperm(have, generator=Key(source.shuffle_seed).fold("rows").generator())
    return order[skip : None if source.rows is None else skip + source.rows]


def content(name: str, source: Source) -> str:
    """Return an identifier of the rows before ``source`` selects a part.

    It is the sha256 of the file (for several files: of their digests).
    """
    place = (name, "path")
    with reading(source.path, place):
        digests = [file_digest(file) for file in files_at(source.path, place)]
    return digests[0] if len(digests) == 1 else digest(*digests)
