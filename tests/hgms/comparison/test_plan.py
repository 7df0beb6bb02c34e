"""`hgms plan`: what is measured, what is foretold from it, and that nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hgms.cli import main
from hgms.comparison.from_python import compare
from hgms.comparison.planning import Cost, makespan
from hgms.config import Budget
from hgms.executors import Ending, Job, as_error, function_of

GRID = """
budget = "40 steps"
seeds = 4
task = ["bowl"]

[run]
out = "runs"

[[method]]
name = "walk"

[[method]]
name = "walk"
label = "slow"
pause = 0.05
"""


class Here:
    """An executor that carries out jobs in this process."""

    def carry_out(self, jobs: Iterable[Job], report: Any) -> Iterator[Ending]:
        for job in jobs:
            try:
                done = function_of(job.function)(job.arguments, lambda **event: None)
                yield Ending(job=job, outcome=done)
            except Exception as error:
                yield Ending(job=job, error=as_error(error))

    def close(self) -> None:
        pass


@pytest.fixture
def here(bowl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command without processes of its own."""
    monkeypatch.chdir(tmp_path)
    Path("grid.toml").write_text(GRID)
    monkeypatch.setattr("hgms.executors.Local", lambda **_: Here())
    return lambda *words: CliRunner().invoke(main, ["plan", "grid.toml", *words])


@pytest.mark.extended
def test_a_grid_is_measured_and_nothing_is_written(here: Callable[..., Any]) -> None:
    """And what is finished costs nothing."""
    done = here("--json", "--workers", "1,2")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    walk, slow = told["pairs"]
    assert (walk["method"], slow["method"], slow["calls"]) == ("walk", "slow", 2)
    assert walk["step"] < 0.05 <= slow["step"] < 0.5
    assert slow["seconds"] == pytest.approx(slow["around"] + 40 * slow["step"])
    assert slow["memory"] > 5e7
    assert (told["runs"], told["longest"]) == (8, max(walk["seconds"], slow["seconds"]))
    assert told["seconds"] == pytest.approx(4 * walk["seconds"] + 4 * slow["seconds"])
    assert told["workers"]["1"] == pytest.approx(told["seconds"])
    assert told["longest"] <= told["workers"]["2"] < told["seconds"]
    assert not Path("runs").exists()
    compare("bowl", "walk", "40 steps", 4, "runs", jobs=0)
    real = sum(path.stat().st_size for path in Path("runs").rglob("seed-0/*"))
    assert walk["disk"] + 40 * walk["row"] == pytest.approx(real, rel=0.15)
    assert "4 runs to do" in here().stdout


@pytest.mark.parametrize(
    ("words", "place"),
    [("--workers two", "--workers two"), ("--methods wlak", "grid.toml: method")],
)
def test_bad_input_is_one_message(here: Callable[..., Any], words: str, place: str) -> None:
    done = here(*words.split())
    assert done.exit_code == 2
    assert f"({place})" in done.stderr


def test_costs_by_each_kind_of_budget() -> None:
    cost = Cost(step=0.5, around=2.0, calls=10.0, disk=100.0, row=7.0)
    budgets = Budget(outer_steps=4), Budget(oracle_calls=100), Budget(seconds=3.0)
    assert [cost.seconds(budget) for budget in budgets] == [4.0, 7.0, 5.0]
    assert cost.bytes_on_disk(Budget(seconds=3.0)) == 142.0
    # the first free worker takes the next run
    assert [makespan([2.0, 3.0, 2.0, 2.0], workers) for workers in (2, 1)] == [5.0, 9.0]
