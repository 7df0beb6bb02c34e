"""Reports: what is compared and what is refused, the numbers against a second computation, and
every format's contents.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.helpers import rejects
from support.made_runs import CONFIG, seal, write_comparison, write_mixtures, write_run

import hgms.report as report
from hgms.cli import main
from hgms.report import Study, curves, tables
from hgms.report.curves import Curve
from hgms.report.figures import figures, source_colours, span, styles
from hgms.report.formats import WRITERS
from hgms.report.latex import latex
from hgms.report.markdown import markdown
from hgms.results import DARK, LIGHT, Look, few_seeds
from hgms.results.statistics import Interval
from hgms_core.errors import ConfigError


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_comparison(tmp_path_factory.mktemp("comparison"))


@pytest.fixture(scope="module")
def study(comparison: Path) -> Study:
    return report.build([comparison])


def call(*arguments: str | Path) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


# --- what is compared
# --------------------------------------------------------------------------------------------------


def test_sections_tell_tasks_apart_by_what_they_differ_in(study: Study) -> None:
    assert [section.title for section in study.sections] == ["ring (rho = 0.4)", "ring (rho = 0.6)"]
    assert study.labels == ["baseline", "hg-ms", "lost", "uniform"]
    assert len(study.runs) == 24
    assert {folder.path.name for folder in study.skipped} == {"seed-7", "seed-8", "seed-9"}
    # the torn rows of a run with a sound summary
    assert ("damaged-file", "steps.jsonl") in {
        (folder.code, *folder.place[:1]) for folder in study.skipped
    }


def test_means_and_differences_are_those_of_the_seeds(study: Study) -> None:
    section = study.sections[0]
    first = section.entries[0]
    assert first.label == "hg-ms"
    values = [0.10 + 0.0004 * offset for offset in (-1, 0, 1)]
    assert first.metrics["value"] == Interval.of(values)
    floor = [0.40 + 0.0004 * offset for offset in (1, -1, 0)]
    expected = Interval.of([value - other for value, other in zip(values, floor, strict=True)])
    assert first.difference is not None
    assert first.difference.mean == pytest.approx(expected.mean)
    # of six pairs
    assert expected.half_width < first.difference.half_width < 3 * expected.half_width
    assert section.pairs["hg-ms", "uniform"] == first.difference
    assert section.pairs["uniform", "hg-ms"].mean == pytest.approx(-expected.mean)
    # hg-ms is better without the failed seed of baseline, which could only add to its lead
    assert section.pairs["hg-ms", "baseline"].count == 2


def test_a_winner_needs_every_interval_to_exclude_zero_and_ten_seeds(
    study: Study, tmp_path: Path
) -> None:
    assert study.sections[0].winner is None
    assert study.sections[0].verdict == (
        "hg-ms has the best mean of the methods, each difference's interval excludes zero, and "
        "no winner is marked from so few "
        "seeds; the closest is baseline, at a difference of -0.1006 ± 0.0076."
    )
    unclear = study.sections[1]
    clear = report.build([write_comparison(tmp_path, seeds=11)]).sections[0]
    assert clear.winner == "hg-ms"
    assert "ahead of every other method and every floor; the closest is baseline" in clear.verdict
    assert unclear.winner is None
    assert (
        "is not ahead of uniform, which learns nothing about θ: no gain is shown" in unclear.verdict
    )


def test_a_seed_of_one_configuration_under_two_labels_counts_once(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path, method="uniform", seed=seed, value=0.4 + seed)
        text = CONFIG.format(seed=seed, task="ring", rho=0.4, method="uniform", lr=0.5, steps=3)
        write_run(
            tmp_path,
            method="uniform",
            seed=seed,
            value=0.4 + seed,
            path=tmp_path / "ring" / "uniform-last" / f"seed-{seed}",
            files={"config.toml": text.replace('label = "none"', 'label = "uniform-last"')},
        )
    study = report.build([tmp_path])
    (entry,) = study.sections[0].entries
    assert entry.metrics["value"].count == len(study.runs) == 3
    assert {folder.code for folder in study.skipped} == {"duplicate-run"}
    assert len(study.skipped) == 3


def test_runs_of_another_dtype_are_another_method(tmp_path: Path) -> None:
    """float32 in seed 0, float64 in seed 1, under one label: nothing is averaged."""
    for seed, dtype in ((0, "float32"), (1, "float64")):
        text = CONFIG.format(seed=seed, task="ring", rho=0.4, method="halve", lr=0.5, steps=3)
        write_run(
            tmp_path,
            seed=seed,
            path=tmp_path / "ring" / dtype / f"seed-{seed}",
            files={"config.toml": text + f'dtype = "{dtype}"\n'},
        )
    entries = report.build([tmp_path]).sections[0].entries
    assert {entry.label: entry.seeds for entry in entries} == {
        "halve (run.dtype = float32)": [0],
        "halve (run.dtype = float64)": [1],
    }


def test_many_metrics_take_time_in_proportion(tmp_path: Path) -> None:
    """By the square law that was, 2,000 metrics took 3.7 s, and 20,000 six minutes."""
    metrics = {f"m{number}": 0.5 for number in range(20_000)}
    summary = {"status": "done", "seed": 0, "outer_steps": 3, "metrics": metrics}
    write_run(tmp_path, files={"summary.json": json.dumps(summary)})
    began = time.process_time()
    study = report.build([tmp_path])
    assert time.process_time() - began < 20
    assert len(study.sections[0].metrics) == 20_000


def test_worse_than_uniform_is_shown_and_marked(study: Study) -> None:
    marks = {entry.label: entry.mark for entry in study.sections[0].entries}
    # baseline failed in one seed of three
    assert marks == {
        "hg-ms": "",
        "baseline": "not ahead of uniform",
        "uniform": "",
        "lost": "worse than uniform",
    }
    assert [entry.label for entry in study.sections[0].entries] == [
        "hg-ms",
        "baseline",
        "lost",
        "uniform",
    ], "references last"
    assert [entry.role for entry in study.sections[0].entries] == ["", "", "", "floor"]


def test_a_metric_that_is_not_finite_is_counted_and_shown(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path, method="grows", seed=seed, value=None)
        write_run(tmp_path, method="shaky", seed=seed, value=None if seed == 1 else 0.5 + seed)
    section = report.build([tmp_path]).sections[0]
    assert [entry.label for entry in section.entries] == ["shaky", "grows"]
    assert [entry.nonfinite for entry in section.entries] == [{"value": 1}, {"value": 3}]
    assert section.entries[0].metrics["value"].mean == 1.5
    assert section.winner is None
    shown = markdown(report.build([tmp_path]))
    assert "nan (not finite in 3 of 3 seeds)" in shown
    assert "(not finite in 1 of 3 seeds)" in shown


def test_a_task_on_which_everything_failed(tmp_path: Path) -> None:
    for method in ("uniform", "halve"):
        write_run(tmp_path, method=method, error="it grew")
    study = report.build([tmp_path])
    [section] = study.sections
    assert section.winner is None
    assert section.verdict == ""
    assert len(study.failed) == 2
    for suffix in (".html", ".md", ".tex"):
        assert "halve" in WRITERS[suffix](study)
    [path] = report.write(study, tmp_path / "r.parquet")
    assert path.exists()
    assert call("plot", tmp_path, "--out", tmp_path / "r.svg").exit_code == 0


@pytest.mark.parametrize(
    ("first", "second", "parts"),
    [
        ({"steps": 3}, {"steps": 4}, ("budget 3 outer steps", "budget 4 outer steps")),
        ({"version": "1"}, {"version": "2"}, ("version 1", "version 2")),
        ({"version": None}, {"version": "2"}, ("version not recorded", "version 2")),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_list_or_separated(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], parts: Sequence[str]
) -> None:
    write_run(tmp_path, method="a", **first)
    write_run(tmp_path, method="b", **second)
    with rejects("other-settings", "folders", of=ConfigError) as caught:
        report.build([tmp_path])
    for part in parts:
        assert f"ring: {part}: 1 runs (" in caught.value.message
    titles = {section.title for section in report.build([tmp_path], separate=True).sections}
    assert titles == {f"ring, {part}" for part in parts}


def test_other_budgets_on_other_tasks_are_no_mixture(tmp_path: Path) -> None:
    write_run(tmp_path, task="ring", steps=3)
    write_run(tmp_path, task="knot", steps=4)
    assert {section.task: section.budget for section in report.build([tmp_path]).sections} == {
        "knot": "4 outer steps",
        "ring": "3 outer steps",
    }


def test_variants_of_a_method_are_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path, lr=0.5, value=0.2)
    write_run(tmp_path, lr=0.1, value=0.3)
    section = report.build([tmp_path]).sections[0]
    assert [entry.label for entry in section.entries] == ["halve (lr = 0.5)", "halve (lr = 0.1)"]
    [settings] = [table for table in tables.tables(section) if table.ident == "settings"]
    assert [[cell.text for cell in row] for row in settings.rows] == [["method.lr", "0.5", "0.1"]]


def test_a_seed_is_counted_once(tmp_path: Path) -> None:
    """Runs of one method and seed that were carried out differently are two methods, not twice
    as many seeds.
    """
    for seed in (0, 1):
        write_run(tmp_path, seed=seed, value=0.2)
        path = write_run(tmp_path / "again", seed=seed, value=0.3)
        (path / "config.toml").write_text(
            (path / "config.toml").read_text().replace("threads = 1", "threads = 2")
        )
        seal(path)
        write_run(tmp_path, method="uniform", seed=seed)
    section = report.build([tmp_path]).sections[0]
    assert {entry.label: entry.seeds for entry in section.entries} == {
        "halve (run.threads = 1)": [0, 1],
        "uniform": [0, 1],
        "halve (run.threads = 2)": [0, 1],
    }


def test_environments_are_grouped_and_differences_noted(study: Study) -> None:
    assert [len(runs) for _, runs in study.sections[0].environments] == [9, 3]
    page = WRITERS[".html"](study)
    assert "2 different environments (they differ in threads)" in page


def test_edited_code_is_no_other_environment(tmp_path: Path) -> None:
    """A report over methods of several plugins holds other code of components in every run."""
    for number, method in enumerate(("a", "b", "c")):
        code = {"code": {f"plugin.{method}": f"{number}" * 8}}
        write_run(
            tmp_path,
            method=method,
            environment={**code, "before": [{"device": "cpu", "python": "3.11", **code}]},
        )
    study = report.build([tmp_path])
    [(environment, _)] = study.sections[0].environments
    assert environment == {"device": "cpu", "python": "3.11"}
    assert "different environments" not in WRITERS[".html"](study)


# --- strangers' rows and names
# --------------------------------------------------------------------------------------------------

HOSTILE = "x</script>| <b>a</b>\r# b\n\n# c\x1b[31m\u202e $\\frac{ $ [l](http://e) &lt; *k* ~s~"


def rows_with(**fields: Any) -> str:
    return "".join(
        json.dumps({"step": step, "metric.value": 0.5, **fields}) + "\n" for step in range(4)
    )


@pytest.mark.parametrize(
    "files",
    [
        {"steps.jsonl": rows_with(selected=300_000_000)},
        {"steps.jsonl": rows_with(selected=-3)},
        {"steps.jsonl": rows_with(selected=1e300)},
        {"steps.jsonl": rows_with(selected=0.5)},
        {"steps.jsonl": rows_with(gap="x", residual=["x"], iterations={}, outcome=3, selected="x")},
        {
            "steps.jsonl": rows_with(
                gap=1e308, residual=1e308, iterations=10**400, upper_loss=-1e308
            )
        },
        {"steps.jsonl": rows_with(outcome="\ud800", **{'weight.a"b': 0.5, "weight.\ud800": 0.5})},
        {"steps.jsonl": rows_with(task="x", method=3, seed="y", seconds=[1], status={})},
        {"steps.jsonl": ""},
        {
            "summary.json": (
                '{"status": "done", "metrics": {"value": 1e308, "other": -1e308}, '
                '"oracle_calls": 1e18}'
            )
        },
        {"resources.json": '{"peak_memory_bytes": 1e18}'},
        {
            "config.toml": CONFIG.format(
                seed=0,
                task="ring",
                rho="1979-05-27",
                method="halve",
                lr="[inf, nan, [{a = 1}]]",
                steps=3,
            )
        },
    ],
)
def test_odd_rows_are_reported_in_every_format(tmp_path: Path, files: dict[str, str]) -> None:
    for seed in (0, 1):
        write_run(tmp_path, method="uniform", seed=seed, rho=0.4)
        path = write_run(tmp_path, seed=seed, value=0.2 + seed, files=files)
    (path / "config.toml").write_text(
        (path / "config.toml").read_text().replace("seed = 0", "seed = 1")
    )
    seal(path)
    study = report.build([tmp_path])
    for suffix in report.SUFFIXES:
        report.write(study, tmp_path / f"r{suffix}", steps=suffix == ".parquet")
    assert "halve" in (tmp_path / "r.md").read_text()
    assert call("plot", tmp_path, "--out", tmp_path / "r.svg").exit_code == 0


def test_one_folder_with_two_runs_stops_no_report(tmp_path: Path) -> None:
    write_run(tmp_path, method="a")
    path = write_run(tmp_path, method="b")
    (path / "steps.jsonl").write_text((path / "steps.jsonl").read_text() * 2)
    seal(path)
    study = report.build([tmp_path])
    assert [entry.label for entry in study.sections[0].entries] == ["a"]
    [skipped] = study.skipped
    assert (skipped.code, skipped.place) == ("wrong-row", ("steps.jsonl", 5))


def test_a_label_is_text_in_every_format(tmp_path: Path) -> None:
    for seed, value in enumerate((0.1, 0.12)):
        write_run(tmp_path, method="halve", seed=seed, value=0.5 + value)
        path = write_run(tmp_path, method="x", seed=seed, value=0.01 * value)
        text = (path / "config.toml").read_text()
        label = f"label = {json.dumps(HOSTILE)}\ntask_label = {json.dumps('[' + HOSTILE)}"
        (path / "config.toml").write_text(text.replace('label = "none"', label))
        (path.parents[1] / f"halve-{path.parent.name[2:]}" / path.name / "config.toml").write_text(
            text.replace('"x"', '"halve"').replace(
                'label = "none"', f"task_label = {json.dumps('[' + HOSTILE)}"
            )
        )
    study = report.build([tmp_path])
    assert [entry.label for entry in study.sections[0].entries] == [HOSTILE, "halve"]
    page = markdown(study)
    assert [
        line for line in page.splitlines() if line.startswith("#") and "b" in line.split()
    ] == []
    assert not re.search(r"(?<!\\)(?:\\\\)*<(?!br>)", page)
    assert "[l](" not in page
    assert "\x1b" not in page
    assert "\r" not in page
    for text in (page, latex(study), call("report", tmp_path, "--out", tmp_path / "r.tex").output):
        assert not set(text) & set("\x1b\r\u202e")
        assert "halve" in text
    # after \\\\ it would be an argument
    assert not re.search(r"^ *[\[*]", latex(study), re.MULTILINE)
    assert call("plot", tmp_path, "--out", tmp_path / "r.svg").exit_code == 0
    assert "\x1b" not in (tmp_path / "r.svg").read_text()


@pytest.mark.parametrize("suffix", [*report.SUFFIXES, ".svg"])
def test_a_full_disk_leaves_the_old_report(
    comparison: Path, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / f"r{suffix}"
    out.write_text("old")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    done = call("plot" if suffix == ".svg" else "report", comparison, "--out", out)
    assert done.exit_code == 1
    assert f"({out})" in done.stderr
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


# --- curves
# --------------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=1000),
    st.integers(4, 400),
)
def test_thinning_keeps_ends_and_extremes(values: list[float], points: int) -> None:
    y = np.array(values)
    kept = curves.thin(y, points)
    assert len(kept) <= max(points, 4)
    assert (np.diff(kept) > 0).all()
    assert kept[0] == 0
    assert kept[-1] == len(y) - 1
    if not np.isnan(y).all():
        assert np.nanmax(y[kept]) == np.nanmax(y)
        assert np.nanmin(y[kept]) == np.nanmin(y)


def test_thinning_keeps_the_shape() -> None:
    x = np.linspace(0, 1, 20_000)
    y = np.sin(40 * x) * np.exp(-2 * x)
    y[12_345] = 3.0  # one step's peak
    kept = curves.thin(y, 400)
    assert len(kept) <= 400
    assert 12_345 in kept
    away = np.abs(np.interp(x, x[kept], y[kept]) - y)
    beside = (x < 0.61) | (x > 0.625)
    assert away[beside].max() < 0.04  # of an amplitude of 1


def test_a_band_is_the_interval_over_runs_that_hold_their_last_value() -> None:
    lines = []
    for seed in range(5):
        random = np.random.default_rng(seed)
        x = np.concatenate([[0.0], np.cumsum(random.uniform(0.5, 1.5, size=30 + 5 * seed))])
        lines.append((x, random.normal(size=x.size)))
    curve = curves.band(lines, points=10_000)
    assert curve is not None
    assert curve.low is not None
    assert curve.high is not None
    assert curve.x[-1] == max(x[-1] for x, _ in lines)
    for at, mean, low, high in zip(curve.x, curve.y, curve.low, curve.high, strict=True):
        held = [
            [value for place, value in zip(x, y, strict=True) if place <= at][-1] for x, y in lines
        ]
        interval = Interval.of(held)
        assert mean == pytest.approx(interval.mean)
        assert (low, high) == (
            pytest.approx(interval.mean - interval.half_width),
            pytest.approx(interval.mean + interval.half_width),
        )


def test_a_thinned_band_has_no_point_of_its_own() -> None:
    x = np.arange(1000.0)
    lines = [(x, np.random.default_rng(seed).normal(size=1000)) for seed in range(3)]
    thinned = curves.band(lines, points=400)
    whole = curves.band(lines, points=10_000)
    assert thinned is not None
    assert whole is not None
    assert len(thinned.x) <= 400
    at = thinned.x.astype(int)
    for name in ("y", "low", "high"):
        np.testing.assert_array_equal(getattr(thinned, name), getattr(whole, name)[at])
    assert thinned.y.max() == whole.y.max()
    assert thinned.low is not None
    assert whole.low is not None
    assert thinned.low.min() == whole.low.min()


def test_what_was_not_reported_has_no_curve() -> None:
    empty = np.empty(0)
    assert curves.band([]) is None
    assert curves.band([(empty, empty)]) is None
    assert curves.binned([(np.arange(3.0), np.full(3, np.nan))]) is None
    alone = curves.band([(np.arange(3.0), np.arange(3.0))])
    assert alone is not None
    assert alone.low is None


def test_bins_hold_equal_stretches() -> None:
    x = np.arange(1, 101, dtype=float)
    curve = curves.binned([(x, x), (x, x + 1)], bins=10)
    assert curve is not None
    np.testing.assert_allclose(curve.x, np.arange(5.5, 100, 10))
    np.testing.assert_allclose(curve.y, np.arange(6.0, 101, 10))


# --- the page
# --------------------------------------------------------------------------------------------------


def embedded(page: str, ident: str) -> Any:
    return json.loads(
        re.search(rf'<script type="application/json" id="{ident}">(.*?)</script>', page, re.DOTALL)[
            1
        ]
    )  # type: ignore[index]


def test_the_page_is_whole_and_asks_for_nothing(study: Study) -> None:
    page = WRITERS[".html"](study)
    body = page.split("<script>", 1)[0]  # what comes before plotly.js
    assert "default-src 'none'" in body
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)""", body)
    assert "@import" not in body
    assert "url(" not in body
    assert page.count("plotly.js v") == 1
    for part in (
        "ring (rho = 0.4)",
        "worse than uniform",
        "Pilot sweeps",
        "Failed runs",
        "Folders left out",
        "Environment",
    ):
        assert part in body
    assert "the hypergradient is not finite &amp; &lt;lost&gt;" in body
    assert "max-width: 40rem" in body
    assert "prefers-color-scheme: dark" in body
    assert len(page.encode()) < 6e6


def test_every_figure_is_one_that_plotly_accepts(study: Study) -> None:
    from plotly import graph_objects

    page = WRITERS[".html"](study)
    specs = embedded(page, "plots")
    assert len(specs) == len(re.findall(r'class="plot"', page)) == 2 * 8
    for spec in specs.values():
        assert len(graph_objects.Figure(spec).data) == len(spec["data"]) > 0
        assert any(trace.get("y") for trace in spec["data"])


def test_a_figure_shows_the_curve_of_the_study(study: Study) -> None:
    section = study.sections[0]
    [figure] = [
        item
        for item in figures(section, styles(study), {})
        if item["title"] == "Value against oracle calls"
    ]
    [line] = [
        item for item in figure["spec"]["data"] if item["name"] == "hg-ms" and "fill" not in item
    ]
    curve = section.curves("oracle_calls", "value")["hg-ms"]
    np.testing.assert_allclose(line["x"], curve.x, rtol=1e-4)
    np.testing.assert_allclose(line["y"], curve.y, rtol=1e-4)
    assert line["x"][0] == 0
    assert line["y"][0] == 1.0
    assert line["x"][-1] == 120


def test_a_method_has_the_colour_of_its_name_in_every_report() -> None:
    assert len(LIGHT) == len(DARK)

    def alone(label: str) -> Look:
        return styles(SimpleNamespace(labels=[label]))[label]  # type: ignore[arg-type]

    labels = [f"method-{number:02}" for number in range(40)]
    beside = styles(SimpleNamespace(labels=labels))  # type: ignore[arg-type]
    assert {label: beside[label].colour for label in labels} == {
        label: alone(label).colour for label in labels
    }
    # of one colour, as many as there are dashes have different ones
    for colour in range(len(LIGHT)):
        dashes = [look.dash for look in beside.values() if look.colour == colour]
        assert len(set(dashes)) == min(len(dashes), 5)
    known = [
        "uniform",
        "hg-ms",
        "hg-baseline",
        "hg-implicit",
        "scalebio",
        "hg-ms-ula",
        "v-pbgd",
        "stocbio",
        "hg-ms-tilted",
    ]
    assert len({alone(label).colour for label in known}) == len(known)


def test_what_a_curve_does_at_first_does_not_set_the_axis() -> None:
    x = np.linspace(0, 10, 101)
    y = 2.0 - x / 20
    y[1] = 400.0
    ends = span({"a": Curve(x, y)})
    assert ends is not None
    assert 1.4 < ends[0] < 1.5
    assert 2.0 < ends[1] < 2.1
    y[0] = 300.0  # so far off that it is no place to begin
    assert span({"a": Curve(x, y)}) == pytest.approx(ends, abs=0.1)
    y[:2] = 4.0
    assert span({"a": Curve(x, y)})[1] > 4.0  # type: ignore[index]


def test_an_axis_begins_at_zero_where_that_is_near() -> None:
    x = np.linspace(0, 10, 101)
    low, high = span({"a": Curve(x, 10 + 8 * x)}, share=True) or []
    assert -3 < low <= 0
    assert 90 < high < 95
    assert (span({"a": Curve(x, 90 + x / 2)}, share=True) or [0])[0] > 85
    band = Curve(x, 2 + x, np.full(101, -40.0), 3 + x)
    assert -0.5 < (span({"a": band}) or [-9])[0] <= 0  # a band alone does not lead below zero


def test_bands_of_shares_end_where_shares_do(tmp_path: Path) -> None:
    for seed, value in enumerate((0.1, 0.45)):
        write_run(tmp_path, seed=seed, value=value, metric="test_accuracy")
    study = report.build([tmp_path])
    curve = study.sections[0].entries[0].curves["seconds", "test_accuracy"]
    assert curve.high is not None
    assert curve.high.max() > 1
    drawn = [
        figure["spec"]
        for figure in figures(study.sections[0], styles(study), {})
        if "accuracy" in figure["title"]
    ]
    assert drawn
    for spec in drawn:
        assert all(0 <= y <= 100 for trace in spec["data"] for y in trace["y"])


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script>"
    path = write_run(tmp_path, method="x")
    text = (path / "config.toml").read_text().replace('name = "x"', f'name = "{hostile}"')
    (path / "config.toml").write_text(text)
    seal(path)
    page = WRITERS[".html"](report.build([tmp_path], title="a < b & c"))
    assert hostile not in page
    assert "<title>a &lt; b &amp; c</title>" in page
    assert any(
        trace["name"] == hostile
        for spec in embedded(page, "plots").values()
        for trace in spec["data"]
    )


# --- Markdown, LaTeX, Parquet, pictures
# --------------------------------------------------------------------------------------------------


def test_markdown_has_every_table_with_even_rows(study: Study) -> None:
    text = markdown(study)
    assert text.startswith(
        "# Bilevel methods compared\n\n24 runs, 2 tasks, 4 methods; 1 failed; 3 folders left out."
    )
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    # all tasks; each task's own; mean ranks; failed, left out, sweep
    assert len(blocks) == 1 + 2 * 5 + 1 + 3
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    # the difference to uniform is no mark of a winner
    assert "| **0.10000 ± 0.00099** | **" not in text
    assert re.search(r"\| hg-ms \|  \| 0\.10000 ± 0\.00099 \| −0\.30\d* ± 0\.00\d+ \| 3 \|", text)
    assert "| lost (worse than uniform) |" in text
    assert "12–12" in text
    assert "| 2 (chosen) |" in text.replace("**", "")


def test_latex_is_balanced_and_escaped(study: Study, tmp_path: Path) -> None:
    write_run(tmp_path, method="a_b & c%", value=0.2, metric="test_accuracy")
    for text in (latex(study), latex(report.build([tmp_path]))):
        assert (
            text.count(r"\begin{table}")
            == text.count(r"\end{table}")
            == text.count(r"\begin{tabular}")
            > 0
        )
        assert text.count(r"\toprule") == text.count(r"\bottomrule") == text.count(r"\begin{table}")
        lines = text.count("& floor &")  # one before the references of each results table
        assert text.count(r"\midrule") == text.count(r"\begin{table}") + lines
        bare = re.sub(r"\\[\\{}&%_#$]", "", text)
        assert bare.count("{") == bare.count("}")
        assert bare.count("$") % 2 == 0
        assert text.isascii()
        for align, body in re.findall(
            r"\\begin\{tabular\}\{([lr]+)\}(.*?)\\end\{tabular\}", text, re.DOTALL
        ):
            rows = [line for line in body.splitlines() if line.endswith(r"\\")]
            assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(align) - 1}
    assert r"a\_b \& c\%" in text
    assert r"\textbf" in latex(study)


def test_parquet_holds_a_row_for_each_run_and_on_request_each_step(
    study: Study, tmp_path: Path
) -> None:
    import pyarrow.parquet as parquet

    run_file, step_file = report.write(study, tmp_path / "new" / "r.parquet", steps=True)
    runs = parquet.read_table(run_file).to_pylist()
    assert len(runs) == 24
    [run] = [
        row
        for row in runs
        if row["method"] == "hg-ms" and row["setting.task.rho"] == "0.4" and row["seed"] == 1
    ]
    assert run["metric.value"] == 0.10
    assert (run["status"], run["budget"], run["task_version"], run["oracle_calls"]) == (
        "done",
        "12 outer steps",
        "2",
        120,
    )
    assert (run["seconds"], run["compile_seconds"]) == (3.0, 0.0)
    assert run["setting.method.lr"] == "0.5"
    [failed] = [row for row in runs if row["status"] == "failed"]
    assert failed["metric.value"] is None
    assert "not finite" in failed["error"]
    steps = parquet.read_table(step_file)
    assert steps.num_rows == 24 * 13
    last = [
        ("task", "=", "ring (rho = 0.4)"),
        ("method", "=", "hg-ms"),
        ("seed", "=", 1),
        ("step", "=", 12),
    ]
    [row] = steps.filter(parquet.filters_to_expression(last)).to_pylist()
    assert row["metric.value"] == 0.10
    assert row["outcome"] == "converged"
    assert row["seconds"] == 3.0
    assert steps.filter(parquet.filters_to_expression([("step", "=", 0)]))["gap"].null_count == 24


@pytest.mark.parametrize(
    ("suffix", "head"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")]
)
def test_pictures_for_papers(comparison: Path, tmp_path: Path, suffix: str, head: bytes) -> None:
    path = tmp_path / "new" / f"curves{suffix}"
    done = call("plot", comparison, "--out", path)
    assert done.exit_code == 0, done.output
    written = path.read_bytes()
    assert written.startswith(head)
    if suffix == ".svg":
        for text in (b"hg-ms", b"oracle calls", b"ring (rho = 0.4)"):
            assert text in written
        assert call("plot", comparison, "--out", path).exit_code == 0
        assert path.read_bytes() == written  # no date, no random names


# --- named sources
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return report.build(
        [write_mixtures(tmp_path_factory.mktemp("mixtures"), sources=10)], separate=True
    )


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
    assert first.mean == pytest.approx(0.9)
    assert first.half_width == pytest.approx(Interval.of([0.89, 0.90, 0.91]).half_width)
    rows = {row[0]: row[1:] for row in cells(by_title(section, "mixture"))}
    assert rows["hg-ms"] == [
        "source-0 0.900 ± 0.025; source-1 0.050 ± 0.025; source-2 0.006 ± 0.000",
        "0.044",
        "3",
    ]
    assert rows["uniform"] == ["uniform, each 0.100", "0.000", "3"]
    # means would hide that one seed went the other way
    assert rows["scalebio"][0].endswith("[largest by seed: source-9 2×, source-0 1×]")
    every = by_title(section, "weights")
    assert every.columns == ["source", *(entry.label for entry in section.entries)]
    assert [row[0].text for row in every.rows] == [f"source-{number}" for number in range(10)]
    for column in range(1, len(every.columns)):
        shares: list[Any] = [row[column].sort for row in every.rows]
        assert math.fsum(shares) == pytest.approx(1)
    results = by_title(section, "results")
    assert "recovery error ↓" in results.columns
    assert not any("− uniform" in column for column in results.columns), (
        "losses of x say nothing of who is ahead"
    )
    assert section.winner is None
    assert section.verdict.startswith(
        "No verdict: all but the mixture is of the x that each method trained its weights with"
    )
    judged = of(report.build(mixtures.sources, metrics=["recovery_error"], separate=True), "3600 s")
    assert judged.verdict.startswith("hg-ms has the best mean of the methods")


def test_what_seeds_say_of_weights_is_said_of_methods_that_learn_them(mixtures: Study) -> None:
    section = of(mixtures, "3600 s")
    rows = cells(by_title(section, "certainty"))
    assert {row[0] for row in rows} == {"hg-ms", "scalebio"}  # uniform weights never move
    first, second = rows[:2]
    # three seeds with 0.89, 0.90, 0.91: far from 0.1, and in log-ratios within 0.02 of each other
    assert first[:3] == ["hg-ms", "source-0", "0.100"]
    assert first[-1] == "more of it"
    assert second[1] == "source-1"
    certain = section.mixtures["hg-ms"].certainty
    assert certain.effects[0].low < 0.9 < certain.effects[0].high
    turned = {row[1]: row[-1] for row in rows if row[0] == "scalebio"}
    # one of its seeds went the other way
    assert {turned[f"source-{number}"] for number in (0, 1, 8, 9)} == {"cannot be told"}


def test_a_single_seed_has_weights_without_an_interval(tmp_path: Path) -> None:
    write_mixtures(tmp_path, budgets=[3600.0])
    for path in tmp_path.glob("source-mixture/*/seed-[12]"):
        (path / "summary.json").unlink()
    [row] = [
        row
        for row in cells(by_title(report.build([tmp_path]).sections[0], "mixture"))
        if row[0] == "hg-ms"
    ]
    assert row[1] == "source-0 0.890; source-1 0.060; source-2 0.017"


def test_the_ledger_groups_methods_by_budget(mixtures: Study) -> None:
    [ledger] = tables.ledgers(mixtures)
    assert [row[0].text for row in ledger.rows] == ["hg-ms", "scalebio", "uniform"] * 2
    assert [row[1].text for row in ledger.rows] == ["1 h"] * 3 + ["9 h"] * 3
    assert [row[2].text for row in ledger.rows] == ["10"] * 3 + ["90"] * 3
    assert ledger.groups == [3]
    assert ledger.rows[4][0].note == "1 failed"
    assert ledger.columns[4:] == ["test loss ↓", "recovery error ↓"]
    assert ledger.rows[0][5].strong
    assert not ledger.rows[2][5].strong
    body = latex(mixtures).split("tab:sources-ledger-0", 1)[1]
    assert re.findall(
        r"\\(midrule|toprule|bottomrule)|^ +(\S+) (?:\S.*?)?& (\d h) &", body, re.MULTILINE
    ) == [
        ("toprule", "", ""),
        ("midrule", "", ""),
        ("", "hg-ms", "1 h"),
        ("", "scalebio", "1 h"),
        ("", "uniform", "1 h"),
        ("midrule", "", ""),
        ("", "hg-ms", "9 h"),
        ("", "scalebio", "9 h"),
        ("", "uniform", "9 h"),
        ("bottomrule", "", ""),
    ]
    page = WRITERS[".html"](mixtures)
    # before the references of each budget's results, too
    assert page.count('<tr class="group">') == 3
    assert 'href="#ledgers"' in page
    assert "## Budget ledger: source-mixture" in markdown(mixtures)


def test_a_method_that_failed_everywhere_keeps_its_row(tmp_path: Path) -> None:
    write_mixtures(tmp_path, budgets=[3600.0])
    for path in tmp_path.glob("source-mixture/scalebio-*/seed-*/summary.json"):
        path.write_text(
            json.dumps(
                {
                    **json.loads(path.read_text()),
                    "status": "failed",
                    "error": "out of memory",
                    "metrics": {},
                }
            )
        )
        seal(path.parent)
    [ledger] = tables.ledgers(report.build([tmp_path]))
    assert cells(ledger)[1] == ["scalebio [3 failed]", "1 h", "–", "–", "–", "–"]


def test_tokens_and_seconds_of_a_step(mixtures: Study) -> None:
    rows = {row[0]: row[1:] for row in cells(by_title(of(mixtures, "3600 s"), "passes"))}
    assert rows["hg-ms"] == ["10", "60", "1,000", "500", "25"]
    assert rows["scalebio"] == ["10", "30", "500", "250", "25"]


def test_mixture_pictures_add_up_to_one_and_end_where_the_table_does(mixtures: Study) -> None:
    from plotly import graph_objects

    section = of(mixtures, "32400 s")
    shown = figures(section, styles(mixtures), source_colours(mixtures))
    drawn = {
        figure["title"]: figure["spec"] for figure in shown if figure["title"].startswith("Mixture")
    }
    # the uniform one does not move
    assert list(drawn) == ["Mixture over time: hg-ms", "Mixture over time: scalebio"]
    for title, spec in drawn.items():
        graph_objects.Figure(spec)
        areas = {trace["name"]: np.array(trace["y"]) for trace in spec["data"]}
        assert len(areas) == 8
        assert "3 other sources" in areas
        np.testing.assert_allclose(sum(areas.values()), 1.0, atol=1e-3)
        mixture = section.mixtures[title.rpartition(" ")[2]]
        for source, values in areas.items():
            if source in mixture.weights:
                assert values[-1] == pytest.approx(mixture.weights[source].mean, rel=1e-4)
        assert len({trace["meta"]["colour"] for trace in spec["data"]}) == 8
        assert all(trace["x"] == spec["data"][0]["x"] for trace in spec["data"])
    colours = [
        {trace["name"]: trace["meta"]["colour"] for trace in spec["data"]}
        for spec in drawn.values()
    ]
    assert colours[0] == colours[1]


def test_a_mean_mixture_holds_what_runs_last_reported() -> None:
    x, y = curves.together(
        [
            (np.array([1.0, 2.0, 4.0]), np.array([[0.5, 0.25, 0.0], [0.5, 0.75, 1.0]])),
            (np.array([1.5, 3.0]), np.array([[0.5, 1.0], [0.5, 0.0]])),
        ]
    )
    np.testing.assert_array_equal(x, [1.5, 2.0, 3.0, 4.0])
    np.testing.assert_allclose(y, [[0.5, 0.375, 0.625, 0.5], [0.5, 0.625, 0.375, 0.5]])


def test_parquet_and_json_hold_the_mixture(mixtures: Study, tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    runs, steps = report.write(mixtures, tmp_path / "r.parquet", steps=True)
    rows = parquet.read_table(runs).to_pylist()
    [run] = [
        row
        for row in rows
        if row["method"] == "hg-ms" and row["seed"] == 2 and row["budget"] == "3600 s"
    ]
    assert run["weight.source-0"] == pytest.approx(0.91)
    assert (run["step_forward_tokens"], run["step_backward_tokens"], run["seconds_per_step"]) == (
        1000.0,
        500.0,
        60.0,
    )
    assert run["metric.recovery_error"] == 0.0
    [failed] = [row for row in rows if row["status"] == "failed"]
    assert failed["weight.source-0"] is failed["step_forward_tokens"] is None
    assert {"weight.source-9", "step_forward_tokens"} <= set(parquet.read_schema(steps).names)

    folder = write_mixtures(tmp_path / "runs", budgets=[3600.0])
    printed = json.loads(call("report", folder, "--out", tmp_path / "r.md", "--json").stdout)
    methods = {method["method"]: method for method in printed["tasks"][0]["methods"]}
    assert methods["uniform"]["mixture"]["source-3"]["mean"] == pytest.approx(0.2)
    assert methods["scalebio"]["step_backward_tokens"] == 250.0


def test_a_picture_of_the_mixture(tmp_path: Path, comparison: Path) -> None:
    folder = write_mixtures(tmp_path / "runs", budgets=[3600.0])
    out = tmp_path / "m.svg"
    done = call("plot", folder, "--mixture", "--out", out)
    assert done.exit_code == 0, done.output
    text = out.read_text()
    assert all(word in text for word in ("hg-ms", "scalebio", "source-4", "weight"))
    assert "uniform" not in text
    without = call("plot", comparison, "--mixture", "--out", tmp_path / "none.svg")
    assert without.exit_code == 2
    assert "nothing to draw" in without.stderr


def test_reports_without_named_sources_have_none_of_it(study: Study) -> None:
    assert tables.ledgers(study) == []
    assert not any(
        entry.mixture or entry.tokens for section in study.sections for entry in section.entries
    )
    text = markdown(study)
    assert not any(word in text for word in ("mixture", "ledger", "tokens"))


def test_a_weight_that_is_a_word_damages_the_run(tmp_path: Path) -> None:
    write_mixtures(tmp_path, budgets=[3600.0])
    path = next(tmp_path.glob("source-mixture/hg-ms-*/seed-0")) / "steps.jsonl"
    path.write_text(
        re.sub(r'"weight.source-1": [0-9.]+', '"weight.source-1": "much"', path.read_text())
    )
    seal(path.parent)
    [skipped] = report.build([tmp_path]).skipped
    assert (skipped.code, skipped.place) == ("wrong-type", ("steps.jsonl",))
    assert "weight.source-1" in skipped.reason


# --- the command
# --------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_wrote_and_left_out(comparison: Path, tmp_path: Path) -> None:
    done = call("report", comparison, "--out", tmp_path / "r.md", "--json")
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert printed["written"] == [str(tmp_path / "r.md")]
    assert (printed["runs"], len(printed["failed"]), len(printed["left_out"])) == (24, 1, 3)
    assert printed["tasks"][0]["winner"] is None
    assert "no winner is marked from so few seeds" in printed["tasks"][0]["verdict"]
    assert printed["tasks"][0]["methods"][0]["metrics"]["value"]["mean"] == pytest.approx(0.1)
    plain = call("report", comparison, "--out", tmp_path / "r.tex", "--reference", "baseline")
    assert plain.exit_code == 0, plain.output
    assert plain.stderr.count("left out: ") == 3
    assert "− baseline" in markdown(report.build([comparison], reference="baseline"))


def no_runs(folder: Path) -> list[str | Path]:
    folder.mkdir(exist_ok=True)
    return [folder]


def only_damaged(folder: Path) -> list[str | Path]:
    write_run(folder, files={"summary.json": "{"})
    return [folder]


def one_run(*options: str) -> Callable[[Path], list[str | Path]]:
    def make(folder: Path) -> list[str | Path]:
        write_run(folder)
        return [folder, *options]

    return make


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda folder: [folder / "nowhere"], "runs/nowhere)"),
        (no_runs, "0 folders skipped ("),
        (only_damaged, "(summary.json)"),
        (one_run("--metric", "val"), "'val' (metrics)\n  did you mean 'value'?"),
        (one_run("--reference", "halv"), "'halv' (reference)\n  did you mean 'halve'?"),
        (one_run("--out", "report.docx"), "(report.docx)"),
        (one_run("--out", "report"), "(report)"),
        (one_run("--out", "report.md", "--steps"), "(--steps)"),
    ],
)
def test_bad_input(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], list[str | Path]],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call("report", *make(tmp_path / "runs"))
    assert done.exit_code == 2, done.output
    assert expected in done.stderr
    assert not list(tmp_path.glob("report*"))


@pytest.mark.parametrize(
    ("command", "out", "module", "extra"),
    [
        ("report", "r.html", "plotly", "report"),
        ("report", "r.html", "jinja2", "report"),
        ("report", "r.parquet", "pyarrow", "report"),
        ("plot", "r.svg", "matplotlib", "plot"),
    ],
)
def test_a_missing_extra_is_named(
    comparison: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    out: str,
    module: str,
    extra: str,
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    done = call(command, comparison, "--out", tmp_path / out)
    assert done.exit_code == 2
    assert f"pip install 'hgms[{extra}]'" in done.stderr


def test_real_runs(tmp_path: Path) -> None:
    from hgms.runs import RunConfig, run_config

    for task in ("quadratic", "sphere"):
        for method in (
            {"name": "hg-ms", "generator": {"steps": 5}},
            {"name": "uniform", "generator": {"steps": 5}},
        ):
            for seed in (0, 1):
                table = {
                    "task": task,
                    "method": method,
                    "budget": "4 steps",
                    "seed": seed,
                    "run": {"out": str(tmp_path / "runs")},
                }
                run_config(RunConfig.from_dict(table))
    study = report.build([tmp_path / "runs"])
    assert study.skipped == []
    assert {section.task: section.metric for section in study.sections} == {
        "quadratic": "value",
        "sphere": "upper_gap",
    }
    for section in study.sections:
        assert section.higher is False
        assert section.version == "1"
        assert {entry.label: entry.seeds for entry in section.entries} == {
            "hg-ms": [0, 1],
            "uniform": [0, 1],
        }
        [diagnosis] = [entry for entry in section.entries if entry.label == "hg-ms"]
        assert sum(diagnosis.branches.values()) == sum(diagnosis.outcomes.values()) == 8
        assert diagnosis.gap is not None
        curve = section.curves("oracle_calls", section.metric)["hg-ms"]
        for run in section.entries[0].runs:
            assert run.records()[-1]["oracle_calls"] <= curve.x[-1]
    for suffix in report.SUFFIXES:
        for path in report.write(study, tmp_path / f"r{suffix}"):
            assert path.stat().st_size > 1000
    assert "hg-ms" in (tmp_path / "r.md").read_text()


def test_references_stand_apart_in_every_format_and_ranks_say_when_they_say_nothing(
    tmp_path: Path,
) -> None:
    """Four methods and two references; over one task with four seeds, then over three tasks."""
    means = {
        "hg-ms": 0.1,
        "other": 0.2,
        "third": 0.25,
        "validation-only": 0.3,
        "uniform": 0.4,
        "oracle-joint": 0.05,
    }
    for rho, method, seed in itertools.product((0.4, 0.6, 0.8), means, range(4)):
        noise = 0.001 * ((seed * (3 + len(method))) % 7)
        write_run(
            tmp_path / str(rho), rho=rho, method=method, seed=seed, value=means[method] + noise
        )
    few = report.build([tmp_path / "0.4"])
    enough = report.build([tmp_path])
    [section] = few.sections
    assert [entry.label for entry in section.entries] == [*list(means)[:5], "oracle-joint"]
    assert [entry.role for entry in section.entries] == ["", "", "", "floor", "floor", "ceiling"]
    assert (section.floor, section.few_seeds) == ("validation-only", few_seeds(4))
    results = by_title(section, "results")
    assert (results.columns[1], results.groups) == ("role", [3])
    assert "recovered share" in results.columns
    assert results.rows[0][results.columns.index("recovered share")].text.startswith("0.8")
    for suffix in (".html", ".md", ".tex"):
        shown = WRITERS[suffix](few)
        assert "floor" in shown
        assert "ceiling" in shown
        assert "no claim can be made from so few" in shown or suffix == ".tex"
    assert few.ranks is not None
    assert set(few.ranks.means) == set(means) - {"oracle-joint"}, "a ceiling is no rival"
    assert "Too few to say anything" not in few.ranks.words
    assert enough.ranks is not None
    assert enough.ranks.blocks == 12
    assert enough.ranks.means["hg-ms"] == 1.0
    page = WRITERS[".html"](enough)
    assert page.count('id="ranks"') == 1
    assert "critical difference" in page
    assert call("plot", tmp_path, "--ranks", "--out", tmp_path / "ranks.svg").exit_code == 0
    picture = (tmp_path / "ranks.svg").read_text()
    assert all(label in picture for label in means if label != "oracle-joint")
    single = tmp_path / "0.4" / "one"
    write_run(single, method="a")
    write_run(single, method="b", value=0.3)
    assert "three methods" in call("plot", single, "--ranks", "--out", tmp_path / "no.svg").output
