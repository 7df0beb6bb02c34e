"""The rows of a run by column: their values, and rows that no run wrote."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.helpers import rejects
from support.run_folders import write_run

from hgms.results import StoredRun, read_run
from hgms_core.errors import CheckpointError

DEEP = "[" * 100_000


def lines(name: str, *values: object) -> str:
    rows = [json.dumps({"step": step, name: value}) for step, value in enumerate(values)]
    return "\n".join(rows) + "\n"


def run_of(folder: Path, text: str, name: str = "steps.jsonl") -> StoredRun:
    return read_run(write_run(folder, files={name: text}))


def test_columns_of_complete_lines(tmp_path: Path) -> None:
    row = {"outcome": "converged", "residual": [0.1, 0.3], "metric.value": 0.5}
    rows = [{"step": 0, "metric.value": 1}, *({"step": n, "gap": n / 8, **row} for n in (1, 2, 3))]
    killed = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "gap": 0'
    names = ["seconds", "gap", "outcome", "residual", "metric.value", "nobody"]
    columns = run_of(tmp_path, killed).columns(names)
    assert list(columns) == ["step", *names]
    expected = {
        "step": [0, 1, 2, 3],
        "seconds": [0, 0.25, 0.5, 0.75],
        "gap": [np.nan, 1 / 8, 2 / 8, 3 / 8],
        "residual": [np.nan] * 4,
        "nobody": [np.nan] * 4,
    }
    np.testing.assert_equal({name: columns[name] for name in expected}, expected)
    assert columns["outcome"].tolist() == [None, "converged", "converged", "converged"]


@pytest.mark.parametrize(
    ("file", "text", "name", "expected"),
    [
        # a step without its time has none
        (
            "timings.jsonl",
            '{"step": 0, "seconds": 0.0}\n{"step": 2, "seconds": 0.5}\n',
            "seconds",
            [0, np.nan, 0.5, np.nan],
        ),
        # the fast reader takes no such names
        *(
            ("steps.jsonl", lines(name, 0, 0.25, 0.5), name, [0, 0.25, 0.5])
            for name in ('weight.a"b', "weight.a\\b", "weight.a\nb", "weight.a\x01b")
        ),
        # words that look like numbers are words
        ("steps.jsonl", lines("outcome", "0", "1", "2"), "outcome", ["0", "1", "2"]),
    ],
)
def test_columns_of_any_name_and_with_gaps(
    tmp_path: Path, file: str, text: str, name: str, expected: list[Any]
) -> None:
    np.testing.assert_equal(run_of(tmp_path, text, file).columns([name])[name].tolist(), expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1e999", math.nan),
        ("9" * 400, math.nan),
        ("9" * 4000, math.nan),
        ("[1, 3]", math.nan),
        ("{}", math.nan),
        ("[]", math.nan),
        ("1e308", 1e308),
    ],
)
@pytest.mark.parametrize("everywhere", [True, False])
def test_odd_values_in_rows_are_numbers_or_not_finite(
    tmp_path: Path, value: str, expected: float, everywhere: bool
) -> None:
    values = [value if everywhere or step == 1 else 0.5 for step in range(3)]
    text = "".join(f'{{"step": {step}, "gap": {gap}}}\n' for step, gap in enumerate(values))
    column = run_of(tmp_path, text).columns(["gap"])["gap"]
    assert column.dtype == float
    np.testing.assert_array_equal(column, [expected] * 3 if everywhere else [0.5, expected, 0.5])


@pytest.mark.parametrize(
    ("name", "text", "code", "place"),
    [
        ("steps.jsonl", '{"step": 0}\n{"step": 1, "gap"\n{"step": 2}\n', "damaged-file", (2,)),
        ("steps.jsonl", '{"step": 0}\n' + DEEP + "\n", "damaged-file", (2,)),
    ],
)
def test_rows_that_no_run_wrote_are_refused(
    tmp_path: Path, name: str, text: str, code: str, place: tuple[str | int, ...]
) -> None:
    run = run_of(tmp_path, text, name)
    with rejects(code, name, *place, of=CheckpointError):
        run.columns(["seconds", "oracle_calls"])
