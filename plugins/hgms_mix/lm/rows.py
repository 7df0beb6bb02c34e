"""The rows of a source before tokenisation.

This module determines the row numbers, the valid rows, and the rows shared with other sources.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from attrs import frozen

from hgms.store import Folder, cache_folder, json_digest, short_number
from hgms_core.errors import Place
from hgms_mix.lm.examples import (
    SHOWN,
    Example,
    check_bad,
    content,
    example_of,
    open_rows,
    select_rows,
)
from hgms_mix.lm.files import Unread
from hgms_mix.lm.formats import BadRow, Format
from hgms_mix.lm.parts import compute_parts
from hgms_mix.lm.sources import Source
from hgms_mix.lm.store import load, lock, save
from hgms_mix.lm.table import Report
from hgms_mix.lm.templates import one_answer_each

VERSION = 4
"""Version of the index format."""

ANSWERS = 1000
"""Numbers per conversation, if each answer is a row.

Answer n of row r (both counted from 0) has the number 1000 r + n.
"""

Record = tuple[int, str, Unread]
"""A row's number, its location, and its raw contents."""


@final
@frozen(eq=False)
class Index:
    """The rows that a source selects and that have an answer, in its order.

    ``rows`` are row numbers in the source (bad rows count), and ``keys`` 64-bit digests of
    normalised prompts. ``report`` counts the skipped rows. If conversations are ``split``, each
    answer is a row, with the number 1000 · (number of the conversation) + (number of the answer).

    Examples
    --------
    >>> index_of(
    ...     "s", Source(path="$HGMS_DATA/gsm8k/train.jsonl.gz", rows=10)
    ... ).size  # doctest: +SKIP
    10
    """

    rows: np.ndarray
    keys: np.ndarray
    report: Report

    @property
    def size(self) -> int:
        return len(self.rows)


def answers_of(example: Example) -> list[Example]:
    """Return one row per learned answer of a conversation.

    Each row contains the answer and all earlier turns.

    Raises
    ------
    BadRow
        For more than 1000 answers.
    """
    parts = one_answer_each(example.messages)
    if len(parts) > ANSWERS:
        raise BadRow(f"it has {len(parts)} answers, but at most {ANSWERS} are supported")
    first = example.row * ANSWERS
    return [Example(messages, number) for number, messages in enumerate(parts, first)]


def numbered_example(
    row: Unread, number: int, form: Format | None, source: Source, split: bool
) -> Example:
    """Return the row with this number, or, if conversations are ``split``, its answer."""
    if not split:
        return example_of(row, number, form, source)
    conversation, answer = divmod(number, ANSWERS)
    return answers_of(example_of(row, conversation, form, source))[answer]


TYPES = {"rows": "int64", "keys": "int64", "blank": "bool"}
"""The stored arrays of an index, and their types."""


def index_of(
    name: str, source: Source, cache_dir: Path | None = None, *, split: bool = False
) -> Index:
    """Build the index of ``source``, or load it from ``cache_dir`` (None: the user's cache).

    ``split``: each answer of a conversation is a row. Cost: one pass over the file, about 15 µs of
    a core per row; 17 bytes per row on disk, and the rows in progress in memory.

    Raises
    ------
    DataError
        For a source that cannot be read, or has too many bad rows.
    """
    about = {
        "index": VERSION,
        "content": content(name, source),
        "format": source.format,
        "completion": source.completion,
        "fields": dict(source.fields or {}),
        "split": split,
    }
    key = json_digest(about)
    folder = Folder((cache_dir or cache_folder()) / key, key)
    with lock(folder):
        stored = load(folder, TYPES)
        if stored is None or stored[1]["bad"] > source.max_bad_rows:
            stored = _scan_source(name, source, split)
            save(folder, TYPES, *stored)
    arrays, facts = stored
    taken = _select((name,), arrays["rows"], source, split)
    kept = taken[~arrays["blank"][taken]]
    report = Report(
        format=facts["detected"],
        total=facts["total"],
        bad=facts["bad"],
        examples=len(taken),
        blank=len(taken) - len(kept),
    )
    if len(kept) == len(arrays["rows"]) and source.shuffle_seed is None:
        # All rows are selected: the arrays stay mapped.
        return Index(arrays["rows"], arrays["keys"], report)
    return Index(arrays["rows"][kept], arrays["keys"][kept], report)


def _select(where: Place, rows: np.ndarray, source: Source, split: bool) -> np.ndarray:
    """Return the positions of the valid rows that the source selects, in its order.

    Conversations are not divided: two parts of a file do not share any.
    """
    if not split:
        return select_rows(where, len(rows), source).numpy()
    conversations, first, counts = np.unique(rows // ANSWERS, return_index=True, return_counts=True)
    order = select_rows(where, len(conversations), source).numpy()
    ranges = [np.arange(first[at], first[at] + counts[at]) for at in order]
    return np.concatenate([np.zeros(0, np.int64), *ranges])


def _scan_source(
    name: str, source: Source, split: bool
) -> tuple[dict[str, np.ndarray], Mapping[str, Any]]:
    where = (name,)
    with meter(f"reading {name}", "B") as bar:

        def watch(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        form, records = open_rows(where, source, watch)
        numbered = ((number, place, row) for number, (place, row) in enumerate(records))
        work = functools.partial(_scan_rows, form=form, source=source, split=split)
        arrays, parts = compute_parts(numbered, work, TYPES)
    total, bad = (sum(part[what] for part in parts) for what in ("count", "bad"))
    check_bad(where, source, form, bad, [line for part in parts for line in part["shown"]], total)
    return arrays, {"detected": form.name if form else "", "total": total, "bad": bad}


def _scan_rows(
    rows: Sequence[Record], *, form: Format | None, source: Source, split: bool
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read rows, and keep only the numbers of each."""
    read = []
    bad = []
    for number, place, row in rows:
        try:
            example = example_of(row, number, form, source)
            examples = answers_of(example) if split else [example]
        except BadRow as error:
            bad.append(f"{place}: {error}")
        else:
            read += [(one.row, short_number(one.key.encode()), one.blank) for one in examples]
    columns = list(zip(*read, strict=True)) or [()] * 3
    arrays = {
        name: np.array(column, dtype)
        for (name, dtype), column in zip(TYPES.items(), columns, strict=True)
    }
    return arrays, {"bad": len(bad), "shown": bad[:SHOWN]}


def records_at(
    where: Place, source: Source, numbers: np.ndarray, *, split: bool = False
) -> tuple[Format | None, Iterator[Record]]:
    """Return the source's format, and the rows with these numbers (ascending).

    Other rows are skipped without parsing. A conversation that is ``split`` is returned once per
    answer.
    """
    form, records = open_rows(where, source)

    def select() -> Iterator[Record]:
        following = map(int, numbers)
        number = next(following, None)
        for at, (place, row) in enumerate(records):
            while number is not None and at == (number // ANSWERS if split else number):
                yield number, place, row
                number = next(following, None)
            if number is None:
                return

    return form, select()


def examples_at(
    name: str, source: Source, numbers: np.ndarray, *, split: bool = False
) -> Iterator[Example]:
    """Yield the valid rows of ``source`` with these numbers (ascending)."""
    form, records = records_at((name,), source, numbers, split=split)
    for number, _, row in records:
        yield numbered_example(row, number, form, source, split)


def meter(title: str, unit: str, total: int | None = None) -> Any:
    """Return a progress bar with the remaining time.

    It appears on a terminal if the work takes more than two seconds.
    """
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    return tqdm(
        desc=title, unit=unit, total=total, unit_scale=True, delay=2, disable=None, leave=False
    )
