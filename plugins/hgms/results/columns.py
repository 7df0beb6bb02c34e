"""The rows of a run as columns: the named fields of every line of a ``.jsonl`` file, as arrays.

msgspec reads them where it is installed: ten times as fast as the standard library, which counts in
a table of a million rows.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hgms.runs import ROWS, is_stamped, opened, read_file
from hgms_core.errors import CheckpointError


def read_columns(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The named fields of all complete lines: float64 (NaN where a line lacks it or it is not
    finite), or objects where any is a string. A list of numbers counts by its largest.

    Raises:
        CheckpointError: a line other than the last is not valid JSON, or the file is no regular
            file.
    """
    return {
        name: _array(column) for name, column in zip(names, _lists(path, tuple(names)), strict=True)
    }


def last_seconds(path: Path) -> float:
    """The clock in the last complete line of a file of timings; NaN if there is none, or it does
    not match its crc32.
    """
    try:
        with opened(path, ROWS) as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(-min(stream.tell(), 512), os.SEEK_CUR)
            lines = stream.read().split(b"\n")
        if not is_stamped(lines[-2]):
            return float("nan")
        return _worst(json.loads(lines[-2]).get("seconds"))
    except (CheckpointError, ValueError, IndexError, AttributeError, RecursionError):
        return float("nan")


def _lists(path: Path, wanted: tuple[str, ...]) -> list[list[Any]]:
    """The wanted fields of all complete lines, a list each."""
    if not os.path.lexists(path):
        return [[] for _ in wanted]
    data = read_file(path, ROWS)
    data = data[: data.rfind(b"\n") + 1]  # a kill while appending leaves half a line
    decoder = _decoder(wanted)
    if decoder is not None:
        import msgspec

        try:
            rows = decoder.decode_lines(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # the plain reader says which line, or copes with a type that is not expected
        else:
            return [
                list(column) for column in zip(*map(msgspec.structs.astuple, rows), strict=True)
            ] or [[] for _ in wanted]
    columns: list[list[Any]] = [[] for _ in wanted]
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            values = [row.get(name) for name in wanted]
        except (ValueError, AttributeError, RecursionError):
            raise CheckpointError(
                "damaged-file", "the line is not valid JSON", place=(path.name, number)
            ) from None
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    return columns


@functools.lru_cache(maxsize=64)
def _decoder(wanted: tuple[str, ...]) -> Any:
    """A decoder that keeps the wanted fields and steps over the others; None without msgspec, or
    for names it does not take (with quotes or backslashes)."""
    try:
        import msgspec
    except ModuleNotFoundError:
        return None
    value = float | str | bool | list[Any] | None
    fields = [
        (f"f{i}", value, msgspec.field(default=None, name=name)) for i, name in enumerate(wanted)
    ]
    try:
        return msgspec.json.Decoder(msgspec.defstruct("Row", fields, gc=False))
    except ValueError:
        return None


def _array(column: list[Any]) -> np.ndarray:
    kinds = set(map(type, column))
    if str in kinds:
        return np.array(
            [value if isinstance(value, str) else None for value in column], dtype=object
        )
    try:
        numbers = np.array(
            column
            if kinds <= {float, int, bool, type(None)}
            else [_worst(value) for value in column],
            dtype=float,
        )
    except OverflowError:  # a whole number of hundreds of digits
        numbers = np.array([_worst(value) for value in column], dtype=float)
    numbers[np.isinf(numbers)] = np.nan
    return numbers


def _worst(value: Any) -> float:
    """The number, or the largest of a list of them; NaN where there is none that is finite."""
    known = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += item
        elif isinstance(item, int | float) and -sys.float_info.max <= item <= sys.float_info.max:
            known.append(float(item))
    return max(known, default=float("nan"))
