"""`hgms plan`: what is measured, what is foretold from it, and that nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hgms_cli import main
from hgms_compare.from_python import compare
from hgms_compare.planning import Cost, makespan
from hgms_core import Budget
from hgms_executors import Ending, Job, called, described

PLUGIN = Path(__file__).parent / "grid_plugin.py"

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


@pytest.fixture
def hgms(bowl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    Path("grid.toml").write_text(GRID)
    return lambda *words: CliRunner().invoke(main, ["plan", "grid.toml", *words])


def test_a_grid_is_measured_and_nothing_is_written(hgms: Callable[..., Any]) -> None:
    done = hgms("--json", "--workers", "1,2")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    walk, slow = told["pairs"]
    assert (walk["method"], slow["method"]) == ("walk", "slow")
    assert 0.05 <= slow["step"] < 0.5
    assert walk["step"] < 0.05
    assert slow["seconds"] == pytest.approx(slow["around"] + 40 * slow["step"])
    assert slow["calls"] == 2
    assert slow["memory"] > 5e7
    assert told["runs"] == 8
    assert told["seconds"] == pytest.approx(4 * walk["seconds"] + 4 * slow["seconds"])
    assert told["longest"] == max(walk["seconds"], slow["seconds"])
    assert told["workers"]["1"] == pytest.approx(told["seconds"])
    assert told["longest"] <= told["workers"]["2"] < told["seconds"]
    assert not Path("runs").exists()
    compare("bowl", {"name": "walk"}, "40 steps", 1, "real", jobs=0)
    real = sum(path.stat().st_size for path in Path("real").rglob("seed-0/*"))
    assert walk["disk"] + 40 * walk["row"] == pytest.approx(real, rel=0.15)


class Here:
    """An executor that carries out jobs in this process."""

    def carry_out(self, jobs: Iterable[Job], report: Any) -> Iterator[Ending]:
        for job in jobs:
            try:
                yield Ending(job=job, outcome=called(job.function)(job.arguments, lambda **event: None))
            except Exception as error:
                yield Ending(job=job, error=described(error))

    def close(self) -> None:
        pass


@pytest.fixture
def here(hgms: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command without processes of its own."""
    monkeypatch.setattr("hgms_executors.Local", lambda **_: Here())
    return hgms


def test_what_is_finished_costs_nothing(here: Callable[..., Any]) -> None:
    done = CliRunner().invoke(main, ["compare", "grid.toml", "--methods", "walk", "--jobs", "0"])
    assert done.exit_code == 0, done.stderr
    shown = here()
    assert shown.exit_code == 0, shown.stderr
    assert "4 runs to do" in shown.stdout
    assert "on 1 worker:" in shown.stdout
    assert "on 8 workers" not in shown.stdout
    assert here("--seeds", "1", "--methods", "slow", "--json").exit_code == 0


def test_a_cell_that_fails_is_named_and_the_others_are_measured(here: Callable[..., Any]) -> None:
    Path("grid.toml").write_text(GRID + 'breaks = "raise"\nat = 1\nseed = 0\n')
    shown = here()
    assert shown.exit_code == 0, shown.stderr
    assert "not measured: bowl, slow: RuntimeError: CUDA out of memory, or so" in shown.stdout
    assert json.loads(here("--json").stdout)["pairs"][0]["step"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--workers", "two"), "--workers two: write numbers of workers"), (("--workers", "0"), "--workers 0: write"),
        (("--methods", "wlak"), "did you mean 'walk'"), (("--scale", "big"), "big"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message(hgms: Callable[..., Any], words: tuple[str, str], message: str) -> None:
    done = hgms(*words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_costs_by_each_kind_of_budget() -> None:
    cost = Cost(step=0.5, around=2.0, calls=10.0, disk=100.0, row=7.0)
    assert cost.seconds(Budget(outer_steps=4)) == 4.0
    assert cost.seconds(Budget(oracle_calls=100)) == 7.0
    assert cost.seconds(Budget(seconds=3.0)) == 5.0
    assert cost.bytes_on_disk(Budget(seconds=3.0)) == 142.0


def test_the_first_free_worker_takes_the_next_run() -> None:
    assert makespan([2.0, 3.0, 2.0, 2.0], 2) == 5.0
    assert makespan([2.0, 3.0, 2.0, 2.0], 1) == 9.0
