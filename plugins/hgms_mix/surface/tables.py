"""`ratios.csv` and `metrics.csv`, in the format of olmix.

Both have one row per run, and are joined by the column `run`.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from hgms.store import replace_file
from hgms_core.errors import DataError

IDS = ("run", "run_id")
OTHER = (*IDS, "name", "index")
REPORTED = "test_"
"""Metrics with this prefix never decide."""


@frozen(kw_only=True, eq=False)
class Runs:
    """Finished runs: their names, the shares of their sources, ``[N, S]``, and their metrics;
    lower is better.
    """

    names: tuple[str, ...]
    sources: tuple[str, ...]
    mixtures: np.ndarray
    metrics: Mapping[str, np.ndarray]

    @property
    def deciding(self) -> list[str]:
        """The metrics that may decide: all except the metrics of test sets."""
        return [name for name in self.metrics if not name.startswith(REPORTED)]

    def only(self, which: np.ndarray) -> Runs:
        """Return the runs that a mask selects."""
        return Runs(
            names=tuple(name for name, chosen in zip(self.names, which, strict=True) if chosen),
            sources=self.sources,
            mixtures=self.mixtures[which],
            metrics={name: values[which] for name, values in self.metrics.items()},
        )


def write_runs(runs: Runs, ratios: Path, metrics: Path) -> None:
    """Write both files. Reading them returns exactly the same numbers."""
    ids = [(run, run, number) for number, run in enumerate(runs.names)]
    rows = [[*head, *mixture] for head, mixture in zip(ids, runs.mixtures.tolist(), strict=True)]
    _write(ratios, ["run", "name", "index", *runs.sources], rows)
    columns = [runs.metrics[name].tolist() for name in runs.metrics]
    rows = [[*head, *values] for head, values in zip(ids, zip(*columns, strict=True), strict=True)]
    _write(metrics, ["run", "name", "index", *runs.metrics], rows)


def read_runs(ratios: Path, metrics: Path, say: Callable[[str], None] = lambda line: None) -> Runs:
    """Return the runs that are in both files, in the order of the ratios.

    As in olmix, the identifying column is ``run`` or ``run_id``; ``name``, ``index`` and unnamed
    columns are ignored. Every other column of ratios is a source, and every other column of metrics
    is a metric. Shares sum to 1 within 0.01. A run that is missing in one file, or lacks a metric,
    is excluded; ``say`` receives the number of excluded runs.

    Raises
    ------
    DataError
        a file is not such a table; the error names the line.
    """
    id_of_ratios, sources, shares = _read(ratios, "a source")
    id_of_metrics, names, values = _read(metrics, "a metric")
    if len(sources) < 2:
        raise DataError(
            "missing-column",
            f"a mixture requires at least 2 sources, but the file has {len(sources)}",
            place=(str(ratios),),
        )
    for run, row in shares.items():
        if (
            not all(math.isfinite(share) and share >= 0 for share in row)
            or abs(sum(row) - 1) > 0.01
        ):
            raise DataError(
                "wrong-row",
                f"the shares of run {run!r} must be at least 0 and sum to 1 within 0.01, but sum "
                f"to {sum(row):.4g}",
                place=(str(ratios),),
            )
    common = [
        run
        for run in shares
        if run in values and all(math.isfinite(value) for value in values[run])
    ]
    if not common:
        raise DataError(
            "no-rows",
            f"no {id_of_ratios} in {ratios} has a {id_of_metrics} with all metrics",
            place=(str(metrics),),
        )
    if others := (shares.keys() | values.keys()) - set(common):
        some = ", ".join(sorted(others)[:3]) + (", …" if len(others) > 3 else "")
        say(
            f"{len(others)} of {len(others) + len(common)} runs are not in both files with all "
            f"metrics, and are skipped: {some}"
        )
    mixtures = np.array([shares[run] for run in common])
    table = np.array([values[run] for run in common])
    return Runs(
        names=tuple(common),
        sources=tuple(sources),
        mixtures=mixtures / mixtures.sum(1, keepdims=True),
        metrics={name: table[:, number] for number, name in enumerate(names)},
    )


def _read(path: Path, what: str) -> tuple[str, list[str], dict[str, list[float]]]:
    """Return the identifying column, the names of the other columns, and their values by run.

    An empty cell is NaN.
    """
    rows = _rows(path)
    header = [name.strip() for name in rows[0]] if rows else []
    key = next((name for name in IDS if name in header), None)
    if key is None:
        raise DataError(
            "missing-column",
            f"the file has no column 'run' or 'run_id' (columns: {', '.join(header) or 'none'})",
            place=(str(path),),
        )
    columns = [
        i
        for i, name in enumerate(header)
        if name not in OTHER and name and not name.startswith("Unnamed")
    ]
    if not columns:
        raise DataError(
            "missing-column",
            f"the file has no column for {what} (columns: {', '.join(header)})",
            place=(str(path),),
        )
    if repeated := [
        name for name, count in Counter(header[i] for i in columns).items() if count > 1
    ]:
        raise DataError(
            "duplicate-name", f"two columns have the name {repeated[0]!r}", place=(str(path),)
        )
    values: dict[str, list[float]] = {}
    for number, row in enumerate(rows[1:], start=2):
        if not any(cell.strip() for cell in row):
            continue
        if len(row) != len(header):
            raise DataError(
                "wrong-row",
                f"the row has {len(row)} cells, but the header has {len(header)}",
                place=(str(path), number),
            )
        run = row[header.index(key)]
        if run in values:
            raise DataError(
                "duplicate-name", f"two rows have the run {run!r}", place=(str(path), number)
            )
        values[run] = [_number(row[i], path, number, header[i]) for i in columns]
    return key, [header[i] for i in columns], values


def _rows(path: Path) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(path.read_text(encoding="utf-8-sig"))))
    except FileNotFoundError:
        raise DataError("missing-file", "the file does not exist", place=(str(path),)) from None
    except OSError as error:
        raise DataError(
            "unreadable-file", f"the file cannot be read: {error.strerror}", place=(str(path),)
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            "wrong-format", f"the file is not a CSV file in UTF-8: {error}", place=(str(path),)
        ) from None


def _number(cell: str, path: Path, line: int, column: str) -> float:
    try:
        return float(cell) if cell.strip() else math.nan
    except ValueError:
        raise DataError(
            "wrong-row",
            f"{cell!r} in the column {column!r} is not a number",
            place=(str(path), line),
        ) from None


def _write(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows([header, *rows])
    replace_file(path, buffer.getvalue().encode())
