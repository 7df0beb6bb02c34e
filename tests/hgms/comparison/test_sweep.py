"""Pilot sweeps: equal trials, chosen on validation loss, recorded, resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.run_folders import RESULTS, contents

from hgms.comparison import Comparison, compare
from hgms.comparison.grid_file import load
from hgms.comparison.sweep import plan
from hgms.results import scan
from hgms.runs import RunFolder

pytestmark = pytest.mark.usefixtures("bowl")

LISTS = {"walk": {"move.lr": [0.01, 0.05, 0.1, 0.2, 0.3, 0.45], "noise": [0.0, 0.05]}}
RANGES = {"walk": {"move.lr": {"low": 0.01, "high": 0.45, "log": True}}}


def swept(
    out: Path, methods: Any = "walk", seeds: Any = 1, pilots: Any = (100,), **sweep: Any
) -> Comparison:
    settings = {"trials": 3, "space": LISTS, "seeds": list(pilots)} | sweep
    run = {"checkpoint_seconds": 0.0, "dtype": "float64"}
    return compare("bowl", methods, "3 steps", seeds, out, sweep=settings, run=run, jobs=0)


def trial_folder(comparison: Comparison, number: int, seed: int = 100) -> Path:
    [sweep] = plan(comparison.grid)
    cells = [cell for _ in range(number + 1) for cell in sweep.add_trial()]
    [path] = [cell.path for cell in sweep.cells(sweep.trials[-1]) if cell.config.seed == seed]
    assert path in [cell.path for cell in cells]
    return path


@pytest.mark.extended
@pytest.mark.parametrize("space", [LISTS, RANGES])
def test_the_lowest_mean_of_f_on_stop_rows_over_pilot_seeds_is_chosen_and_all_is_recorded(
    tmp_path: Path, space: dict[str, Any]
) -> None:
    pilots = (100, 101)
    comparison = swept(tmp_path, pilots=pilots, space=space, budget="2 steps")
    [record] = comparison.sweeps
    trials = record["trials"]
    assert trials[0]["values"]["move.lr"] == 0.1, "the first trial is the given settings"
    assert len({json.dumps(row["values"]) for row in trials}) == len(trials) == 3
    assert record["chosen"] == min(range(3), key=lambda k: trials[k]["loss"])
    [written] = tmp_path.rglob("sweep.json")
    assert json.loads(written.read_bytes()) == record
    # what ran is what was chosen, and the trials are no results
    [config] = comparison.grid.pairs.values()
    [run], _ = scan(tmp_path)
    assert run.method["move"]["lr"] == record["chosen_values"]["move.lr"]
    for number, trial in enumerate(trials):
        losses = []
        for seed in pilots:
            problem = config.task.problem(seed, torch.device("cpu"), torch.float64)
            folder = RunFolder(trial_folder(comparison, number, seed))
            state, *_ = folder.load() or [{}]
            losses.append(float(problem.f({}, state["x"], problem.upper_data["stop"].whole)))
            summary = json.loads(folder.summary.read_bytes())
            assert (summary["validation_loss"], summary["outer_steps"]) == (losses[-1], 2)
        assert trial["losses"] == dict(zip(map(str, pilots), losses, strict=True))
        assert trial["loss"] == pytest.approx(sum(losses) / 2)


@pytest.mark.extended
def test_every_method_with_a_space_gets_the_same_number_of_trials_and_the_others_are_marked(
    tmp_path: Path,
) -> None:
    quick = {"name": "walk", "label": "quick", "move": {"lr": 0.3}}
    plain = {"name": "walk", "label": "plain"}
    space = LISTS | {"quick": LISTS["walk"]}
    comparison = swept(tmp_path, ["walk", quick, plain], space=space, trials=2)
    trials = [sweep["trials"] for sweep in comparison.sweeps]
    assert [len(each) for each in trials] == [2, 2]
    assert [each[0]["values"]["move.lr"] for each in trials] == [0.1, 0.3]
    assert [row.notes for row in comparison.tables[0].rows] == [(), (), ("not swept",)]


@pytest.mark.extended
def test_a_broken_sweep_goes_on_to_the_same_end(tmp_path: Path) -> None:
    comparison = swept(tmp_path, space=RANGES)
    whole = contents(tmp_path, (*RESULTS, "sweep"))
    for path in (tmp_path / "bowl", trial_folder(comparison, 2).parent):
        shutil.rmtree(path)
    kept = trial_folder(comparison, 1) / "summary.json"
    stamp = kept.stat().st_mtime_ns
    swept(tmp_path, space=RANGES)
    assert kept.stat().st_mtime_ns == stamp
    assert contents(tmp_path, (*RESULTS, "sweep")) == whole


def test_two_sweeps_in_one_folder_do_not_share_trials(tmp_path: Path) -> None:
    first, other = (
        swept(tmp_path, trials=2, pilots=pilots).sweeps[0]["trials"] for pilots in ([100], [7])
    )
    assert [list(trial["losses"]) for trial in other] == [["7"], ["7"]]
    assert all(trial["loss"] is not None for trial in [*first, *other])


def test_failed_trials_lose_and_are_counted(tmp_path: Path) -> None:
    """Of two pilot seeds one fails."""
    breaking = {"name": "walk", "seed": 100}
    space = {"walk": {"breaks": ["raise"], "noise": [0.0, 0.05]}}
    comparison = swept(tmp_path, breaking, space=space, trials=2, pilots=(100, 101))
    [record] = comparison.sweeps
    assert [trial["loss"] is None for trial in record["trials"]] == [False, True]
    assert record["chosen"] == 0
    assert "1 trials failed" in str(comparison)


def test_another_seed_of_a_sweep_draws_other_settings() -> None:
    def drawn(seed: int) -> Any:
        table = {"budget": "1 step", "task": "bowl", "method": "walk"}
        sweep = {"trials": 2, "space": RANGES, "seed": seed}
        [planned] = plan(load({**table, "sweep": sweep}))
        return [cell.config.method.move.lr for _ in range(2) for cell in planned.add_trial()][-1]

    assert drawn(0) == drawn(0) != drawn(1)
