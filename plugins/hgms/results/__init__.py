"""Results of finished runs: runs from disk, statistics over seeds, and tables."""

from __future__ import annotations

from hgms.results.colours import DARK, DASHES, LIGHT, Look, looks
from hgms.results.execution import execution_notes
from hgms.results.folders import Skipped, read_run, scan
from hgms.results.forest import Forest
from hgms.results.recovery import Ratio, recovered_share
from hgms.results.statistics import (
    Interval,
    few_seeds,
    paired_differences,
    paired_interval,
    spell,
    t_quantile,
    two_sided,
    with_failures,
)
from hgms.results.stored_run import StoredRun, short_names
from hgms.results.tables import (
    DEFAULT_REFERENCES,
    FAILED,
    ORDER,
    RECOVERED,
    Point,
    Row,
    Table,
    is_share,
    table,
)

__all__ = [
    "DARK",
    "DASHES",
    "DEFAULT_REFERENCES",
    "FAILED",
    "LIGHT",
    "ORDER",
    "RECOVERED",
    "Forest",
    "Interval",
    "Look",
    "Point",
    "Ratio",
    "Row",
    "Skipped",
    "StoredRun",
    "Table",
    "execution_notes",
    "few_seeds",
    "is_share",
    "looks",
    "paired_differences",
    "paired_interval",
    "read_run",
    "recovered_share",
    "scan",
    "short_names",
    "spell",
    "t_quantile",
    "table",
    "two_sided",
    "with_failures",
]
