"""Every table of docs/reference/benchmarks*.md equals the result of the script."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow import parquet
from support.helpers import load_script

from hgms.results.statistics import Interval

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]


tables = load_script("hgms_benchmark_tables", ROOT / "benchmarks" / "tables.py")
PAGES = "\n".join(path.read_text(encoding="utf-8") for path in tables.PAGES)


def test_every_table_on_the_page_is_what_the_records_make_and_no_other_stands_there() -> None:
    assert tables.page(PAGES) == PAGES
    assert sorted(match[1] for match in tables.MARKED.finditer(PAGES)) == sorted(tables.TABLES)
    assert not [line for line in tables.MARKED.sub("", PAGES).splitlines() if line.startswith("|")]


def test_records_name_no_folder() -> None:
    for path in sorted(tables.RESULTS.glob("*.parquet")):
        rows = parquet.read_table(path).to_pylist()
        values = [value for row in rows for value in row.values()]
        assert not [value for value in values if str(value).startswith("/")], path


def test_a_mean_of_the_page_by_hand() -> None:
    """One cell, from the file without the script's own functions."""
    cell = ("cleaning-0.8", "validation-only")
    rows = parquet.read_table(tables.RESULTS / "cleaning.parquet").to_pylist()
    values = [row["metric.test_accuracy"] for row in rows if (row["task"], row["method"]) == cell]
    mean, half = 100 * sum(values) / len(values), 100 * Interval.of(values).half_width
    lines = tables.cleaning_accuracy().splitlines()
    (line,) = [line for line in lines if line.startswith("| `validation-only`")]
    assert f"{mean:.2f} ± {half:.2f}" in line
