"""The rows of a source before any becomes tokens: which there are, which are good, and what they
have in common with others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
from attrs import frozen
from torch import Tensor

from hgms_core import Place
from hgms_mix.lm.files import Unread
from hgms_mix.lm.formats import FORMATS, BadRow
from hgms_mix.lm.parts import in_parts, together
from hgms_mix.lm.sources import (
    SHOWN,
    Example,
    Source,
    begun,
    check_bad,
    chosen,
    content,
    example_of,
)
from hgms_mix.lm.store import load, locked, save
from hgms_mix.lm.table import Report

VERSION = 1
"""Of what an index holds of a row."""

Record = tuple[int, str, Unread]
"""A row's number, where it stands, and what was read."""


@final
@frozen(eq=False)
class Index:
    """The rows that a source takes and that have an answer, in its order: their ``rows`` (numbers
    in the source, counted with the bad ones), ``keys`` (64-bit digests of normalised prompts) and
    ``whole`` (of prompt and answer); and what was left out.

    >>> index_of(
    ...     "s", Source(path="$HGMS_DATA/gsm8k/train.jsonl.gz", rows=10)
    ... ).size  # doctest: +SKIP
    10
    """

    rows: np.ndarray
    keys: np.ndarray
    whole: np.ndarray
    report: Report

    @property
    def size(self) -> int:
        return len(self.rows)


def key_of(prompt: str) -> int:
    """A 64-bit digest of a normalised prompt: among n prompts two different ones share it with
    probability n²/2⁶⁵.
    """
    digest = hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def whole_of(example: Example) -> int:
    """The same of a whole conversation."""
    return key_of(
        repr([(message.role, message.text, message.context) for message in example.messages])
    )


@frozen
class _Scan:
    """Reads rows, and keeps of each no more than its numbers."""

    types: ClassVar[Mapping[str, str]] = {
        "rows": "int64",
        "keys": "int64",
        "whole": "int64",
        "blank": "bool",
    }
    form: str | None
    completion: str | None

    def __call__(self, rows: Sequence[Record]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        form = None if self.form is None else FORMATS[self.form]
        read = []
        bad = []
        for number, place, row in rows:
            try:
                example = example_of(row, number, form, self.completion)
            except BadRow as error:
                bad.append(f"{place}: {error}")
            else:
                read.append((number, key_of(example.key), whole_of(example), example.blank))
        columns = list(zip(*read, strict=True)) or [()] * 4
        arrays = {
            name: np.array(column, dtype)
            for (name, dtype), column in zip(self.types.items(), columns, strict=True)
        }
        return arrays, {"total": len(rows), "bad": len(bad), "shown": bad[:SHOWN]}


def index_of(name: str, source: Source, cache_dir: str | Path | None = None) -> Index:
    """The index of ``source``, from ``cache_dir`` where it was made before. Cost: one pass over the
    file, about 15 µs of a core a row; memory: 25 bytes a row (on disk with ``cache_dir``), and what
    is under way.

    Errors: those of :func:`~hgms_mix.lm.sources.read`.
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
    folder = None if cache_dir is None else Path(cache_dir).expanduser()
    path = (
        None
        if folder is None
        else folder / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()}.index"
    )
    with contextlib.nullcontext() if path is None else locked(path):
        stored = None if path is None else load(path, _Scan.types, "index", about)
        if stored is None or stored[1]["bad"] > source.max_bad_rows:
            stored = _scanned(name, where, source, path, about)
    tensors, facts = stored
    arrays = {leaf: tensor.numpy() for leaf, tensor in tensors.items()}
    taken = chosen(where, len(arrays["rows"]), source).numpy()
    kept = taken[~arrays["blank"][taken]]
    report = Report(
        format=facts["detected"],
        total=facts["total"],
        bad=facts["bad"],
        examples=len(taken),
        blank=len(taken) - len(kept),
    )
    if len(kept) == len(arrays["rows"]) and source.shuffle_seed is None:
        # all of them: they stay where they are
        return Index(arrays["rows"], arrays["keys"], arrays["whole"], report)
    return Index(arrays["rows"][kept], arrays["keys"][kept], arrays["whole"][kept], report)


def _scanned(
    name: str, where: Place, source: Source, path: Path | None, about: Mapping[str, Any]
) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    folder = None if path is None else path.with_suffix(".rows")
    with meter(f"reading {name}", "B") as bar:

        def watch(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        form, records = begun(where, source, watch)
        numbered = ((number, place, row) for number, (place, row) in enumerate(records))
        parts = in_parts(
            numbered, _Scan(form.name if form else None, source.completion), folder=folder
        )
    total, bad = (sum(part.about[what] for part in parts) for what in ("total", "bad"))
    check_bad(
        where, source, form, bad, [line for part in parts for line in part.about["shown"]], total
    )
    leaves = {array: together(parts, array) for array in _Scan.types}
    facts = {**about, "detected": form.name if form else "", "total": total, "bad": bad}
    # the index of a small file is made faster than found
    if path is None or folder is None or not folder.is_dir():
        return {name: leaf.tensor() for name, leaf in leaves.items()}, facts
    stored = save(path, leaves, _Scan.types, "index", facts)
    shutil.rmtree(folder, ignore_errors=True)
    return stored, facts


def records_at(
    where: Place, source: Source, numbers: np.ndarray
) -> tuple[str | None, Iterator[Record]]:
    """The name of the source's format, and the rows with these numbers (ascending); others are
    passed over unparsed.
    """
    form, records = begun(where, source)

    def wanted() -> Iterator[Record]:
        following = map(int, numbers)
        number = next(following, None)
        for at, (place, row) in enumerate(records):
            if number is None:
                return
            if at == number:
                yield at, place, row
                number = next(following, None)

    return None if form is None else form.name, wanted()


def examples_at(name: str, source: Source, numbers: np.ndarray) -> Iterator[Example]:
    """The good rows of ``source`` with these numbers (ascending)."""
    form, records = records_at((name,), source, numbers)
    for number, _, row in records:
        yield example_of(row, number, FORMATS[form] if form else None, source.completion)


def meter(title: str, unit: str, total: int | None = None) -> Any:
    """A line on a terminal with the time left, once something takes more than two seconds."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    return tqdm(
        desc=title, unit=unit, total=total, unit_scale=True, delay=2, disable=None, leave=False
    )
