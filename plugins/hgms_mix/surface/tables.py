"""`ratios.csv` and `metrics.csv`, in the format of olmix.

Both have one row per run, and are joined by the column `run`.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from attrs import frozen

from hgms.arguments import require
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
    shares = dict(zip(runs.sources, runs.mixtures.T.tolist(), strict=True))
    values = {name: column.tolist() for name, column in runs.metrics.items()}
    for path, columns in ((ratios, shares), (metrics, values)):
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(["run", "name", "index", *columns])
        numbers = range(len(runs.names))
        writer.writerows(zip(runs.names, runs.names, numbers, *columns.values(), strict=True))
        replace_file(path, buffer.getvalue().encode())


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
    require(
        len(sources) >= 2,
        "missing-column",
        f"a mixture requires at least 2 sources, but the file has {len(sources)}",
        place=(str(ratios),),
        error=DataError,
    )
    for run, row in shares.items():
        require(
            (all(math.isfinite(share) and share >= 0 for share in row))
            and abs(sum(row) - 1) <= 0.01,
            "wrong-row",
            f"the shares of run {run!r} must be at least 0 and sum to 1 within 0.01, but sum "
            f"to {sum(row):.4g}",
            place=(str(ratios),),
            error=DataError,
        )
    common = [
        run
        for run in shares
        if run in values and all(math.isfinite(value) for value in values[run])
    ]
    require(
        common,
        "no-rows",
        f"no {id_of_ratios} in {ratios} has a {id_of_metrics} with all metrics",
        place=(str(metrics),),
        error=DataError,
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
    try:
        reader = csv.reader(io.StringIO(path.read_text(encoding="utf-8-sig")))
        header = [name.strip() for name in next(reader, [])]
        rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except OSError as error:
        raise DataError(
            "unreadable-file", f"the file cannot be read: {error.strerror}", place=(str(path),)
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            "wrong-format", f"the file is not a CSV file in UTF-8: {error}", place=(str(path),)
        ) from None
    key = next((name for name in IDS if name in header), None)
    names = [name for name in header if name not in ("", *OTHER) and not name.startswith("Unnamed")]
    if key is None or not names:
        missing = "column 'run' or 'run_id'" if key is None else f"column for {what}"
        raise DataError(
            "missing-column",
            f"the file has no {missing} (columns: {', '.join(header) or 'none'})",
            place=(str(path),),
        )
    require(
        len(set(names)) == len(names),
        "duplicate-name",
        "two columns have the same name",
        place=(str(path),),
        error=DataError,
    )
    values: dict[str, list[float]] = {}
    for line, row in rows:
        try:
            cells = dict(zip(header, row, strict=True))
            numbers = [float(cells[name].strip() or "nan") for name in names]
        except ValueError as error:
            raise DataError(
                "wrong-row", f"the row is wrong: {error}", place=(str(path), line)
            ) from None
        require(
            cells[key] not in values,
            "duplicate-name",
            f"two rows have the run {cells[key]!r}",
            place=(str(path), line),
            error=DataError,
        )
        values[cells[key]] = numbers
    return key, names, values
