"""docs/benchmarks.md: every table of runs is what the script makes from the raw records that are
kept.
"""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from support.helpers import load_script

from hgms.results.statistics import Interval

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]


tables = load_script("hgms_benchmark_tables", ROOT / "benchmarks" / "tables.py")
PAGE = tables.PAGE.read_text(encoding="utf-8")


def test_every_table_on_the_page_is_what_the_records_make_and_no_other_stands_there() -> None:
    assert tables.page(PAGE) == PAGE
    marked = {match[1]: match.end() for match in tables.MARKED.finditer(PAGE)}
    assert sorted(marked) == sorted(tables.TABLES)
    assert not [line for line in tables.MARKED.sub("", PAGE).splitlines() if line.startswith("|")]
    # a changed figure is noticed
    at = max(i for i in range(marked["cleaning-accuracy"] - 6) if PAGE[i].isdigit())
    changed = PAGE[:at] + str((int(PAGE[at]) + 1) % 10) + PAGE[at + 1 :]
    assert tables.stale(changed) == ["cleaning-accuracy"]


def test_records_say_where_they_come_from_and_name_no_folder() -> None:
    for path in sorted(tables.RESULTS.glob("*.parquet")):
        rows = parquet.read_table(path).to_pylist()
        values = [value for row in rows for value in row.values()]
        assert not [value for value in values if str(value).startswith("/")], path
        if "status" in rows[0]:
            about = ("environment.torch", "environment.git", "budget")
            assert all(row[key] for row in rows for key in about), path
            assert len({(row["task"], row["method"], row["seed"]) for row in rows}) == len(rows)


def made(folder: Path, values: dict[str, list[float]]) -> None:
    """Records of a campaign with one task."""
    rows = [
        {
            "task": "cleaning-0.4",
            "method": label,
            "method_name": label.removesuffix("-last"),
            "seed": seed,
            "status": "done",
            "outer_steps": 5 + seed,
            "metric.test_accuracy": value,
        }
        for label, by_seed in values.items()
        for seed, value in enumerate(by_seed)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "evidence-cleaning.parquet")


def around(mean: float, seeds: int = 10) -> list[float]:
    """Values with this mean; those of two means differ by the same in every seed but for a
    little.
    """
    return [
        mean + 0.001 * (seed % 2) - 0.0005 + 0.0001 * math.cos(100 * mean + seed)
        for seed in range(seeds)
    ]


def test_a_campaign_makes_its_tables_as_soon_as_its_records_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.evidence("evidence-cleaning").startswith(
        "Not run yet (`hgms compare benchmarks/evidence/cleaning.toml`)"
    )
    assert tables.established() == "No method is ahead of every reference that learns nothing.\n"
    means = {
        "hg-ms": 0.90,
        "v-pbgd": 0.84,
        "validation-only": 0.85,
        "uniform": 0.80,
        "uniform-last": 0.86,
        "oracle-joint": 0.95,
    }
    made(tmp_path, {name: around(mean) for name, mean in means.items()})
    lines = [line.split(" | ") for line in tables.evidence("evidence-cleaning").splitlines()[2:]]
    assert [(line[1], line[-1].rstrip(" |")) for line in lines] == [
        ("`hg-ms`", "ahead of every reference that learns nothing"),
        ("`v-pbgd`", "**behind `uniform-last`**"),
        ("`uniform-last`", "reference"),
        ("`validation-only`", "reference"),
        ("`uniform`", "reference"),
        ("`oracle-joint`", "knows the truth"),
    ]
    # to the better form of uniform, by Holm's rule; and (0.90 − 0.85) / (0.95 − 0.85)
    starts = zip(lines[0][2:6], ("90.0", "**+4.0", "0.50 [", "5–14"), strict=True)
    assert all(cell.startswith(start) for cell, start in starts)
    assert [line.split(" | ")[2] for line in tables.established().splitlines()[2:]] == ["`hg-ms`"]
    assert tables.open_questions().startswith("Every task has a method")
    assert "| `hg-ms` | 1 of 1 | none |" in tables.winners()


def test_nothing_is_claimed_of_few_seeds_or_of_a_difference_within_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    few = {"hg-ms": around(0.90, 5), "uniform": around(0.80, 5)}
    level = {"hg-ms": [0.85 + 0.01 * (-1) ** seed for seed in range(10)], "uniform": around(0.849)}
    for values, seeds, verdict in (
        (few, "5 (a claim needs 10)", "ahead of every"),
        (level, "10", "not ahead of `uniform`"),
    ):
        made(tmp_path, values)
        assert tables.established().startswith("No method is ahead")
        assert tables.open_questions().splitlines()[2].split(" | ")[-1] == f"{seeds} |"
        assert verdict in tables.evidence("evidence-cleaning")


def test_a_mean_of_the_page_by_hand() -> None:
    """One cell, from the file without the script's own functions."""
    cell = ("cleaning-0.8", "validation-only")
    rows = parquet.read_table(tables.RESULTS / "cleaning.parquet").to_pylist()
    values = [row["metric.test_accuracy"] for row in rows if (row["task"], row["method"]) == cell]
    mean, half = 100 * sum(values) / len(values), 100 * Interval.of(values).half_width
    lines = tables.cleaning_accuracy().splitlines()
    (line,) = [line for line in lines if line.startswith("| `validation-only`")]
    assert f"{mean:.2f} ± {half:.2f}" in line
