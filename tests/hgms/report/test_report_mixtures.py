"""Reports of named sources: final mixtures, and what seeds say of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import hgms.report as report
from hgms.cli import main
from hgms.report import Study, tables
from hgms.report.figures import areas, source_colours
from hgms.results.statistics import Interval


def of(study: Study, budget: str) -> report.Section:
    [section] = [section for section in study.sections if section.budget == budget]
    return section


def cells(table: tables.Table) -> list[list[str]]:
    return [
        [cell.text + (f" [{cell.note}]" if cell.note else "") for cell in row] for row in table.rows
    ]


def by_title(section: report.Section, ident: str) -> tables.Table:
    [table] = [table for table in tables.tables(section) if table.ident == ident]
    return table


def test_the_final_mixture_is_the_mean_of_what_the_seeds_returned(mixtures: Study) -> None:
    section = of(mixtures, "3600 s")
    first = section.mixtures["hg-ms"].weights["source-0"]
    expected = Interval.of([0.89, 0.90, 0.91])
    assert (first.mean, first.half_width) == pytest.approx((0.9, expected.half_width))
    rows = {row[0]: row[1:] for row in cells(by_title(section, "mixture"))}
    shown = "source-0 0.900 ± 0.025; source-1 0.050 ± 0.025; source-2 0.006 ± 0.000"
    assert (rows["hg-ms"], rows["uniform"][0]) == ([shown, "0.044", "3"], "uniform, each 0.100")
    # means would hide that one seed went the other way
    assert rows["scalebio"][0].endswith("[largest by seed: source-9 2×, source-0 1×]")


def test_no_verdict_is_passed_on_losses_of_x_but_on_weights_of_methods_that_learn_them(
    mixtures: Study,
) -> None:
    section = of(mixtures, "3600 s")
    assert (section.winner, section.verdict.split(":")[0]) == (None, "No verdict")
    judged = of(report.build(mixtures.sources, metrics=["recovery_error"]), "3600 s")
    assert judged.verdict.startswith("hg-ms has the best mean of the methods")
    rows = cells(by_title(section, "uncertainty"))
    assert {row[0] for row in rows} == {"hg-ms", "scalebio"}  # uniform weights never move
    # three seeds with 0.89, 0.90, 0.91: far from 0.1, and in log-ratios within 0.02 of each other
    assert (rows[0][:3], rows[0][-1]) == (["hg-ms", "source-0", "0.100"], "more of it")
    # one of its seeds went the other way
    turned = {row[1]: row[-1] for row in rows if row[0] == "scalebio"}
    assert {turned[f"source-{number}"] for number in (0, 1, 8, 9)} == {"cannot be told"}


def test_mixture_areas_add_up_to_one_and_end_where_the_table_does(mixtures: Study) -> None:
    section = of(mixtures, "32400 s")
    colours = source_colours(mixtures)
    assert list(section.moving) == ["hg-ms", "scalebio"]  # the uniform one does not move
    for mixture in section.moving.values():
        stack = {name: values for name, _, values in areas(mixture, colours[mixture.sources])}
        assert (len(stack), "3 other sources" in stack) == (8, True)
        np.testing.assert_allclose(sum(stack.values()), 1.0, atol=1e-3)
        named = stack.keys() & mixture.weights
        assert {name: stack[name][-1] for name in named} == pytest.approx(
            {name: mixture.weights[name].mean for name in named}, rel=1e-4
        )


def test_parquet_and_json_hold_the_mixture(mixtures: Study, tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    out = tmp_path / "r.parquet"
    words = ["report", *mixtures.sources, "--out", str(out), "--json"]
    printed = json.loads(CliRunner().invoke(main, words).stdout)
    methods = {row["method"]: row for row in printed["tasks"][0]["methods"]}
    assert methods["uniform"]["mixture"]["source-3"]["mean"] == pytest.approx(0.1)
    key = {"method": "hg-ms", "seed": 2, "budget": "3600 s"}
    [run] = [row for row in parquet.read_table(out).to_pylist() if key.items() <= row.items()]
    expected = {"weight.source-0": 0.91, "metric.recovery_error": 0.0}
    assert {name: run[name] for name in expected} == pytest.approx(expected)
