"""The rows of a source before tokenisation.

This module determines the row numbers, the valid rows, and the rows shared with other sources.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
from attrs import frozen

from hgms.config import expand
from hgms.store import Folder, digest, short_number
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
from hgms_mix.lm.formats import FORMATS, BadRow
from hgms_mix.lm.parts import compute_parts
from hgms_mix.lm.sources import Source
from hgms_mix.lm.store import load, lock, save
from hgms_mix.lm.table import Report

VERSION = 3
"""Version of the index format."""

Record = tuple[int, str, Unread]
"""A row's number, its location, and its raw contents."""


@final
@frozen(eq=False)
class Index:
    """The rows that a source selects and that have an answer, in its order.

    ``rows`` are row numbers in the source (bad rows count), and ``keys`` 64-bit digests of
    normalised prompts. ``report`` counts the skipped rows.

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


def key_of(prompt: str) -> int:
    """Return a 64-bit digest of a normalised prompt.

    Among n prompts, two different prompts have equal digests with probability n²/2⁶⁵.
    """
    return short_number(prompt.encode("utf-8", "surrogatepass"))


@frozen
class _Scan:
    """Read rows, and keep only the numbers of each."""

    types: ClassVar[Mapping[str, str]] = {"rows": "int64", "keys": "int64", "blank": "bool"}
    form: str | None
    source: Source

    def __call__(self, rows: Sequence[Record]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        form = None if self.form is None else FORMATS[self.form]
        read = []
        bad = []
        for number, place, row in rows:
            try:
                example = example_of(row, number, form, self.source)
            except BadRow as error:
                bad.append(f"{place}: {error}")
            else:
                read.append((number, key_of(example.key), example.blank))
        columns = list(zip(*read, strict=True)) or [()] * 3
        arrays = {
            name: np.array(column, dtype)
            for (name, dtype), column in zip(self.types.items(), columns, strict=True)
        }
        return arrays, {"bad": len(bad), "shown": bad[:SHOWN]}


def index_of(name: str, source: Source, cache_dir: str | Path | None = None) -> Index:
    """Build the index of ``source``, or load it from ``cache_dir``.

    Cost: one pass over the file, about 15 µs of a core per row; memory: 17 bytes per row (on disk
    with ``cache_dir``), and the rows in progress.

    Raises
    ------
    DataError
        For a source that cannot be read, or has too many bad rows.
    """
    where = (name,)
    about = {
        "index": VERSION,
        "content": content(name, source),
        "format": source.format,
        "completion": source.completion,
    }
    if source.fields:
        about["fields"] = dict(source.fields)
    folder = None
    if cache_dir is not None:
        key = digest(json.dumps(about))
        folder = Folder(expand(str(cache_dir), ("cache_dir",)) / key, key)
    with contextlib.nullcontext() if folder is None else lock(folder):
        stored = None if folder is None else load(folder, _Scan.types)
        if stored is None or stored[1]["bad"] > source.max_bad_rows:
            stored = _scan_source(name, where, source, folder)
    arrays, facts = stored
    taken = select_rows(where, len(arrays["rows"]), source).numpy()
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


def _scan_source(
    name: str, where: Place, source: Source, folder: Folder | None
) -> tuple[dict[str, np.ndarray], Mapping[str, Any]]:
    with meter(f"reading {name}", "B") as bar:

        def watch(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        form, records = open_rows(where, source, watch)
        numbered = ((number, place, row) for number, (place, row) in enumerate(records))
        scan = _Scan(form.name if form else None, source)
        arrays, parts = compute_parts(numbered, scan)
    total, bad = (sum(part[what] for part in parts) for what in ("count", "bad"))
    check_bad(where, source, form, bad, [line for part in parts for line in part["shown"]], total)
    facts = {"detected": form.name if form else "", "total": total, "bad": bad}
    if folder is not None:
        save(folder, _Scan.types, arrays, facts)
    return arrays, facts


def records_at(
    where: Place, source: Source, numbers: np.ndarray
) -> tuple[str | None, Iterator[Record]]:
    """Return the name of the source's format, and the rows with these numbers (ascending).

    Other rows are skipped without parsing.
    """
    form, records = open_rows(where, source)

    def select() -> Iterator[Record]:
        following = map(int, numbers)
        number = next(following, None)
        for at, (place, row) in enumerate(records):
            while number is not None and at == number:
                yield number, place, row
                number = next(following, None)
            if number is None:
                return

    return None if form is None else form.name, select()


def examples_at(name: str, source: Source, numbers: np.ndarray) -> Iterator[Example]:
    """Yield the valid rows of ``source`` with these numbers (ascending)."""
    name_of_form, records = records_at((name,), source, numbers)
    form = FORMATS[name_of_form] if name_of_form else None
    for number, _, row in records:
        yield example_of(row, number, form, source)


def meter(title: str, unit: str, total: int | None = None) -> Any:
    """Return a progress bar with the remaining time.

    It appears on a terminal if the work takes more than two seconds.
    """
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    return tqdm(
        desc=title, unit=unit, total=total, unit_scale=True, delay=2, disable=None, leave=False
    )
