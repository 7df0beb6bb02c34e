"""Very many finished runs: what their cells share is what each would have by itself, and only
what a table needs is read.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.run_folders import seal

from hgms.comparison.coordinator import Executions, runs_of
from hgms.comparison.grid import Grid
from hgms.comparison.grid_file import load
from hgms.comparison.run_grid import run_grid
from hgms.executors import Here, run_together, shared_work
from hgms.plugins import Registry
from hgms.results import StoredRun, read_run
from hgms.runs import RunFolder
from hgms.store import hold_lease

PLUGIN = Path(__file__).parents[2] / "support" / "grid_plugin.py"


def grid(out: Path, seeds: Any = 3) -> Grid:
    methods = [{"name": "walk", "label": "near"}, {"name": "walk", "label": "far", "noise": 0.5}]
    run = {"out": str(out), "threads": 1}
    table = {"budget": "2 steps", "seeds": seeds, "task": "bowl", "run": run, "method": methods}
    return load(table, registry=Registry.load([PLUGIN]))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("original")
    assert run_grid(grid(out), jobs=0, progress=False).complete
    return out


@pytest.fixture
def finished(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "runs"))


def test_cells_of_a_pair_have_the_path_and_the_text_of_their_configuration(tmp_path: Path) -> None:
    cells = grid(tmp_path, [0, 7, 12345]).cells()
    assert [cell.config.seed for cell in cells] == [0, 0, 7, 7, 12345, 12345]
    assert [(it.path, it.text) for it in cells] == [
        (it.config.path, it.config.to_toml()) for it in cells
    ]
    assert len({cell.text for cell in cells}) == 6


def test_a_finished_grid_is_neither_claimed_nor_resumed_nor_are_long_rows_read(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    columns = StoredRun.columns
    for name in ("runs.loop.Run.carry_out", "comparison.cell.carry_out"):
        monkeypatch.delattr(f"hgms.{name}")
    for name in ("claim", "load"):
        monkeypatch.delattr(RunFolder, name)
    monkeypatch.setattr(
        StoredRun, "columns", lambda run, names: (read.append(run.label), columns(run, names))[1]
    )
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    again = run_grid(grid(finished), jobs=0, progress=False)
    assert (again.complete, len(again.runs)) == (True, 6)
    # one candidate: the first run of each says that nothing was alike
    assert sorted(read) == ["far", "near"]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_what_runs_have_in_common_is_parsed_once_and_what_differs_is_seen(finished: Path) -> None:
    first, second, third = sorted(finished.glob("bowl/near-*/seed-*"))
    environment = json.loads((second / "env.json").read_text())
    (second / "env.json").write_text(json.dumps({**environment, "python": "3.99"}))
    config = third / "config.toml"
    config.write_text(config.read_text().replace("noise = 0.05", "noise = 0.25"))
    seal(third)
    runs = [read_run(path) for path in (first, second, third)]
    assert [run.environment["python"] == "3.99" for run in runs] == [False, True, False]
    assert [run.method["noise"] for run in runs] == [0.05, 0.05, 0.25]


def test_what_others_are_at_is_awaited_and_what_they_have_ended_is_read(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three runs another process has the first until this one waits; it has ended the third."""
    monkeypatch.setattr(shared_work, "POLL", 0.1)
    cells = grid(tmp_path / "here").cells()[::2]
    theirs = next(original.glob("bowl/near-*/seed-2"))
    said: list[str] = []
    with contextlib.ExitStack() as other:
        other.enter_context(hold_lease(cells[0].path))

        def say(line: str) -> None:
            said.append(line)
            if line.startswith("waiting"):
                shutil.copytree(theirs, cells[2].path)
                other.close()

        runs = runs_of(cells, Executions(), (), here=True)
        results, failures = run_together(runs, Here(), say=say, look=False)
    assert failures == {}
    assert [ending.status for ending in results.values()] == ["done"] * 3
    assert (cells[2].path / "steps.jsonl").read_bytes() == (theirs / "steps.jsonl").read_bytes()
    assert "resumes here" in said[1]
