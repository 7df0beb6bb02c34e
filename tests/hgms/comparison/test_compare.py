"""Comparisons of a registered task: cells that fail, are damaged, or are broken off."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.helpers import rejects
from support.run_folders import RESULTS, contents

from hgms.comparison.comparison import Comparison
from hgms.comparison.from_python import compare
from hgms.executors import Board, shared_work
from hgms.runs import RunFolder
from hgms.store import DiskError, hold_lease
from hgms_core import ConfigError

pytestmark = pytest.mark.usefixtures("bowl")


def run(
    out: Path, *methods: Any, seeds: int = 2, budget: str = "3 steps", **more: Any
) -> Comparison:
    settings = {"jobs": 0, "run": {"checkpoint_seconds": 0.0}} | more
    return compare("bowl", list(methods) or ["walk"], budget, seeds, out, **settings)


def test_a_resumed_comparison_removes_the_files_of_a_killed_process(tmp_path: Path) -> None:
    """A process may be killed after the summary of a run, before it removes the last state but one
    and its lease.
    """
    run(tmp_path, seeds=1)
    [config] = tmp_path.rglob("config.toml")
    code = f"""
import os
from pathlib import Path
from hgms.store import hold_lease
with hold_lease(Path({str(config.parent)!r}), patience=None):
    os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (config.parent / ".lease").exists()
    files = sorted(config.parent.iterdir())
    (config.parent / "checkpoint-1.safetensors").write_bytes(b"")
    assert run(tmp_path, seeds=1).complete
    assert sorted(config.parent.iterdir()) == [path for path in files if path.name != ".lease"]


def test_a_comparison_from_python(tmp_path: Path) -> None:
    methods = [
        {"name": "walk", "label": "still", "move": {"lr": 1e-6}},
        {"name": "walk", "label": "quick", "move": {"lr": 0.3}},
    ]
    comparison = run(tmp_path, *methods, seeds=10, budget="2 steps")
    [results] = comparison.tables
    assert (results.task, results.metric, results.higher_is_better) == ("bowl", "distance", False)
    assert (comparison.complete, results.reference, results.winner) == (True, "still", "quick")
    assert [(row.cost.outer_steps.mean, row.cost.oracle_calls.mean) for row in results.rows] == [
        (2, 4)
    ] * 2
    [resources] = tmp_path.glob("bowl/quick-*/seed-0/resources.json")
    assert json.loads(resources.read_bytes())["peak_memory_bytes"] > 1e7


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
    comparison = run(tmp_path, "walk", breaking)
    [failure] = comparison.failures
    assert (failure.method, failure.seed, failure.status) == ("breaking", 1, "failed")
    assert failure.reason.startswith("RuntimeError: CUDA out of memory, or so (grid_plugin.py:")
    rows = comparison.tables[0].rows
    assert [(row.failed, row.metrics["distance"].count) for row in rows] == [(0, 2), (1, 1)]
    file = failure.path / "summary.json"
    stamp = file.stat().st_mtime_ns
    run(tmp_path, "walk", breaking)
    assert file.stat().st_mtime_ns == stamp, "kept"
    assert len(run(tmp_path, "walk", breaking, retry_failed=True).failures) == 1
    assert file.stat().st_mtime_ns > stamp


def test_damaged_folders_are_named_and_left_alone(tmp_path: Path) -> None:
    damages = [
        ("summary.json", b"{", "summary.json"),
        ("summary.json", b'{"status": "dnoe"}', "size"),
        ("config.toml", b"seed = 7", "another configuration"),
        ("steps.jsonl", b"x\n", "steps.jsonl"),
    ]
    run(tmp_path, budget="1 step", seeds=5)
    [method] = tmp_path.glob("bowl/*")
    for seed, (name, data, _) in enumerate(damages):
        (method / f"seed-{seed}" / name).write_bytes(data)
    (method / "seed-3" / "summary.json").unlink()
    kept = (*RESULTS, "config", "env", "timings")
    before = contents(method, kept)
    comparison = run(tmp_path, budget="1 step", seeds=5)
    failures = sorted(comparison.failures, key=lambda failure: failure.seed)
    assert [(it.seed, it.status) for it in failures] == [(seed, "damaged") for seed in range(4)]
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


def test_a_run_that_another_process_carries_out_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_work, "POLL", 0.01)
    run(tmp_path)
    [summary] = tmp_path.glob("bowl/*/seed-1/summary.json")
    resources = summary.with_name("resources.json")
    finished, before = summary.read_bytes(), resources.read_bytes()
    summary.unlink()
    monkeypatch.setattr(Board, "say", lambda *_: summary.write_bytes(finished))
    with hold_lease(summary.parent):
        assert run(tmp_path).complete
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


# --- what a comparison says


@pytest.mark.extended
def test_a_comparison_is_described_and_a_run_is_read_back_by_its_labels(tmp_path: Path) -> None:
    breaking = {"name": "walk", "label": "breaking", "breaks": "raise"}
    comparison = run(tmp_path, "walk", breaking, seeds=10, budget="2 steps")
    quick = run(tmp_path, {"name": "walk", "label": "quick", "breaks": "raise", "at": 0})
    assert repr(comparison).startswith("bowl: 2 outer steps each, 10 seeds; ")
    assert "failed: bowl, quick, seed " in repr(quick)
    found = comparison.result("walk", 3)
    assert [found.info.folder] == [*tmp_path.glob("bowl/walk-*/seed-3")]
    for arguments, code, place in (
        ((), "missing-option", ("method",)),
        (("walk",), "missing-option", ("seed",)),
        (("walk", 77), "unknown-seed", ("seed",)),
        (("wakl", 3), "unknown-method", ("method",)),
        (("walk", 3, "bowll"), "unknown-task", ("task",)),
    ):
        with rejects(code, *place, of=ConfigError):
            comparison.result(*arguments)
    [failure] = quick.failures
    with rejects("no-result", str(failure.path), of=ConfigError):
        quick.result(seed=1)
