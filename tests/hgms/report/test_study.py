"""What a report compares and what it refuses; its numbers against a second computation."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.run_folders import write_comparison, write_run

import hgms.report as report
from hgms.comparison import compare
from hgms.report import Study, tables
from hgms.report.formats import WRITERS
from hgms.results import few_seeds
from hgms.results.statistics import Interval


def seeds(section: report.Section) -> dict[str, list[int]]:
    return {entry.label: [run.seed for run in entry.runs] for entry in section.entries}


def test_sections_tell_tasks_apart_and_mark_what_is_not_ahead(study: Study, tmp_path: Path) -> None:
    few, unclear = study.sections
    assert [section.title for section in study.sections] == ["ring (rho = 0.4)", "ring (rho = 0.6)"]
    assert {folder.path.name for folder in study.skipped} == {"seed-7", "seed-8", "seed-9"}
    # the torn rows of a run with a sound summary
    assert ("damaged-file", "steps.jsonl") in {(it.code, *it.place[:1]) for it in study.skipped}
    # baseline failed in one seed of three
    assert [(entry.label, "; ".join(entry.row.notes), entry.row.role) for entry in few.entries] == [
        ("hg-ms", "", ""),
        ("baseline", "not better than uniform", ""),
        ("lost", "worse than uniform", ""),
        ("uniform", "", "floor"),
    ]
    clear = report.build([write_comparison(tmp_path, seeds=11, steps=2)]).sections[0]
    assert [section.winner for section in (few, unclear, clear)] == [None, None, "hg-ms"]
    assert "no winner is marked (" in few.verdict
    assert "the closest is baseline" in few.verdict


def test_means_and_differences_are_those_of_the_seeds(study: Study) -> None:
    section = study.sections[0]
    first = section.entries[0]
    values = [0.10 + 0.0004 * offset for offset in (-1, 0, 1)]
    floor = [0.40 + 0.0004 * offset for offset in (1, -1, 0)]
    assert (first.label, first.row.metrics["value"]) == ("hg-ms", Interval.of(values))
    expected = Interval.of([value - other for value, other in zip(values, floor, strict=True)])
    assert first.row.difference == section.compared.pairs["hg-ms", "uniform"]
    assert first.row.difference.mean == pytest.approx(expected.mean)
    # of six pairs
    assert expected.half_width < first.row.difference.half_width < 3 * expected.half_width
    assert section.compared.pairs["uniform", "hg-ms"].mean == pytest.approx(-expected.mean)
    # hg-ms is better without the failed seed of baseline, which could only add to its lead
    assert section.compared.pairs["hg-ms", "baseline"].count == 2


def test_a_seed_of_one_configuration_under_two_labels_counts_once(tmp_path: Path) -> None:
    for seed in range(3):
        run: dict[str, Any] = {"method": "uniform", "seed": seed, "value": 0.4 + seed}
        write_run(tmp_path, **run)
        write_run(tmp_path / "last", **run, changed={'label = "none"': 'label = "uniform-last"'})
    study = report.build([tmp_path])
    [entry] = study.sections[0].entries
    assert entry.row.metrics["value"].count == len(study.runs) == 3
    assert [folder.code for folder in study.skipped] == ["duplicate-run"] * 3


def test_runs_that_were_carried_out_otherwise_are_other_methods(tmp_path: Path) -> None:
    """float32 in seed 0 and float64 in seed 1 under one label, or other threads: nothing is
    averaged, and no seed counts twice.
    """
    more = {"threads = 1": "threads = 2"}
    for seed, dtype in ((0, "float32"), (1, "float64")):
        changed = {"threads = 1": f'dtype = "{dtype}"'}
        write_run(tmp_path / "a", seed=seed, path=tmp_path / "a" / f"seed-{seed}", changed=changed)
        write_run(tmp_path / "b", seed=seed)
        write_run(tmp_path / "b" / "again", seed=seed, changed=more)
    kinds, threads = (report.build([tmp_path / name]).sections[0] for name in "ab")
    names = {f"halve (run.dtype = float{bits})": [seed] for seed, bits in ((0, 32), (1, 64))}
    assert seeds(kinds) == names
    assert seeds(threads) == {f"halve (run.threads = {count})": [0, 1] for count in (1, 2)}


@pytest.mark.parametrize(
    ("first", "second", "parts"),
    [
        ({"steps": 3}, {"steps": 4}, ("budget 3 outer steps", "budget 4 outer steps")),
        ({"version": "1"}, {"version": "2"}, ("version 1", "version 2")),
        ({"version": None}, {"version": "2"}, ("version not recorded", "version 2")),
    ],
)
def test_runs_of_other_budgets_or_versions_have_separate_sections(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], parts: Sequence[str]
) -> None:
    write_run(tmp_path, method="a", **first)
    write_run(tmp_path, method="b", **second)
    titles = {section.title for section in report.build([tmp_path]).sections}
    assert titles == {f"ring, {part}" for part in parts}


def test_metrics_that_are_not_finite_and_tasks_on_which_everything_failed_are_shown(
    tmp_path: Path,
) -> None:
    for seed in range(3):
        write_run(tmp_path, method="grows", seed=seed, value=None)
        write_run(tmp_path, method="shaky", seed=seed, value=None if seed == 1 else 0.5 + seed)
        write_run(tmp_path, task="knot", method="fails", seed=seed, error="it grew")
    study = report.build([tmp_path])
    failed, section = study.sections
    found = [(entry.label, entry.nonfinite["value"]) for entry in section.entries]
    assert found == [("shaky", 1), ("grows", 3)]
    assert (section.entries[0].row.metrics["value"].mean, section.winner) == (1.5, None)
    assert (failed.winner, failed.verdict, len(study.failed_runs)) == (None, "", 3)
    assert all("fails" in WRITERS[suffix](study) for suffix in (".html", ".tex"))


def test_many_metrics_take_time_in_proportion(tmp_path: Path) -> None:
    """By a square law, 2,000 metrics would take 3.7 s, and 20,000 six minutes."""
    metrics = {f"m{number}": 0.5 for number in range(10_000)}
    summary = {"status": "done", "seed": 0, "outer_steps": 3, "metrics": metrics}
    write_run(tmp_path, files={"summary.json": json.dumps(summary)})
    began = time.process_time()
    assert len(report.build([tmp_path]).sections[0].metrics) == 10_000
    assert time.process_time() - began < 10


def test_references_stand_apart_and_a_ceiling_has_no_rank(tmp_path: Path) -> None:
    """Three methods and three references over three tasks with four seeds."""
    learn = {"hg-ms": 0.1, "other": 0.2, "third": 0.25}
    means = {**learn, "validation-only": 0.3, "uniform": 0.4, "oracle-joint": 0.05}
    for rho, method, seed in itertools.product((0.4, 0.6, 0.8), means, range(4)):
        value = means[method] + 0.001 * ((seed * (3 + len(method))) % 7)
        write_run(tmp_path, rho=rho, method=method, seed=seed, value=value)
    study = report.build([tmp_path])
    section = study.sections[0]
    roles = {entry.label: entry.row.role for entry in section.entries}
    assert roles == dict(zip(means, ["", "", "", "floor", "floor", "ceiling"], strict=True))
    assert (section.compared.floor, section.compared.few_seeds) == ("validation-only", few_seeds(4))
    [results] = [table for table in tables.tables(section) if table.ident == "results"]
    assert (results.columns[1], results.groups) == ("role", [3])
    assert results.rows[0][results.columns.index("recovered share")].text.startswith("0.8")


@pytest.mark.extended
def test_real_runs(tmp_path: Path) -> None:
    methods = [{"name": name, "generator": {"steps": 5}} for name in ("hg-ms", "uniform")]
    compare("quadratic", methods, "3 steps", 2, tmp_path / "runs", jobs=0, baselines=False)
    study = report.build([tmp_path / "runs"])
    [section] = study.sections
    assert (study.skipped, section.metric, section.compared.higher_is_better) == (
        [],
        "value",
        False,
    )
    assert seeds(section) == {"hg-ms": [0, 1], "uniform": [0, 1]}
    written = [report.write(study, tmp_path / f"r{suffix}") for suffix in report.SUFFIXES]
    assert all(path.stat().st_size > 1000 for path in written)
