"""Rows of a run as columns.

A column is an array of a named field over every line of a ``.jsonl`` file.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hgms.store import ROWS, read_file
from hgms_core.errors import CheckpointError


def read_columns(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read the named fields of all complete lines as arrays.

    An array is float64, or an object array if any value is a string. A value is NaN if a line lacks
    the field or the value is not a finite number.

    Raises
    ------
    CheckpointError
        a line other than the last is not valid JSON, or the path is not a regular file.
    """
    return {
        name: _array(column) for name, column in zip(names, _lists(path, tuple(names)), strict=True)
    }


def _lists(path: Path, wanted: tuple[str, ...]) -> list[list[Any]]:
    """Return one list of values per wanted field, over all complete lines."""
    if not os.path.lexists(path):
        return [[] for _ in wanted]
    data = read_file(path, ROWS)
    data = data[: data.rfind(b"\n") + 1]  # a kill during an append leaves an incomplete line
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


def _array(column: list[Any]) -> np.ndarray:
    if any(isinstance(value, str) for value in column):
        return np.array(
            [value if isinstance(value, str) else None for value in column], dtype=object
        )
    most = sys.float_info.max  # an integer may have hundreds of digits
    numbers = [
        float(value) if isinstance(value, int | float) and -most <= value <= most else math.nan
        for value in column
    ]
    return np.array(numbers)
