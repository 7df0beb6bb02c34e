"""Files with rows for sources of text, as users have them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hgms_mix.lm.examples import Example
from hgms_mix.lm.sources import Source


def lines(path: Path, rows: Sequence[Any]) -> Path:
    """One row a line; text and bytes as they are. Compressed where the name ends so."""
    data = b"".join(
        (row if isinstance(row, bytes) else row.encode() if isinstance(row, str) else _json(row))
        + b"\n"
        for row in rows
    )
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def _json(value: Any, **options: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, **options).encode()


def array(path: Path, rows: Sequence[Any]) -> Path:
    """A JSON array."""
    data = _json(rows, indent=1)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def parquet(path: Path, rows: Sequence[Any]) -> Path:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    plain = path.with_suffix("") if path.suffix == ".gz" else path
    pq.write_table(pa.Table.from_pylist(rows), plain)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(plain.read_bytes()))
    return path


def zstandard(path: Path, rows: Sequence[Any]) -> Path:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    with pa.output_stream(str(path), compression="zstd") as stream:
        stream.write(lines(path.with_suffix(""), rows).read_bytes())
    return path


def source_of(path: Path, rows: Sequence[Any], /, **fields: Any) -> Source:
    """A source of a file of lines; pairs are prompts and completions."""
    whole = [
        {"prompt": row[0], "completion": row[1]} if isinstance(row, tuple) else row for row in rows
    ]
    return Source(path=str(lines(path, whole)), **fields)


def turns(*texts: str | None, **last: Any) -> list[dict[str, Any]]:
    """Turns of user and assistant, with further keys of the last one."""
    listed = [
        {"role": "assistant" if number % 2 else "user", "content": text}
        for number, text in enumerate(texts)
    ]
    return [*listed[:-1], {**listed[-1], **last}]


def words(example: Example) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in example.messages]
