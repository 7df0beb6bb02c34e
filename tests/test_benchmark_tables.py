"""docs/benchmarks.md: every table of runs is what the script makes from the raw records that are kept."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pyarrow import parquet

from hgms_results.statistics import Interval

pytestmark = pytest.mark.plugins

ROOT = Path(__file__).resolve().parents[1]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hgms_benchmark_tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tables = load()
PAGE = tables.PAGE.read_text(encoding="utf-8")


def test_every_table_on_the_page_is_what_the_records_make() -> None:
    assert tables.stale(PAGE) == []
    assert tables.page(PAGE) == PAGE


def test_every_table_of_the_script_stands_on_the_page_and_no_other_does() -> None:
    marked = [match[1] for match in tables.MARKED.finditer(PAGE)]
    assert sorted(marked) == sorted(tables.TABLES)
    outside = tables.MARKED.sub("", PAGE)
    assert not [line for line in outside.splitlines() if line.startswith("|")]


def test_a_changed_figure_is_noticed() -> None:
    digit = next(match for match in tables.MARKED.finditer(PAGE) if match[1] == "cleaning-accuracy").end() - 6
    at = max(i for i in range(digit) if PAGE[i].isdigit())
    assert tables.stale(PAGE[:at] + str((int(PAGE[at]) + 1) % 10) + PAGE[at + 1 :]) == ["cleaning-accuracy"]


def test_records_are_small_say_where_they_come_from_and_name_no_folder() -> None:
    files = sorted(tables.RESULTS.glob("*.parquet"))
    assert sum(path.stat().st_size for path in files) < 3e6
    for path in files:
        table = parquet.read_table(path)
        assert "folder" not in table.column_names
        assert not [value for row in table.to_pylist() for value in row.values() if str(value).startswith("/")]
        if "status" in table.column_names:
            rows = table.to_pylist()
            assert all(row["environment.torch"] and row["environment.git"] and row["budget"] for row in rows)
            assert len({(row["task"], row["method"], row["seed"]) for row in rows}) == len(rows)


def test_a_mean_of_the_page_by_hand() -> None:
    """One cell, from the file without the script's own functions."""
    rows = parquet.read_table(tables.RESULTS / "cleaning.parquet").to_pylist()
    values = [
        row["metric.test_accuracy"] for row in rows if (row["task"], row["method"]) == ("cleaning-0.8", "validation-only")
    ]
    interval = Interval.of(values)
    (line,) = [line for line in tables.cleaning_accuracy().splitlines() if line.startswith("| `validation-only`")]
    assert f"{100 * sum(values) / len(values):.2f} ± {100 * interval.half_width:.2f}" in line


def test_figures_of_a_script_are_kept_with_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    told = {"torch": "2.0", "threads": 1, "outer": {"ratio": 1.5, "by": {"a": 2}, "note": "text"}}
    (tmp_path / "made.json").write_text(json.dumps(told), encoding="utf-8")
    (path,) = tables.keep_figures("made", tmp_path / "made.json")
    about = {"torch": "2.0", "threads": "1", "case": "outer"}
    assert parquet.read_table(path).to_pylist() == [
        {**about, "quantity": "ratio", "value": 1.5},
        {**about, "quantity": "by: a", "value": 2.0},
    ]
