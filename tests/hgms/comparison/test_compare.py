"""Comparisons: their statistics, the cells that fail or are broken off, the live views."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy import stats
from support.helpers import rejects
from support.processes import Server, rows_written, strike

from hgms.cli import main
from hgms.comparison import cell, coordinator
from hgms.comparison.comparison import Comparison
from hgms.comparison.from_python import compare
from hgms.comparison.grid_file import load
from hgms.comparison.run_grid import run_grid
from hgms.demo.pictures import draw_weights
from hgms.executors import Board, Ending, Local
from hgms.results.tables import UNJUDGED, Point, table
from hgms.runs import DiskError, Interrupted, Progress, RunFolder, RunResult, leased
from hgms_core import ConfigError, HgmsError, RunInfo
from hgms_core.budget import Budget

METRICS = {
    "metric.weight_clean_q10": 0.4,
    "metric.weight_clean_q50": 0.6,
    "metric.weight_clean_q90": 0.8,
} | {
    "metric.weight_corrupted_q10": 0.1,
    "metric.weight_corrupted_q50": 0.2,
    "metric.weight_corrupted_q90": 0.3,
}


def result(method: str, seed: int, final: float, cleans: bool = True) -> RunResult:
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "seconds": 0.5 * step,
            "oracle_calls": 10 * step,
            "metric.test_accuracy": final * step / 4,
        }
        for step in range(5)
    ]
    if cleans:
        rows = [{**row, **METRICS} for row in rows]
    summary = {"metrics": {"test_accuracy": final}, "outer_steps": 4, "oracle_calls": 40}
    info = RunInfo(task="t", method=method, seed=seed, budget=Budget(outer_steps=4))
    return RunResult(info=info, theta={}, x={"x": torch.zeros(1)}, summary=summary, records=rows)


RESULTS = {
    "a": [result("a", 0, 0.8), result("a", 1, 0.9)],
    "b": [result("b", 0, 0.7, cleans=False), result("b", 1, 0.78, cleans=False)],
}


# --- statistics
# --------------------------------------------------------------------------------------------------


def points(values: list[float], method: str = "m", steps: int = 4) -> list[Point]:
    return [
        Point(
            seed=seed,
            metrics={"acc": value},
            outer_steps=steps + seed,
            oracle_calls=40,
            seconds=2.0,
            method=method,
            role="floor" if method in ("uniform", "theta0") else "",
        )
        for seed, value in enumerate(values)
    ]


A = [0.91, 0.88, 0.93, 0.90]
B = [0.89, 0.87, 0.90, 0.88]
C = [0.905, 0.882, 0.928, 0.897]


def test_on_data_sources_only_what_is_of_the_mixture_is_judged() -> None:
    """And what was measured of a model tuned on it."""
    point = attrs.evolve(
        points([1.0])[0], reason=UNJUDGED, reasons={"recovery_error": "", "gsm8k": ""}
    )
    for metric, judged in (
        ("recovery_error", True),
        ("gsm8k", True),
        ("test_perplexity", False),
        ("test_loss", False),
        ("acc", False),
    ):
        assert (point.unjudged(metric) == "") is judged, metric
    assert points([1.0])[0].unjudged("test_perplexity") == ""


def test_differences_are_paired_and_agree_with_scipy() -> None:
    results = table({"a": points(A), "b": points(B)}, "acc", reference="b")
    best, base = results.rows
    low, high = stats.ttest_rel(A, B).confidence_interval(0.95)
    assert best.difference is not None
    assert best.difference.mean - best.difference.half_width == pytest.approx(low, rel=1e-9)
    assert best.difference.mean + best.difference.half_width == pytest.approx(high, rel=1e-9)
    # seed by seed the two differ by far less than their own spread over seeds
    assert best.difference.half_width < 0.5 * best.metrics["acc"].half_width
    assert base.difference is None
    assert best.outer_steps_range == (4, 7)


def test_only_common_seeds_are_paired() -> None:
    [_, row] = table({"a": points(A), "b": points(B)[1:]}, "acc", reference="a").rows
    assert row.difference is not None
    assert row.difference.count == 3
    assert row.difference.mean == pytest.approx((0.87 - 0.88 + 0.90 - 0.93 + 0.88 - 0.90) / 3)


def test_no_winner_unless_every_interval_excludes_zero() -> None:
    a, b, c = (points(3 * values) for values in (A, B, A[::-1]))
    assert table({"a": a, "b": b}, "acc").winner == "a"
    assert table({"a": a, "b": b}, "acc", higher_is_better=False).winner == "b"
    assert table({"a": a, "b": b, "c": c}, "acc").winner is None, "a and c are too close"
    few = table({"a": a[:9], "b": b[:9]}, "acc")
    assert few.winner is None
    assert few.remarks == ["9 seeds: a claim needs 10"], "though the interval excludes zero"
    assert few.pairs["a", "b"].excludes_zero
    assert table({"a": points(A[:1]), "b": points(B[:1])}, "acc").winner is None, (
        "one seed has no interval"
    )
    assert table({"a": points(A)}, "acc").winner is None, "there is nobody to beat"
    assert table({"a": points(A), "b": points(A)}, "acc").winner is None


def test_nan_is_counted_and_never_averaged_away() -> None:
    results = table(
        {"a": points([0.91, math.nan, 0.93, 0.90]), "b": points(B)}, "acc", reference="b"
    )
    row = results.rows[0]
    assert row.undefined == 1
    assert row.metrics["acc"].count == 3
    assert row.metrics["acc"].mean == pytest.approx((0.91 + 0.93 + 0.90) / 3)
    assert row.difference is not None
    assert row.difference.count == 4, "NaN counts as the worst value"
    assert row.difference.mean == pytest.approx((0.02 - 0.0 + 0.03 + 0.02) / 4)
    assert results.winner is None, "what is undefined somewhere has not won"
    assert "1 NaN" in results.columns[0]["note"]
    assert "(n = 3)" in next(
        text for name, text in results.columns[0].items() if name.startswith("acc")
    )


def test_failed_runs_are_counted_and_a_method_without_results_is_shown() -> None:
    results = table(
        {"a": points(3 * A), "b": points(3 * B), "c": []},
        "acc",
        "a",
        failed={"b": [12], "c": [0, 1, 2, 3]},
    )
    assert [row.failed for row in results.rows] == [0, 1, 4]
    assert results.winner == "a"
    assert results.columns[2]["note"] == "4 failed"
    assert results.as_dict()["methods"][2]["metrics"] == {}
    assert table({"a": points(3 * A), "b": points(3 * B)}, "acc", failed={"a": [12]}).winner is None


def test_what_is_worse_than_uniform_is_told_so() -> None:
    low = points([value / 2 for value in B])
    high = points([0.92, 0.89, 0.94, 0.91])
    results = table(
        {
            "u": points(A, "uniform"),
            "b": low,
            "c": points(C),
            "d": high,
            "e": points([1.91, 1.78, 1.95, 1.9]),
        },
        "acc",
    )
    assert [(row.method, row.notes) for row in results.rows] == [
        ("b", ("worse than u",)),
        ("c", ("not ahead of u",)),
        ("d", ("better than u by the same in every seed",)),
        ("e", ()),
        ("u", ()),
    ]
    assert table({"t": points(A, "theta0"), "b": low}, "acc").rows[0].notes == ("worse than t",)


def test_references_are_set_apart_and_a_ceiling_is_nobody_to_beat() -> None:
    draw = np.random.default_rng(0)

    def around(mean: float, role: str = "", method: str = "") -> list[Point]:
        values = (mean + 0.002 * draw.normal(size=10)).tolist()
        return [attrs.evolve(point, role=role, method=method) for point in points(values)]

    runs = {
        "truth": around(0.95, "ceiling", "oracle-joint"),
        "floor": around(0.80, "floor", "uniform"),
        "best": around(0.90),
        "floor-last": around(0.85, "floor", "validation-only"),
        "bad": around(0.70),
    }
    runs["same"] = points([point.metrics["acc"] for point in reversed(runs["floor-last"])])
    results = table(runs, "acc", "floor")
    assert [row.method for row in results.rows] == [
        "best",
        "bad",
        "same",
        "floor",
        "floor-last",
        "truth",
    ]
    assert results.groups == [3]
    assert (results.winner, results.floor) == ("best", "floor-last")
    rows = {row.method: row for row in results.rows}
    assert rows["same"].notes == ("not ahead of floor-last",)
    assert rows["bad"].notes == ("worse than floor-last",)
    assert [row.ahead_of_floor for row in results.rows] == [True, False, False, None, None, None]
    assert rows["best"].recovered is not None
    assert rows["best"].recovered.value == pytest.approx(0.5, abs=0.02)
    assert rows["floor-last"].recovered is None, "it is 0 by definition"
    assert results.columns[0]["recovered share"].startswith("0.5")
    assert [row["role"] for row in results.columns] == ["", "", "", "floor", "floor", "ceiling"]
    assert results.remarks == []
    assert table({label: runs[label] for label in ("same", "floor-last")}, "acc").remarks == [
        "same is not ahead of floor-last, the best of the references that learn nothing about θ"
    ]
    assert table({label: group[:3] for label, group in runs.items()}, "acc").remarks == [
        "3 seeds: no claim can be made from so few; a claim needs 10"
    ]


def test_an_x_that_never_trained_gets_no_verdict_and_none_is_made_on_it() -> None:
    """`b` would be worse than uniform, and `a` the winner over it: its losses are shown, and
    nothing is concluded.
    """
    runs = {"u": points(3 * A, "uniform"), "b": points(3 * B), "a": points(12 * [1.0])}
    runs["b"] = [attrs.evolve(point, reason="x is the warm-up's") for point in runs["b"]]
    results = table(runs, "acc", "u")
    by = {row.method: row for row in results.rows}
    assert by["b"].notes == ("no verdict: x is the warm-up's",)
    assert by["b"].metrics["acc"].mean == pytest.approx(sum(B) / len(B))
    assert by["b"].difference is None or by["b"].difference.count == 0
    assert (by["b"].undefined, by["b"].winner) == (0, False)
    assert by["a"].winner
    runs["b"] = [attrs.evolve(point, metrics={"acc": 2.0}) for point in runs["b"]]
    assert table(runs, "acc", "u").winner == "a", (
        "what was not trained is not what others have to beat"
    )


def test_losses_on_data_sources_get_no_verdict_and_what_to_do_is_said_first() -> None:
    """They are those of the x that each method trained its weights with. How far θ is from a known
    mixture is judged, and so is the loss of a model that was tuned on the result."""

    def runs_of(values: list[float], method: str = "m") -> list[Point]:
        return [
            attrs.evolve(
                point,
                metrics=dict.fromkeys(
                    ("test_loss", "recovery_error", "tuned_test_loss"), point.metrics["acc"]
                ),
                reason=UNJUDGED,
                reasons={"recovery_error": "", "tuned_test_loss": ""},
            )
            for point in points(3 * values, method)
        ]

    runs = {"a": runs_of(A), "b": runs_of(B), "u": runs_of([0.7, 0.71, 0.72, 0.7], "uniform")}
    losses = table(runs, "test_loss", "u", higher_is_better=True)
    assert losses.winner is losses.floor is losses.forest is None
    assert {row.notes for row in losses.rows} == {()}
    assert {row.ahead_of_floor for row in losses.rows} == {None}
    assert "− u" not in losses.columns[0]
    assert losses.rows[0].metrics["test_loss"].mean == pytest.approx(sum(A) / len(A))
    what_to_do = (
        "compare by --metric recovery_error where a reference mixture is known, else by "
        "hgms mix compare"
    )
    assert what_to_do in losses.remarks[0]
    for metric in ("recovery_error", "tuned_test_loss"):
        assert table(runs, metric, "u", higher_is_better=True).winner == "a"
        assert table(runs, metric, "u", higher_is_better=True).remarks == []
    runs["a"] = [attrs.evolve(point, reason="x is the warm-up's") for point in runs["a"]]
    assert table(runs, "recovery_error", "u", higher_is_better=True).winner == "a", (
        "θ is θ, however x was trained"
    )


def test_one_seed_says_little_about_uniform_and_what_nobody_has_is_no_column() -> None:
    results = table(
        {"u": points(A[:1], "uniform"), "b": points(B[:1])}, "acc", "u", failed={"c": [0]}
    )
    assert [row.notes for row in results.rows] == [("not ahead of u: one seed",), ()]
    assert list(results.columns[0]) == [
        "method",
        "role",
        "acc ↑",
        "− u",
        "outer steps",
        "oracle calls",
        "seconds",
        "note",
    ]
    assert list(table({"u": points(A)}, "acc", "u").columns[0]) == [
        "method",
        "acc ↑",
        "outer steps",
        "oracle calls",
        "seconds",
    ]


def test_a_table_of_finished_runs() -> None:
    [best, base] = table(RESULTS, "test_accuracy", reference="b").rows
    assert best.difference is not None
    assert best.difference.mean == pytest.approx(0.11)
    assert best.difference.half_width == pytest.approx(12.706 * 0.01, rel=1e-3)
    assert best.seconds.mean == 2.0
    assert best.as_dict()["outer_steps"] == {"mean": 4.0, "half_width": 0.0, "n": 2}
    assert base.as_dict()["peak_memory_bytes"] is None
    [single] = table({"a": RESULTS["a"][:1]}, "test_accuracy").rows
    assert single.as_dict()["metrics"]["test_accuracy"]["half_width"] is None


# --- cells
# --------------------------------------------------------------------------------------------------


def run(
    out: Path, *methods: Any, seeds: int = 3, budget: str = "4 steps", **more: Any
) -> Comparison:
    settings = {"jobs": 0, "run": {"checkpoint_seconds": 0.0}} | more
    return compare("bowl", list(methods) or ["walk"], budget, seeds, out, **settings)


def contents(out: Path) -> dict[str, bytes]:
    """Everything that has to be the same for every run of one seed."""
    kept = ("checkpoint", "steps", "summary")
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.name.startswith(kept)
    }


BREAKING = {"name": "walk", "label": "breaking", "breaks": "raise"}


@pytest.mark.usefixtures("bowl")
def test_a_comparison_from_python(tmp_path: Path) -> None:
    still = {"name": "walk", "label": "still", "move": {"lr": 1e-6}}
    comparison = run(
        tmp_path, still, {"name": "walk", "label": "quick", "move": {"lr": 0.3}}, seeds=10
    )
    assert comparison.complete
    [results] = comparison.tables
    assert (results.task, results.metric, results.higher_is_better, results.reference) == (
        "bowl",
        "distance",
        False,
        "still",
    )
    assert results.winner == "quick"
    assert [row.outer_steps.mean for row in results.rows] == [4, 4]
    assert [row.oracle_calls.mean for row in results.rows] == [8, 8]
    assert "quick ★" in str(comparison)
    assert comparison.as_dict()["tasks"][0]["methods"][1]["winner"]
    [resources] = tmp_path.glob("bowl/quick-*/seed-0/resources.json")
    read = json.loads(resources.read_bytes())
    assert read["peak_memory_bytes"] > 1e7
    assert read["wall_seconds"] > 0


@pytest.mark.usefixtures("bowl")
def test_objects_of_registered_classes_are_accepted_and_others_named(tmp_path: Path) -> None:
    comparison = compare(
        load({"budget": "1 step", "task": "bowl", "method": "walk"}).pairs["bowl", "walk"].task,
        "walk",
        Budget(outer_steps=2),
        [4],
        tmp_path,
        jobs=0,
    )
    assert [row.outer_steps.mean for row in comparison.tables[0].rows] == [2]

    class Stranger:
        name = "stranger"

    with rejects("wrong-type", "methods", of=ConfigError) as caught:
        run(tmp_path, Stranger())
    assert "Stranger" in caught.value.message
    assert caught.value.message.endswith("init, step, result")


@pytest.mark.usefixtures("bowl")
def test_finished_cells_are_kept_and_broken_ones_go_on(tmp_path: Path) -> None:
    run(tmp_path / "whole")
    run(tmp_path / "broken", seeds=2)
    before = {
        path: path.stat().st_mtime_ns for path in tmp_path.glob("broken/bowl/*/seed-*/env.json")
    }
    [first, _] = sorted(before)
    (first.parent / "summary.json").unlink()  # killed after its last checkpoint
    comparison = run(tmp_path / "broken")
    assert comparison.complete
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
    assert [path.stat().st_mtime_ns > before[path] for path in sorted(before)] == [True, False]


@pytest.mark.usefixtures("bowl")
def test_failed_cells_are_kept_with_their_reason_and_retried_on_request(tmp_path: Path) -> None:
    comparison = run(
        tmp_path,
        "walk",
        BREAKING,
        {"name": "walk", "label": "memory", "breaks": "memory", "seed": 0},
    )
    assert [(cell.method, cell.seed, cell.status) for cell in comparison.failures] == [
        ("memory", 0, "failed"),
        ("breaking", 1, "failed"),
    ]
    memory, breaking = comparison.failures
    assert memory.reason.startswith("step 3: out of memory: MemoryError")
    assert breaking.reason.startswith("RuntimeError: CUDA out of memory, or so (grid_plugin.py:128")
    assert (breaking.path / "traceback.txt").exists()
    assert [row.failed for row in comparison.tables[0].rows] == [0, 1, 1]
    assert comparison.tables[0].rows[1].metrics["distance"].count == 2
    assert comparison.as_dict()["failed"][1]["path"] == str(comparison.failures[1].path)
    summary = json.loads((comparison.failures[1].path / "summary.json").read_bytes())
    assert (summary["status"], summary["outer_steps"]) == ("failed", 2)

    stamp = (comparison.failures[1].path / "summary.json").stat().st_mtime_ns
    run(tmp_path, "walk", BREAKING)
    assert (comparison.failures[1].path / "summary.json").stat().st_mtime_ns == stamp, "kept"
    again = run(tmp_path, "walk", BREAKING, retry_failed=True)
    assert (comparison.failures[1].path / "summary.json").stat().st_mtime_ns > stamp
    assert len(again.failures) == 1
    assert "--retry-failed" in str(again)


@pytest.mark.usefixtures("bowl")
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "summary.json").write_text("{"), "summary.json"),
        (lambda folder: (folder / "summary.json").write_text("[]"), "summary.json"),
        (lambda folder: (folder / "summary.json").write_text('{"status": "dnoe"}'), "no checksum"),
        (lambda folder: (folder / "config.toml").write_text("seed = 7"), "another configuration"),
        (
            lambda folder: (folder / "config.toml").write_bytes(b"\xff\x00["),
            "another configuration",
        ),
        (
            lambda folder: (
                (folder / "summary.json").unlink(),
                (folder / "steps.jsonl").write_text("x\n"),
            ),
            "steps.jsonl",
        ),
    ],
)
def test_damaged_folders_are_named_and_left_alone(
    tmp_path: Path, damage: Callable[[Path], Any], reason: str
) -> None:
    run(tmp_path, seeds=2)
    [folder] = tmp_path.glob("bowl/*/seed-1")
    damage(folder)
    before = {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name != "resources.json"
    }
    comparison = run(tmp_path, seeds=2)
    [failure] = comparison.failures
    assert (failure.status, failure.path) == ("damaged", folder)
    assert reason in failure.reason
    assert {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name != "resources.json"
    } == before
    assert comparison.tables[0].rows[0].metrics["distance"].count == 1


@pytest.mark.usefixtures("bowl")
def test_a_full_disk_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is sound: the cell goes on when there is space again."""
    append = RunFolder.append

    def full(folder: RunFolder, record: Any, timing: Any) -> None:
        if folder.path.name == "seed-1" and record["step"] == 2:
            raise DiskError("cannot-write", "the disk is full", place=("steps.jsonl",))
        append(folder, record, timing)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", full)
        [failure] = run(tmp_path, seeds=2).failures
    assert (failure.status, failure.reason) == ("begun", "the disk is full (steps.jsonl)")
    assert run(tmp_path, seeds=2).complete


@pytest.mark.usefixtures("bowl")
@pytest.mark.parametrize("jobs", [0, 1])
def test_a_run_that_another_process_carries_out_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    monkeypatch.setattr(coordinator, "POLL", 0.01)
    run(tmp_path, seeds=2)
    [folder] = tmp_path.glob("bowl/*/seed-1")
    finished = (folder / "summary.json").read_bytes()
    (folder / "summary.json").unlink()
    resources = (folder / "resources.json").read_bytes()
    said: list[str] = []

    def other_ends(line: str) -> None:
        said.append(line)
        (folder / "summary.json").write_bytes(finished)

    monkeypatch.setattr(Board, "say", lambda _board, line: other_ends(line))
    with leased(folder):
        comparison = run(tmp_path, seeds=2, jobs=jobs)
    assert comparison.complete
    assert said[-1] == "waiting for 1 run that another process carries out"
    assert (folder / "resources.json").read_bytes() == resources, (
        "they are of whoever carried it out"
    )


def test_an_error_names_the_last_line_of_somebody_elses_code_and_none_of_ours() -> None:
    with pytest.raises(TypeError) as caught:
        Budget(outer_steps=3).spent(0.0, "2", 0)  # type: ignore[arg-type]
    assert "(test_compare.py:" in cell._place(caught.value)
    inside = caught.value.__traceback__
    assert inside is not None
    assert cell._place(caught.value.with_traceback(inside.tb_next)) == ""


@pytest.mark.usefixtures("bowl")
def test_a_worker_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose it may be: a stranger's attrs.py would run in every worker."""
    monkeypatch.chdir(tmp_path)
    Path("attrs.py").write_text(
        "import pathlib\npathlib.Path('executed').touch()\nraise SystemExit"
    )
    assert run(tmp_path / "runs", seeds=1, jobs=1).complete
    assert not Path("executed").exists()


@pytest.mark.usefixtures("bowl")
def test_nan_metrics_are_shown(tmp_path: Path) -> None:
    comparison = compare(
        {"name": "bowl", "undefined_at": [1]}, "walk", "3 steps", 3, tmp_path, jobs=0
    )
    assert comparison.complete
    assert comparison.tables[0].rows[0].undefined == 1
    assert "1 NaN" in str(comparison)


# --- processes
# --------------------------------------------------------------------------------------------------

GRID = """
budget = "20 steps"
seeds = 2
baselines = false
task = ["bowl"]

[run]
out = "runs"
checkpoint_seconds = 0.0

[[method]]
name = "walk"
pause = 0.02

[[method]]
name = "walk"
label = "quick"
move.lr = 0.3
pause = 0.02
"""


PLUGIN = Path(__file__).parents[2] / "support" / "grid_plugin.py"


COMPARE = ("compare", "grid.toml", "--plugin", str(PLUGIN))


def prepared(folder: Path, text: str = GRID) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "grid.toml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, server: Server) -> dict[str, bytes]:
    """What a comparison writes that is left alone."""
    folder = prepared(tmp_path_factory.mktemp("whole"))
    server.start(folder, *COMPARE, "--jobs", "0")
    assert server.end() == 0
    files = contents(folder / "runs")
    assert len(files) == 4 * 4
    return files


@pytest.mark.parametrize("kills", [3, pytest.param(6, marks=pytest.mark.extended)])
def test_killed_again_and_again_it_equals_the_one_left_alone(
    tmp_path: Path, server: Server, whole: dict[str, bytes], kills: int
) -> None:
    folder = prepared(tmp_path / "killed")
    chance = random.Random(0)
    (folder / "hold-1-19").touch()  # nothing passes the 62nd of 84 rows while kills fall
    for _ in range(kills):
        goal = min(rows_written(folder) + chance.randint(2, 54 // kills), 62)
        process = server.start(folder, *COMPARE, "--jobs", "0")
        strike(process, folder, goal, signal.SIGKILL, chance.uniform(0, 0.05))
        assert server.end() == -signal.SIGKILL
    (folder / "hold-1-19").unlink()
    server.start(folder, *COMPARE, "--jobs", "0")
    assert server.end() == 0
    assert contents(folder / "runs") == whole


def test_sigterm_saves_every_running_cell(
    tmp_path: Path, server: Server, whole: dict[str, bytes]
) -> None:
    """As a batch system ends a job whose time is up: checkpoints are written, and nothing is
    recorded as a failure.
    """
    folder = prepared(
        tmp_path / "ended", GRID.replace("checkpoint_seconds = 0.0", "checkpoint_seconds = 1000.0")
    )
    (folder / "hold-0-12").touch()
    process = server.start(folder, *COMPARE, "--jobs", "2")
    strike(process, folder, 2 * 13, signal.SIGTERM, 0.03)
    assert server.end() == 128 + signal.SIGTERM
    assert len(list(folder.rglob("checkpoint.json"))) == 2
    assert not list(folder.rglob("summary.json"))
    (folder / "hold-0-12").unlink()
    server.start(folder, *COMPARE, "--jobs", "0")
    assert server.end() == 0
    left, went_on = (
        sorted(data for name, data in files.items() if name.endswith("steps.jsonl"))
        for files in (whole, contents(folder / "runs"))
    )
    assert went_on == left


def test_with_workers_kills_and_ctrl_c_change_nothing(
    tmp_path: Path, server: Server, whole: dict[str, bytes]
) -> None:
    """SIGKILL of the parent alone, so that its workers have to end by themselves; then Ctrl-C;
    then to the end.
    """
    folder = prepared(tmp_path / "killed")
    # the first run ends after the first blow, the third after the second
    (folder / "hold-0-19").touch()
    process = server.start(folder, *COMPARE, "--jobs", "1")
    strike(process, folder, 5, signal.SIGKILL, 0.03)
    assert server.end() == -signal.SIGKILL
    (folder / "hold-0-19").unlink()
    (folder / "hold-1-19").touch()
    process = server.start(folder, *COMPARE, "--jobs", "1")
    strike(process, folder, rows_written(folder) + 25, signal.SIGINT, 0.03)
    assert server.end() == 130
    (folder / "hold-1-19").unlink()
    errors = (folder / "err").read_text()
    assert "run the same command again" in errors
    assert "Traceback" not in errors
    server.start(folder, *COMPARE, "--jobs", "2", "--json")
    assert server.end() == 0, (folder / "err").read_text()
    assert contents(folder / "runs") == whole
    printed = json.loads((folder / "out").read_text())
    assert [row["method"] for row in printed["tasks"][0]["methods"]] == ["walk", "quick"]


@pytest.mark.usefixtures("bowl")
def test_ctrl_c_between_two_runs_says_how_to_go_on_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def struck(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Board, "ended", struck)
        with pytest.raises(Interrupted) as caught:
            run(tmp_path, seeds=2)
    assert "run the same command again" in caught.value.hint
    assert run(tmp_path, seeds=2).complete


def test_workers_know_the_plugins_that_were_added_in_python(bowl: Path, tmp_path: Path) -> None:
    assert str(bowl).endswith(".py")  # added to the host, and told to nobody else
    comparison = run(tmp_path, seeds=1, jobs=1)
    assert comparison.complete, str(comparison)
    assert len(comparison.tables[0].rows) == 1


def test_a_killed_worker_takes_no_other_cell_with_it(tmp_path: Path, server: Server) -> None:
    folder = prepared(
        tmp_path, GRID.replace('label = "quick"', 'label = "quick"\nbreaks = "kill"\nseed = 0')
    )
    server.start(
        folder,
        *COMPARE,
        "--set",
        "method.pause=0.0",
        "--budget",
        "4 steps",
        "--jobs",
        "1",
        "--json",
    )
    assert server.end() == 1
    printed = json.loads((folder / "out").read_text())
    [failure] = printed["failed"]
    assert (failure["method"], failure["seed"], failure["status"]) == ("quick", 0, "failed")
    assert "killed by SIGKILL (out of memory, most often), for the 3rd time" in failure["reason"]
    walk, quick = printed["tasks"][0]["methods"]
    assert (walk["failed"], quick["failed"]) == (0, 1)
    assert walk["metrics"]["distance"]["n"] == 2
    assert quick["metrics"]["distance"]["n"] == 1
    assert walk["peak_memory_bytes"]["mean"] > 1e7


# --- the command line
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def hgms(bowl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(main, ["compare", *arguments])


def test_flags_alone_make_a_grid(hgms: Callable[..., Any]) -> None:
    what = ["--task", "bowl", "--set", "task.rows=7", "--methods", "walk"]
    flags = [*what, "--budget", "3 steps", "--seeds", "5-6", "--out", "o"]
    listed = hgms(*flags, "--dry-run", "--json")
    assert [(row["seed"], row["state"]) for row in json.loads(listed.stdout)] == [
        (5, "new"),
        (6, "new"),
    ]
    done = hgms(*flags, "--jobs", "0")
    assert done.exit_code == 0, done.stderr
    assert "distance ↓" in done.stdout
    assert "[2/2] bowl, walk, seed 6: done" in done.stderr
    assert "rows = 7" in next(Path("o").rglob("config.toml")).read_text()
    assert {row["state"] for row in json.loads(hgms(*flags, "--dry-run", "--json").stdout)} == {
        "done"
    }
    assert json.loads(hgms(*flags, "--jobs", "0", "--json").stdout)["seeds"] == [5, 6]


def test_stated_jobs_with_a_budget_in_seconds_say_that_timings_share_the_machine(
    bowl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    counts: list[int] = []

    class Idle(Local):
        def carry_out(self, jobs: Any, report: Any) -> Iterator[Any]:
            counts.append(self.count)
            for job in jobs:
                yield Ending(job=job, outcome={"status": "stopped", "error": None})

    monkeypatch.setattr("hgms.comparison.run_grid.Local", Idle)
    monkeypatch.setattr("hgms.comparison.run_grid.cores", lambda: 8)
    timed, counted = (
        load({"budget": text, "task": "bowl", "method": "walk", "run": {"out": str(tmp_path)}})
        for text in ("5 s", "5 steps")
    )
    run_grid(timed, say=lines.append)
    assert lines == []
    run_grid(timed, jobs=2, say=lines.append)
    assert "share this machine" in lines[0]
    run_grid(
        attrs.evolve(timed, run=attrs.evolve(timed.run, clock="cpu")), jobs=2, say=lines.append
    )
    run_grid(counted, say=lines.append)
    assert len(lines) == 1
    assert counts == [1, 2, 2, 8]


@pytest.mark.parametrize(
    ("arguments", "stated"),
    [
        (["--task", "bowl", "--methods", "walk", "--budget", "0s"], "(budget.seconds)"),
        (["--task", "bowl", "--methods", "walk", "--budget", "60"], "(budget)"),
        (["--task", "bowl", "--methods", "walk"], "(budget)"),
        (["--task", "bowl", "--methods", "walk", "--budget", "1e999 steps"], "(budget)"),
        (["--task", "bowl", "--methods", "wlak", "--budget", "2 steps"], "(method.wlak.name)"),
        (["--task", "bowl", "--methods", "needy", "--budget", "2 steps"], "(method.needy)"),
        (
            ["--task", "bowl", "--methods", "walk", "--budget", "2 steps", "--seeds", "x"],
            "'--seeds'",
        ),
        (
            ["--task", "bowl", "--methods", "walk", "--budget", "2 steps", "--seeds", "5-3"],
            "not '5-3'",
        ),
        (
            [
                "--task",
                "bowl",
                "--methods",
                "walk",
                "--budget",
                "2 steps",
                "--seeds",
                "0-99999999999",
            ],
            "at most 100,000 seeds",
        ),
        (
            [
                "--task",
                "bowl",
                "--methods",
                "walk",
                "--budget",
                "2 steps",
                "--seeds",
                "99999999999",
            ],
            "(seeds)",
        ),
        (
            [
                "--task",
                "bowl",
                "--methods",
                "walk",
                "--budget",
                "2 steps",
                "--set",
                "run.device=mps",
            ],
            "(run.device)",
        ),
        (
            ["--task", "bowl", "--methods", "walk", "--budget", "2 steps", "--scale", "cpu"],
            "(--scale cpu)",
        ),
        (["--task", "bowl", "--methods", "walk", "--budget", "2 steps", "--out", "file"], "(file)"),
        (
            ["--task", "bowl", "--methods", "walk", "--budget", "2 steps", "--set", "rows=3"],
            "(--set rows=3)",
        ),
        (["--methods", "walk", "--budget", "2 steps"], "(task)"),
        (["--task", "bowl", "--budget", "2 steps"], "(method)"),
        (["nowhere.toml"], "(nowhere.toml)"),
    ],
)
def test_bad_input_leaves_with_2_before_anything_runs(
    hgms: Callable[..., Any], arguments: list[str], stated: str
) -> None:
    Path("file").touch()
    done = hgms(*arguments)
    assert done.exit_code == 2
    assert stated in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("runs").exists()


def test_a_dry_run_lists_trials_too_and_says_how_long_it_takes(hgms: Callable[..., Any]) -> None:
    sweep = "[sweep]\ntrials = 3\nbudget = '2s'\nspace.walk = { noise = [0.1, 0.2, 0.3] }"
    Path("grid.toml").write_text(
        f'budget = "5s"\nseeds = 2\ntask = ["bowl"]\nmethod = ["walk"]\n{sweep}'
    )
    listed = hgms("grid.toml", "--dry-run")
    assert listed.exit_code == 0, listed.stderr
    assert listed.stdout.splitlines()[-1] == "5 of 5 runs to do: 16 s of steps, one run at a time"
    rows = json.loads(hgms("grid.toml", "--dry-run", "--json").stdout)
    assert [(row["trial"], row["seed"], row["state"]) for row in rows] == [
        (0, 100, "new"),
        (1, 100, "new"),
        (2, 100, "new"),
        (None, 0, "new"),
        (None, 1, "new"),
    ]
    assert not Path("runs").exists()


def test_a_dry_run_estimates_from_runs_that_have_ended(
    hgms: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--task", "bowl", "--methods", "walk", "--budget", "3 steps", "--out", "o"]

    def last(*more: str) -> str:
        return str(hgms(*flags, *more, "--dry-run").stdout.splitlines()[-1])

    assert (
        last("--seeds", "2")
        == "2 of 2 runs to do; how long they take is known when one of each method has ended"
    )
    assert hgms(*flags, "--seeds", "2", "--jobs", "0").exit_code == 0
    assert last("--seeds", "2") == "0 of 2 runs to do"
    took = iter([30.0, 50.0] * 2)
    monkeypatch.setattr(RunFolder, "records", lambda _: [{"seconds": 1.0}, {"seconds": next(took)}])
    assert last("--seeds", "5") == "3 of 5 runs to do: about 120 s of steps, one run at a time"
    sweep = "[sweep]\ntrials = 3\nbudget = '2 steps'\nspace.walk = { noise = [0.1, 0.2, 0.3] }"
    Path("grid.toml").write_text(
        f'budget = "5s"\nseeds = 2\ntask = ["bowl"]\nmethod = ["walk"]\n{sweep}'
    )
    assert hgms("grid.toml", "--dry-run").stdout.splitlines()[-1] == (
        "5 of 5 runs to do: at least 10 s of steps, one run at a time; of 3 none like it has "
        "ended, to tell how long they take"
    )


def test_failures_leave_with_1(hgms: Callable[..., Any]) -> None:
    Path("grid.toml").write_text(
        'budget = "4 steps"\nseeds = 2\ntask = ["bowl"]\n[[method]]\nname = "walk"\n'
        'breaks = "raise"'
    )
    done = hgms("grid.toml", "--jobs", "0")
    assert done.exit_code == 1
    assert "failed: bowl, walk, seed 1: RuntimeError: CUDA out of memory, or so" in done.stdout


# --- pictures and views
# --------------------------------------------------------------------------------------------------


def test_pictures_are_written_as_png_and_svg(tmp_path: Path) -> None:
    rows = {method: runs[0].records for method, runs in RESULTS.items()}
    assert draw_weights(rows, tmp_path / "still") == [], "weights that never change say nothing"
    name = "metric.weight_clean_q50"
    rows["a"] = [{**row, name: row[name] + 0.01 * row["step"]} for row in rows["a"]]
    png, svg = draw_weights(rows, tmp_path / "new" / "folder" / "weights")
    assert (png.name, svg.name) == ("weights.png", "weights.svg")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in svg.read_bytes()[:2000]


def test_weights_that_are_not_recorded_are_not_drawn(tmp_path: Path) -> None:
    assert draw_weights({"b": RESULTS["b"][0].records}, tmp_path / "weights") == []


def test_view_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as view:
        view.watch(RESULTS["a"][0].info, {"step": 3, "upper_loss": 0.5}, 0.5)
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    import rich.console

    written = io.StringIO()
    original = rich.console.Console
    monkeypatch.setattr(
        rich.console,
        "Console",
        lambda **_: original(file=written, force_terminal=True, width=250, color_system=None),
    )
    return written


TERMINAL = """
import os, pty
process, handle = pty.fork()
if process == 0:
    import termios
    from hgms.executors import Board
    from hgms.runs import Progress
    flag = lambda: bool(termios.tcgetattr(0)[3] & termios.ECHOCTL)
    flags = [flag()]
    for view in (Progress(), Board(2)):
        with view:
            flags.append(flag())
        flags.append(flag())
    print(flags, flush=True)
    os._exit(0)
said = b""
try:
    while part := os.read(handle, 1000):
        said += part
except OSError:
    pass
print(said.decode().splitlines()[-1])
"""


def test_ctrl_c_is_not_echoed_into_a_view() -> None:
    """It would push the last line down, and the first one would stand twice."""
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(
        [sys.executable, "-c", TERMINAL],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.stdout.splitlines()[-1].endswith("[True, False, True, False, True]"), done.stderr


def test_view_shows_the_numbers_on_a_terminal(terminal: io.StringIO) -> None:
    record = {
        "step": 3,
        "upper_loss": 0.25,
        "lower_loss": 1.5,
        "gap": 0.01,
        "hypergradient_norm": 2.0,
        "outcome": "negative-curvature",
        "iterations": 7,
        "metric.test_accuracy": 0.875,
    }
    with Progress() as view:
        view.watch(RESULTS["a"][0].info, {**record, "step": 0}, 0.0)
        view.watch(RESULTS["a"][0].info, {**record, "step": 1}, 0.2)
        view.watch(RESULTS["a"][0].info, record, 0.5)
    shown = terminal.getvalue()
    for part in (
        "a seed 0",
        "50%",
        "f 0.25",
        "g 1.5",
        "gap 0.01",
        "negative-curvature in 7",
        "test 87.5 %",
        "steps/s",
        "s left",
    ):
        assert part in shown


def test_a_board_shows_which_process_carries_out_what_and_what_was_lost(
    terminal: io.StringIO, tmp_path: Path
) -> None:
    job = SimpleNamespace(path=tmp_path)
    marker = tmp_path / ".lease"
    with leased(tmp_path):
        with Board(1) as board:
            board.stage(job, "finetune: 24 rows")
        with Board(1) as board:
            board.say("one: its process was killed; it is taken up again")
            board.step(job, 0.5, {"step": 3})
        marker.write_text(re.sub("pid=.*\nhost=.*", "pid=77\nhost=node-2", marker.read_text()))
        with Board(1) as board:
            board.step(job, 0.75, {"step": 4})
    here = f"process {os.getpid()}"
    shown = terminal.getvalue()
    for part in (
        f"{here} · finetune: 24 rows",
        f"{here} · step 3",
        "it is taken up again",
        "process 77 on node-2 · step 4",
    ):
        assert part in shown


def test_a_comparison_shows_its_running_cells_and_its_failures_on_a_terminal(
    terminal: io.StringIO,
) -> None:
    with Board(2) as board:
        for title in ("t, a, seed 0", "t, b, seed 0"):
            board.began(title)
            board.step(title, 0.0, {"step": 0})
            board.step(title, 0.5, {"step": 3, "upper_loss": 0.25})
        board.ended("t, a, seed 0", "failed", HgmsError("out-of-memory", "out of memory\nand more"))
        board.ended("t, b, seed 0", "done", None)
    shown = terminal.getvalue()
    for part in (
        "all",
        "t, a, seed 0",
        "f 0.25",
        "50%",
        "t, a, seed 0: failed: out of memory",
        "2 of 2",
    ):
        assert part in shown
    assert "and more" not in shown
