"""Comparisons of a registered task: cells that fail, are damaged, or are broken off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from support.helpers import rejects
from support.made_runs import RESULTS, contents

from hgms.comparison import coordinator
from hgms.comparison.comparison import Comparison
from hgms.comparison.from_python import compare
from hgms.comparison.grid_file import load
from hgms.comparison.run_grid import run_grid
from hgms.executors import Board, Ending, Local
from hgms.runs import DiskError, RunFolder, leased
from hgms_core import ConfigError
from hgms_core.budget import Budget

pytestmark = pytest.mark.usefixtures("bowl")


def run(
    out: Path, *methods: Any, seeds: int = 2, budget: str = "3 steps", **more: Any
) -> Comparison:
    settings = {"jobs": 0, "run": {"checkpoint_seconds": 0.0}} | more
    return compare("bowl", list(methods) or ["walk"], budget, seeds, out, **settings)


def test_a_comparison_from_python(tmp_path: Path) -> None:
    methods = [
        {"name": "walk", "label": "still", "move": {"lr": 1e-6}},
        {"name": "walk", "label": "quick", "move": {"lr": 0.3}},
    ]
    comparison = run(tmp_path, *methods, seeds=10, budget="2 steps")
    [results] = comparison.tables
    assert (results.task, results.metric, results.higher_is_better) == ("bowl", "distance", False)
    assert (comparison.complete, results.reference, results.winner) == (True, "still", "quick")
    assert [(row.outer_steps.mean, row.oracle_calls.mean) for row in results.rows] == [(2, 4)] * 2
    assert "quick ★" in str(comparison)
    assert comparison.as_dict()["tasks"][0]["methods"][1]["winner"]
    [resources] = tmp_path.glob("bowl/quick-*/seed-0/resources.json")
    assert json.loads(resources.read_bytes())["peak_memory_bytes"] > 1e7


def test_objects_of_registered_classes_are_accepted_and_others_named(tmp_path: Path) -> None:
    task = load({"budget": "1 step", "task": "bowl", "method": "walk"}).pairs["bowl", "walk"].task
    undefined = attrs.evolve(task, undefined_at=(4,))
    comparison = compare(undefined, "walk", Budget(outer_steps=2), [3, 4], tmp_path, jobs=0)
    [row] = comparison.tables[0].rows
    assert (row.outer_steps.mean, row.undefined) == (2, 1)
    with rejects("wrong-type", "methods", of=ConfigError):
        run(tmp_path, object())


def test_finished_cells_are_kept_and_broken_ones_go_on(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(whole, seeds=3)
    run(broken)
    before = {path: path.stat().st_mtime_ns for path in sorted(broken.rglob("env.json"))}
    next(broken.rglob("seed-0/summary.json")).unlink()  # killed after its last checkpoint
    assert run(broken, seeds=3).complete
    assert contents(broken) == contents(whole)
    assert [path.stat().st_mtime_ns > then for path, then in before.items()] == [True, False]


def test_failed_cells_are_kept_with_their_reason_and_retried_on_request(tmp_path: Path) -> None:
    breaking = {"name": "walk", "label": "breaking", "breaks": "raise"}
    memory = {"name": "walk", "label": "memory", "breaks": "memory", "seed": 0}
    comparison = run(tmp_path, "walk", breaking, memory)
    first, failure = comparison.failures
    assert (first.method, first.seed, first.status) == ("memory", 0, "failed")
    assert first.reason.startswith("step 3: out of memory: MemoryError")
    assert (failure.method, failure.seed, failure.status) == ("breaking", 1, "failed")
    assert failure.reason.startswith("RuntimeError: CUDA out of memory, or so (grid_plugin.py:")
    assert (failure.path / "traceback.txt").exists()
    rows = comparison.tables[0].rows
    assert [(row.failed, row.metrics["distance"].count) for row in rows] == [(0, 2), (1, 1), (1, 1)]
    assert comparison.as_dict()["failed"][1]["path"] == str(failure.path)
    file = failure.path / "summary.json"
    assert json.loads(file.read_bytes())["outer_steps"] == 2
    stamp = file.stat().st_mtime_ns
    run(tmp_path, "walk", breaking)
    assert file.stat().st_mtime_ns == stamp, "kept"
    assert len(run(tmp_path, "walk", breaking, retry_failed=True).failures) == 1
    assert file.stat().st_mtime_ns > stamp


def test_damaged_folders_are_named_and_left_alone(tmp_path: Path) -> None:
    damages = [
        ("summary.json", b"{", "summary.json"),
        ("summary.json", b"[]", "summary.json"),
        ("summary.json", b'{"status": "dnoe"}', "no checksum"),
        ("config.toml", b"seed = 7", "another configuration"),
        ("config.toml", b"\xff\x00[", "another configuration"),
        ("steps.jsonl", b"x\n", "steps.jsonl"),
    ]
    run(tmp_path, budget="1 step", seeds=7)
    [method] = tmp_path.glob("bowl/*")
    for seed, (name, data, _) in enumerate(damages):
        (method / f"seed-{seed}" / name).write_bytes(data)
    (method / "seed-5" / "summary.json").unlink()
    kept = (*RESULTS, "config", "env", "timings")
    before = contents(method, kept)
    comparison = run(tmp_path, budget="1 step", seeds=7)
    failures = sorted(comparison.failures, key=lambda failure: failure.seed)
    assert [(it.seed, it.status) for it in failures] == [(seed, "damaged") for seed in range(6)]
    assert all(part in it.reason for it, (_, _, part) in zip(failures, damages, strict=True))
    assert contents(method, kept) == before
    assert comparison.tables[0].rows[0].metrics["distance"].count == 1


def test_a_full_disk_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is sound: the cell goes on when there is space again."""
    append = RunFolder.append

    def full(folder: RunFolder, record: Any, timing: Any) -> None:
        if folder.path.name == "seed-1" and record["step"] == 2:
            raise DiskError("cannot-write", "the disk is full", place=("steps.jsonl",))
        append(folder, record, timing)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", full)
        [failure] = run(tmp_path).failures
    assert (failure.status, failure.reason) == ("begun", "the disk is full (steps.jsonl)")
    assert run(tmp_path).complete


@pytest.mark.parametrize("jobs", [0, 1])
def test_a_run_that_another_process_carries_out_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    monkeypatch.setattr(coordinator, "POLL", 0.01)
    run(tmp_path)
    [summary] = tmp_path.glob("bowl/*/seed-1/summary.json")
    resources = summary.with_name("resources.json")
    finished, before = summary.read_bytes(), resources.read_bytes()
    summary.unlink()
    said: list[str] = []

    def other_ends(_board: Board, line: str) -> None:
        said.append(line)
        summary.write_bytes(finished)

    monkeypatch.setattr(Board, "say", other_ends)
    with leased(summary.parent):
        assert run(tmp_path, jobs=jobs).complete
    assert said[-1].startswith("waiting for 1 run")
    assert resources.read_bytes() == before, "they are of whoever carried it out"


@pytest.mark.extended
def test_workers_know_the_plugins_of_python_and_import_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose it may be: a stranger's attrs.py would run in every worker."""
    monkeypatch.chdir(tmp_path)
    Path("attrs.py").write_text(
        "import pathlib\npathlib.Path('executed').touch()\nraise SystemExit"
    )
    comparison = run(tmp_path / "runs", seeds=1, jobs=1)
    assert comparison.complete, str(comparison)
    assert not Path("executed").exists()


def test_stated_jobs_with_a_budget_in_seconds_say_that_timings_share_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[int] = []

    class Idle(Local):
        def carry_out(self, jobs: Any, report: Any) -> Iterator[Any]:
            events.append(self.count)
            return (Ending(job=job, outcome={"status": "stopped", "error": None}) for job in jobs)

    monkeypatch.setattr("hgms.comparison.run_grid.Local", Idle)
    monkeypatch.setattr("hgms.comparison.run_grid.cores", lambda: 8)
    table = {"task": "bowl", "method": "walk", "run": {"out": str(tmp_path)}}
    timed, counted = (load({**table, "budget": text}) for text in ("5 s", "5 steps"))
    on_cpu = attrs.evolve(timed, run=attrs.evolve(timed.run, clock="cpu"))
    for grid, jobs in ((timed, {}), (timed, {"jobs": 2}), (on_cpu, {"jobs": 2}), (counted, {})):
        run_grid(grid, say=lambda line: events.append("share this machine" in line), **jobs)
    assert events == [1, True, 2, 2, 8]
