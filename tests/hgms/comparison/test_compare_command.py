"""`hgms compare`: a grid from flags or a file, what a dry run says, exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hgms.cli import main

GRID = 'budget = "5s"\nseeds = 2\ntask = ["bowl"]\nmethod = ["walk"]\n'
BUDGET = ["--budget", "2 steps"]
TASK = ["--task", "bowl"]
WALK = [*TASK, "--methods", "walk"]


@pytest.fixture
def hgms(bowl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(main, ["compare", *arguments])


def test_flags_alone_make_a_grid(hgms: Callable[..., Any]) -> None:
    flags = [*WALK, "--set", "task.rows=7", *BUDGET, "--seeds", "5-6", "--out", "o"]

    def listed() -> list[tuple[int, str]]:
        rows = json.loads(hgms(*flags, "--dry-run", "--json").stdout)
        return [(row["seed"], row["state"]) for row in rows]

    assert listed() == [(5, "new"), (6, "new")]
    done = hgms(*flags, "--jobs", "0")
    assert done.exit_code == 0, done.stderr
    assert "distance ↓" in done.stdout
    assert "[2/2] bowl, walk, seed 6: done" in done.stderr
    assert "rows = 7" in next(Path("o").rglob("config.toml")).read_text()
    assert listed() == [(5, "done"), (6, "done")]
    assert json.loads(hgms(*flags, "--jobs", "0", "--json").stdout)["seeds"] == [5, 6]


@pytest.mark.parametrize(
    ("arguments", "stated"),
    [
        ([*WALK, "--budget", "0s"], "(--budget)"),
        (WALK, "(budget)"),
        ([*WALK, "--budget", "1e999 steps"], "(--budget)"),
        ([*TASK, *BUDGET, "--methods", "wlak"], "(method.wlak.name)"),
        ([*WALK, *BUDGET, "--seeds", "5-3"], "'--seeds'"),
        ([*WALK, *BUDGET, "--seeds", "0-99999999999"], "'--seeds'"),
        ([*WALK, *BUDGET, "--seeds", "99999999999"], "(--seeds)"),
        ([*WALK, *BUDGET, "--scale", "cpu"], "(--scale cpu)"),
        ([*WALK, *BUDGET, "--out", "file"], "(file)"),
        ([*WALK, *BUDGET, "--set", "rows=3"], "(--set rows=3)"),
        (["--methods", "walk", *BUDGET], "(task)"),
        ([*TASK, *BUDGET], "(method)"),
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
    assert not Path("runs").exists()


def test_a_dry_run_lists_runs_and_counts_those_that_are_left(hgms: Callable[..., Any]) -> None:
    Path("grid.toml").write_text(GRID)
    rows = json.loads(hgms("grid.toml", "--dry-run", "--json").stdout)
    assert [(row["seed"], row["state"]) for row in rows] == [(0, "new"), (1, "new")]
    flags = [*WALK, *BUDGET, "--out", "o", "--seeds"]
    assert hgms(*flags, "2", "--jobs", "0").exit_code == 0
    shown = hgms(*flags, "5", "--dry-run").stdout.splitlines()[-1]
    assert shown == "3 of 5 runs to do"


def test_failures_leave_with_1(hgms: Callable[..., Any]) -> None:
    method = '[[method]]\nname = "walk"\nbreaks = "raise"'
    Path("grid.toml").write_text(f'budget = "4 steps"\nseeds = 2\ntask = ["bowl"]\n{method}')
    done = hgms("grid.toml", "--jobs", "0")
    assert done.exit_code == 1
    assert "failed: bowl, walk, seed 1: RuntimeError: CUDA out of memory, or so" in done.stdout
