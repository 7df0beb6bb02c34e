"""`ratios.csv` and `metrics.csv`, in the format of olmix.

Both have one row per run, and are joined by the column `run`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from attrs import frozen

from hgms.store import replace_file

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
    """Write both files, with all digits."""
    shares = dict(zip(runs.sources, runs.mixtures.T.tolist(), strict=True))
    values = {name: column.tolist() for name, column in runs.metrics.items()}
    for path, columns in ((ratios, shares), (metrics, values)):
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(["run", "name", "index", *columns])
        numbers = range(len(runs.names))
        writer.writerows(zip(runs.names, runs.names, numbers, *columns.values(), strict=True))
        replace_file(path, buffer.getvalue().encode())
