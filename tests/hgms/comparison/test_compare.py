"""Comparisons of a registered task: cells that fail, are damaged, or are broken off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from support.helpers import rejects

from hgms.comparison import coordinator
from hgms.comparison.comparison import Comparison
from hgms.comparison.from_python import compare
from hgms.comparison.grid_file import load
from hgms.comparison.run_grid import run_grid
from hgms.executors import Board, Ending, Local
from hgms.runs import DiskError, Interrupted, RunFolder, leased
from hgms_core import ConfigError
from hgms_core.budget import Budget

pytestmark = pytest.mark.usefixtures("bowl")


def run(
    out: Path, *methods: Any, seeds: int = 2, budget: str = "3 steps", **more: Any
) -> Comparison:
    settings = {"jobs": 0, "run": {"checkpoint_seconds": 0.0}} | more
    return compare("bowl", list(methods) or ["walk"], budget, seeds, out, **settings)


def contents(out: Path) -> dict[str, bytes]:
    """Everything that has to be the same for every run of one seed."""
    kept = ("checkpoint", "steps", "summary")
    files = (path for path in sorted(out.rglob("*")) if path.name.startswith(kept))
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def stamps(out: Path, name: str) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in sorted(out.rglob(name))}


BREAKING = {"name": "walk", "label": "breaking", "breaks": "raise"}


def test_a_comparison_from_python(tmp_path: Path) -> None:
    methods = [{"name": "walk", "label": "still", "move": {"lr": 1e-6}}]
    methods += [{"name": "walk", "label": "quick", "move": {"lr": 0.3}}]
    comparison = run(tmp_path, *methods, seeds=10, budget="2 steps")
    [results] = comparison.tables
    assert (results.task, results.metric, results.higher_is_better) == ("bowl", "distance", False)
    assert (comparison.complete, results.reference, results.winner) == (True, "still", "quick")
    assert [(row.outer_steps.mean, row.oracle_calls.mean) for row in results.rows] == [(2, 4)] * 2
    assert "quick ★" in str(comparison)
    assert comparison.as_dict()["tasks"][0]["methods"][1]["winner"]
    [resources] = tmp_path.glob("bowl/quick-*/seed-0/resources.json")
    read = json.loads(resources.read_bytes())
    assert read["peak_memory_bytes"] > 1e7
    assert read["wall_seconds"] > 0


def test_objects_of_registered_classes_are_accepted_and_others_named(tmp_path: Path) -> None:
    task = load({"budget": "1 step", "task": "bowl", "method": "walk"}).pairs["bowl", "walk"].task
    undefined = attrs.evolve(task, undefined_at=(4,))
    comparison = compare(undefined, "walk", Budget(outer_steps=2), [3, 4], tmp_path, jobs=0)
    [row] = comparison.tables[0].rows
    assert (row.outer_steps.mean, row.undefined) == (2, 1)

    class Stranger:
        name = "stranger"

    with rejects("wrong-type", "methods", of=ConfigError):
        run(tmp_path, Stranger())


def test_finished_cells_are_kept_and_broken_ones_go_on(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(whole, seeds=3)
    run(broken)
    before = stamps(broken, "env.json")
    next(broken.rglob("seed-0/summary.json")).unlink()  # killed after its last checkpoint
    assert run(broken, seeds=3).complete
    assert contents(broken) == contents(whole)
    after = stamps(broken, "env.json")
    assert [after[seed] > before[seed] for seed in ("seed-0", "seed-1")] == [True, False]


def test_failed_cells_are_kept_with_their_reason_and_retried_on_request(tmp_path: Path) -> None:
    memory = {"name": "walk", "label": "memory", "breaks": "memory", "seed": 0}
    comparison = run(tmp_path, "walk", BREAKING, memory)
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
    summary = json.loads(file.read_bytes())
    assert (summary["status"], summary["outer_steps"]) == ("failed", 2)

    stamp = file.stat().st_mtime_ns
    run(tmp_path, "walk", BREAKING)
    assert file.stat().st_mtime_ns == stamp, "kept"
    again = run(tmp_path, "walk", BREAKING, retry_failed=True)
    assert file.stat().st_mtime_ns > stamp
    assert len(again.failures) == 1


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("summary.json", b"{", "summary.json"),
        ("summary.json", b"[]", "summary.json"),
        ("summary.json", b'{"status": "dnoe"}', "no checksum"),
        ("config.toml", b"seed = 7", "another configuration"),
        ("config.toml", b"\xff\x00[", "another configuration"),
        ("steps.jsonl", b"x\n", "steps.jsonl"),
    ],
)
def test_damaged_folders_are_named_and_left_alone(
    tmp_path: Path, name: str, data: bytes, reason: str
) -> None:
    run(tmp_path, budget="1 step")
    [folder] = tmp_path.glob("bowl/*/seed-1")
    (folder / name).write_bytes(data)
    if name == "steps.jsonl":
        (folder / "summary.json").unlink()
    (folder / "resources.json").unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    comparison = run(tmp_path, budget="1 step")
    [failure] = comparison.failures
    assert (failure.status, failure.path) == ("damaged", folder)
    assert reason in failure.reason
    (folder / "resources.json").unlink(missing_ok=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
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
    [folder] = tmp_path.glob("bowl/*/seed-1")
    finished, resources = (
        (folder / name).read_bytes() for name in ("summary.json", "resources.json")
    )
    (folder / "summary.json").unlink()
    said: list[str] = []

    def other_ends(line: str) -> None:
        said.append(line)
        (folder / "summary.json").write_bytes(finished)

    monkeypatch.setattr(Board, "say", lambda _board, line: other_ends(line))
    with leased(folder):
        assert run(tmp_path, jobs=jobs).complete
    assert said[-1].startswith("waiting for 1 run")
    # they are of whoever carried it out
    assert (folder / "resources.json").read_bytes() == resources


def test_workers_know_the_plugins_of_python_and_import_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose it may be: a stranger's attrs.py would run in every worker."""
    monkeypatch.chdir(tmp_path)
    code = "import pathlib\npathlib.Path('executed').touch()\nraise SystemExit"
    Path("attrs.py").write_text(code)
    comparison = run(tmp_path / "runs", seeds=1, jobs=1)
    assert comparison.complete, str(comparison)
    assert not Path("executed").exists()


def test_ctrl_c_between_two_runs_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def struck(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Board, "ended", struck)
        with pytest.raises(Interrupted) as caught:
            run(tmp_path)
    assert "run the same command again" in caught.value.hint
    assert run(tmp_path).complete


def test_stated_jobs_with_a_budget_in_seconds_say_that_timings_share_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    table = {"task": "bowl", "method": "walk", "run": {"out": str(tmp_path)}}
    timed, counted = (load({**table, "budget": text}) for text in ("5 s", "5 steps"))
    on_cpu = attrs.evolve(timed, run=attrs.evolve(timed.run, clock="cpu"))
    said = []
    for grid, jobs in ((timed, {}), (timed, {"jobs": 2}), (on_cpu, {"jobs": 2}), (counted, {})):
        run_grid(grid, say=lines.append, **jobs)
        said.append(len(lines))
    assert (said, counts) == ([0, 1, 1, 1], [1, 2, 2, 8])
    assert "share this machine" in lines[0]
