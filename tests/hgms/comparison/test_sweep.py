"""Pilot sweeps: equal trials, chosen on validation loss, recorded, resumed."""

from __future__ import annotations

import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import rejects

from hgms.comparison import Comparison, compare
from hgms.comparison.grid_file import load
from hgms.comparison.sweep import plan
from hgms.results import scan, scan_sweeps
from hgms_core import ConfigError, MissingExtra

pytestmark = pytest.mark.usefixtures("bowl")

CPU = torch.device("cpu")
LISTS = {"walk": {"move.lr": [0.01, 0.05, 0.1, 0.2, 0.3, 0.45], "noise": [0.0, 0.05]}}
RANGES = {"walk": {"move.lr": {"low": 0.01, "high": 0.45, "log": True}}}


def swept(
    out: Path, methods: Any = "walk", seeds: Any = 2, jobs: int = 0, **sweep: Any
) -> Comparison:
    settings = {"trials": 5, "sampler": "grid", "space": LISTS} | sweep
    run = {"checkpoint_seconds": 0.0, "dtype": "float64"}
    return compare("bowl", methods, "6 steps", seeds, out, sweep=settings, run=run, jobs=jobs)


def contents(out: Path) -> dict[str, bytes]:
    kept = ("checkpoint", "steps", "summary", "sweep")
    files = (path for path in sorted(out.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in files
        if path.name.startswith(kept)
    }


@pytest.mark.parametrize(
    ("sampler", "space"), [("grid", LISTS), ("random", RANGES), ("tpe", RANGES)]
)
def test_the_lowest_validation_loss_is_chosen_and_all_is_recorded(
    tmp_path: Path, sampler: str, space: dict[str, Any]
) -> None:
    comparison = swept(tmp_path, sampler=sampler, space=space, seeds=[0, 1])
    [record] = comparison.sweeps
    trials = record["trials"]
    assert len(trials) == 5
    assert trials[0]["values"]["move.lr"] == 0.1, "the first trial is the given settings"
    assert len({json.dumps(row["values"]) for row in trials}) == 5
    assert record["chosen"] == min(range(5), key=lambda k: trials[k]["loss"])
    [written], skipped = scan_sweeps(tmp_path)
    assert not skipped
    assert written.table == record
    # what ran is what was chosen, and the trials are no results
    runs, _ = scan(tmp_path)
    assert {run.seed for run in runs} == {0, 1}
    assert {run.method["move"]["lr"] for run in runs} == {record["chosen_values"]["move.lr"]}
    for number, trial in enumerate(trials):
        summary = json.loads(
            (tmp_path / "sweeps/bowl/walk" / f"trial-{number}/seed-100/summary.json").read_bytes()
        )
        assert summary["validation_loss"] == trial["loss"] == trial["losses"]["100"]


def test_validation_loss_is_f_on_the_stop_rows_at_the_returned_state(tmp_path: Path) -> None:
    from hgms.runs import RunFolder
    from hgms_core.registry import Registry

    swept(tmp_path)
    task = Registry.load().get("task", "bowl").target()  # type: ignore[operator]
    problem = task.problem(100, CPU, torch.float64)
    folder = RunFolder(tmp_path / "sweeps/bowl/walk/trial-0/seed-100")
    state, _ = folder.load()  # type: ignore[misc]
    expected = problem.f({}, state["x"], problem.upper_data["stop"].whole)
    other = problem.f({}, state["x"], problem.upper_data["differentiate"].whole)
    loss = json.loads(folder.summary.read_bytes())["validation_loss"]
    assert loss == float(expected)
    assert loss != float(other)


def test_the_loss_of_a_trial_is_the_mean_over_pilot_seeds(tmp_path: Path) -> None:
    [record] = swept(tmp_path).sweeps
    assert list(record["trials"][0]["losses"]) == ["100"]
    again = compare(
        "bowl",
        "walk",
        "6 steps",
        2,
        tmp_path / "two",
        jobs=0,
        run={"dtype": "float64"},
        sweep={"trials": 2, "seeds": [100, 101], "space": LISTS, "budget": "3 steps"},
    ).sweeps[0]
    for trial in again["trials"]:
        assert trial["loss"] == pytest.approx(sum(trial["losses"].values()) / 2)
        assert len(trial["losses"]) == 2
    steps = json.loads(
        (tmp_path / "two/sweeps/bowl/walk/trial-1/seed-101/summary.json").read_bytes()
    )["outer_steps"]
    assert steps == 3, "a trial may have a budget of its own"


def test_every_method_with_a_space_gets_the_same_number_of_trials_and_the_others_are_marked(
    tmp_path: Path,
) -> None:
    quick = {"name": "walk", "label": "quick", "move": {"lr": 0.3}}
    plain = {"name": "walk", "label": "plain"}
    comparison = swept(tmp_path, ["walk", quick, plain], space=LISTS | {"quick": LISTS["walk"]})
    assert [len(sweep["trials"]) for sweep in comparison.sweeps] == [5, 5]
    assert [sweep["trials"][0]["values"]["move.lr"] for sweep in comparison.sweeps] == [0.1, 0.3]
    assert [row.notes for row in comparison.tables[0].rows] == [(), (), ("not swept",)]
    assert "not swept" in str(comparison)
    assert "sweep: bowl, quick: trial" in str(comparison)


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_broken_sweep_goes_on_to_the_same_end(tmp_path: Path, sampler: str) -> None:
    swept(tmp_path / "whole", sampler=sampler, space=RANGES)
    broken = tmp_path / "broken"
    swept(broken, sampler=sampler, space=RANGES)
    for path in broken.rglob("seed-*"):
        if path.parent.name in ("trial-3", "trial-4") or "sweeps" not in path.parts:
            for file in path.iterdir():
                file.unlink()
    stamp = (broken / "sweeps/bowl/walk/trial-2/seed-100/summary.json").stat().st_mtime_ns
    swept(broken, sampler=sampler, space=RANGES)
    assert (broken / "sweeps/bowl/walk/trial-2/seed-100/summary.json").stat().st_mtime_ns == stamp
    resumed = contents(broken)
    unbroken = contents(tmp_path / "whole")
    assert resumed.keys() == unbroken.keys()
    assert resumed == unbroken


def test_another_sweep_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    swept(tmp_path)
    folder = tmp_path / "sweeps" / "bowl" / "walk"
    with rejects("other-settings", str(folder), of=ConfigError) as caught:
        swept(tmp_path, space={"walk": {"move.lr": [0.1, 0.2, 0.3, 0.4, 0.45]}})
    assert caught.value.message.endswith("another space")
    with rejects("other-settings", str(folder), of=ConfigError) as caught:
        compare(
            "bowl",
            "walk",
            "6 steps",
            2,
            tmp_path,
            jobs=0,
            run={"checkpoint_seconds": 0.0, "dtype": "float64"},
            sweep={"trials": 5, "sampler": "grid", "space": LISTS, "seeds": [7]},
        )
    assert caught.value.message.endswith("another seeds")
    (folder / "sweep.json").write_text("{")
    with rejects("damaged-file", str(folder / "sweep.json"), of=ConfigError):
        swept(tmp_path)


def test_failed_trials_lose_and_are_counted(tmp_path: Path) -> None:
    space = {"walk": {"breaks": ["never", "raise"], "noise": [0.0, 0.05]}}
    comparison = swept(tmp_path, {"name": "walk", "seed": 100}, space=space, trials=4)
    [record] = comparison.sweeps
    assert sum(trial["loss"] is None for trial in record["trials"]) == 2
    assert record["chosen_values"]["breaks"] == "never"
    assert "2 trials failed" in str(comparison)
    assert math.isfinite(comparison.tables[0].rows[0].metrics["distance"].mean)

    gone = swept(
        tmp_path / "all",
        {"name": "walk", "seed": 100, "breaks": "raise"},
        space={"walk": {"noise": [0, 1, 2, 3.0, 4]}},
    )
    assert gone.sweeps[0]["chosen"] == 0
    assert "every trial failed" in str(gone)


def test_tpe_without_optuna_says_what_to_install_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "optuna", None)
    with rejects("missing-package", "sweep", "sampler", of=MissingExtra) as caught:
        swept(tmp_path / "runs", sampler="tpe", space=RANGES)
    assert caught.value.install == "pip install 'hgms[optuna]'"
    assert not (tmp_path / "runs").exists()


def test_a_sweep_of_other_data_is_named(tmp_path: Path) -> None:
    [sweep] = plan(swept(tmp_path).grid)
    path = tmp_path / "sweeps" / "bowl" / "walk" / "sweep.json"
    assert sweep.fault() is None
    mine = {**sweep.identity(), "made_of": "0123"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(sweep), "identity", lambda _sweep: mine)
        path.write_text(json.dumps({**json.loads(path.read_text()), "made_of": "4567"}))
        fault = sweep.fault()
        assert fault is not None
        assert (fault.code, fault.place) == ("other-settings", (str(path.parent),))
        assert "content of its data" in fault.message


def test_two_coordinators_write_the_record_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for the same last trial, and go on at the same moment."""
    table = {
        "budget": "1 step",
        "seeds": 1,
        "task": "bowl",
        "method": "walk",
        "run": {"out": str(tmp_path)},
    }
    space = {"walk": {"noise": [0.0, 0.05]}}
    loaded = load({**table, "sweep": {"trials": 2, "sampler": "grid", "space": space}})
    together = threading.Barrier(2)
    seen = []

    def slowly(path: Path, data: bytes) -> None:
        assert not path.with_suffix(".open").exists(), "the other one is at it"
        path.with_suffix(".open").touch()
        time.sleep(0.2)
        path.with_suffix(".open").unlink()
        seen.append(path)

    def write() -> None:
        [sweep] = plan(loaded)
        sweep.add_trial()
        together.wait()
        sweep.write()

    monkeypatch.setattr("hgms.comparison.sweep.replace_file", slowly)
    with ThreadPoolExecutor(2) as both:
        for written in [both.submit(write) for _ in range(2)]:
            written.result(60)
    assert len(seen) == 2
