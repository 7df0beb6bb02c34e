"""`run` from Python: methods by name, folders that reports read, watchers that end a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from support.helpers import rejects
from support.own_problems import Follow, bowl

from hgms.report import build
from hgms.runs import Patience, RunFolder, RunSettings, StopRun, pruned, run
from hgms_core import Budget, CheckpointError, ConfigError, Method, RunInfo, hookimpl
from hgms_core.host import Host

HALF: Any = Follow(0.25)


def files(folder: Path) -> dict[str, bytes]:
    names = ("steps.jsonl", "summary.json", "checkpoint.json")
    return {name: (folder / name).read_bytes() for name in names}


# --- what a method, a budget and a folder may be
# --------------------------------------------------------------------------------------------------


def test_a_method_by_name_by_table_and_a_budget_as_text() -> None:
    result = run("hg-implicit", bowl(), "2 steps")
    assert (result.info.method, result.info.budget, result.summary["outer_steps"]) == (
        "hg-implicit",
        Budget(outer_steps=2),
        2,
    )
    slow, fast = (
        run({"name": "hg-implicit", "keep": "last", "outer": {"lr": lr}}, bowl(), "2 steps")
        for lr in (0.1, 0.5)
    )
    assert 0 < float(slow.theta["t"]) < float(fast.theta["t"])
    for method, code, *place in (
        ("hg-implict", "unknown-method", "method"),
        ({"name": "hg-implicit", "outer": {"lr": "x"}}, "wrong-type", "method", "outer", "lr"),
        (Follow, "wrong-type", "method"),
        (3, "wrong-type", "method"),
        ("oracle-clean", "not-supported", "method"),
    ):
        with rejects(code, *place, of=ConfigError):
            run(method, bowl(), "2 steps")  # type: ignore[arg-type]


def test_what_is_no_budget_seed_or_problem_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    calls: dict[str, Any] = {
        "budget": lambda: run(HALF, bowl(), 3),  # type: ignore[arg-type]
        "problem": lambda: run(HALF, bowl, "3 steps"),
        "seed": lambda: run(HALF, bowl(), "3 steps", seed="a"),  # type: ignore[arg-type]
    }
    for argument, call in calls.items():
        with rejects("wrong-type", argument, of=ConfigError):
            call()
    with rejects("out-of-range", "seed", of=ConfigError):
        run(HALF, bowl(), "3 steps", seed=-1)
    with rejects("not-a-folder", str(tmp_path / "file"), of=CheckpointError):
        run(HALF, bowl(), "3 steps", folder=tmp_path / "file")
    assert len(run(HALF, bowl(), "4 steps", settings={"evaluate_every": 2}).records) == 5


def test_a_folder_is_made_read_by_reports_and_not_appended_to(tmp_path: Path) -> None:
    place = tmp_path / "runs" / "x"
    result = run(HALF, bowl(), "3 steps", folder=str(place))
    assert result.info.folder == place
    study = build([tmp_path / "runs"])
    [section] = study.sections
    assert (section.metric, section.higher, section.entries[0].label) == (
        "distance",
        False,
        "follow",
    )
    before = files(place)
    with rejects("run-exists", str(place), of=CheckpointError):
        run(HALF, bowl(), "3 steps", folder=place)
    again = run(HALF, bowl(), "3 steps", folder=place, resume=True)
    assert (again.summary, files(place)) == (result.summary, before)


@pytest.mark.parametrize(
    "other",
    [lambda: (HALF, bowl(1)), lambda: (HALF, bowl(scale=2.0)), lambda: (Follow(0.3), bowl())],
)
def test_a_run_goes_on_with_its_own_problem_and_method_only(tmp_path: Path, other: Any) -> None:
    run(HALF, bowl(), "3 steps", folder=tmp_path / "x")
    method, problem = other()
    with rejects("other-settings", str(tmp_path / "x"), of=CheckpointError) as caught:
        run(method, problem, "3 steps", folder=tmp_path / "x", resume=True)
    assert "method." in str(caught.value) or "the problem" in str(caught.value)


# --- watchers
# --------------------------------------------------------------------------------------------------


def at(step: int, answer: Any = True) -> Any:
    def watch(info: RunInfo, record: Mapping[str, Any], share: float) -> Any:
        if record["step"] == step and isinstance(answer, BaseException):
            raise answer
        return record["step"] == step and answer

    return watch


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (True, "watch"),
        (StopRun("enough"), "watch: enough"),
        (StopIteration(), "watch"),
        (StopRun(), "watch"),
    ],
)
def test_a_watcher_ends_the_run(tmp_path: Path, answer: Any, says: str) -> None:
    seen: list[int] = []
    watch = [at(2, answer), lambda info, record, share: seen.append(record["step"])]
    result = run(HALF, bowl(), "9 steps", folder=tmp_path / "x", watch=watch)
    assert (
        result.summary["status"],
        result.summary["outer_steps"],
        result.summary["stopped_by"],
    ) == ("done", 2, says)
    assert seen == [0, 1, 2], "all watchers see every row"
    again = run(HALF, bowl(), "9 steps", folder=tmp_path / "x", resume=True)
    assert again.summary == result.summary, "a run that was ended is finished"
    whole = run(HALF, bowl(), "2 steps")
    torch.testing.assert_close(result.theta, whole.theta, rtol=0, atol=0)


@pytest.mark.parametrize("answer", [1, "yes", [True], False, None])
def test_other_answers_are_ignored(answer: Any) -> None:
    assert run(HALF, bowl(), "3 steps", watch=at(1, answer)).summary["outer_steps"] == 3


def test_the_metrics_of_a_run_that_was_ended_are_those_of_its_result() -> None:
    whole = run(HALF, bowl(), "3 steps")
    settings = RunSettings(evaluate_every=2)
    ended = run(HALF, bowl(), "9 steps", settings=settings, watch=at(3))
    assert "metric.distance" not in ended.records[-1]
    assert ended.summary["metrics"] == whole.summary["metrics"]


def test_evaluate_may_end_the_run() -> None:
    problem = bowl()
    calls = []

    def evaluate(theta: Any, x: Any) -> dict[str, float]:
        calls.append(1)
        if len(calls) == 3:
            raise StopRun("seen enough")
        return {"distance": 1.0}

    result = run(HALF, attrs.evolve(problem, evaluate=evaluate), "9 steps")
    assert (result.summary["outer_steps"], result.summary["stopped_by"]) == (
        2,
        "evaluate: seen enough",
    )


def test_an_observer_may_end_the_run() -> None:
    module = ModuleType("ends_runs")

    def hgms_step_finished(record: dict[str, Any]) -> None:
        if record["step"] == 2:
            raise StopRun("no more")

    module.hgms_step_finished = hookimpl(hgms_step_finished)  # type: ignore[attr-defined]
    result = run(HALF, bowl(), "9 steps", host=Host.load([module]))
    assert (result.summary["outer_steps"], result.summary["stopped_by"]) == (2, "observer: no more")


def test_what_is_no_function_is_refused() -> None:
    with rejects("wrong-type", "watch", of=ConfigError):
        run(HALF, bowl(), "1 steps", watch=3)  # type: ignore[arg-type]


def test_patience_ends_a_run_that_no_longer_gains(tmp_path: Path) -> None:
    """The distance halves with every step: it gains less than 0.1 from the step on where it is
    below 0.2.
    """
    start = run(HALF, bowl(), "1 steps").records[0]["metric.distance"]
    gains = [start / 2 ** (step + 1) for step in range(20)]  # of step 1, 2, …
    last = next(step for step, gain in enumerate(gains) if gain <= 0.1)  # the last step that counts
    patience = Patience(metric="distance", steps=2, least=0.1)
    result = run(HALF, bowl(), "40 steps", watch=patience)
    assert result.summary["outer_steps"] == last + 2
    assert result.summary["stopped_by"] == "watch"
    again = run(HALF, bowl(), "40 steps", watch=patience)
    assert again.summary == result.summary, "one object may watch several runs, one after another"

    folder = tmp_path / "x"
    with pytest.raises(ZeroDivisionError):  # broken off one step before the end
        run(
            HALF,
            bowl(),
            "40 steps",
            folder=folder,
            settings=RunSettings(checkpoint_seconds=0),
            watch=at(last + 1, ZeroDivisionError()),
        )
    fresh = Patience(metric="distance", steps=2, least=0.1)
    resumed = run(HALF, bowl(), "40 steps", folder=folder, resume=True, watch=fresh)
    assert resumed.summary == result.summary, "a resumed run ends where an uninterrupted one does"


def test_patience_knows_what_it_cannot_wait_for() -> None:
    with rejects("missing-option", "higher_is_better", of=ConfigError):
        Patience(metric="curious", steps=2)
    with rejects("unknown-metric", "watch", "metric", of=ConfigError) as caught:
        run(
            HALF,
            bowl(),
            "9 steps",
            watch=Patience(metric="distanc", steps=2, higher_is_better=False),
        )
    assert caught.value.did_you_mean == ("distance",)


def test_a_study_of_optuna_prunes_in_one_line() -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def objective(trial: Any) -> float:
        rate = trial.suggest_float("rate", 0.01, 0.25)
        method: Method = Follow(rate)
        return float(
            run(method, bowl(), "6 steps", watch=pruned(trial, "distance")).summary["metrics"][
                "distance"
            ]
        )

    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=0.5, n_warmup_steps=5))
    study.enqueue_trial({"rate": 0.25})
    study.enqueue_trial({"rate": 0.01})
    study.optimize(objective, n_trials=2)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]
    assert list(study.trials[1].intermediate_values) == [0, 1, 2, 3, 4, 5]


def test_a_folder_named_by_its_object(tmp_path: Path) -> None:
    result = run(HALF, bowl(), "1 steps", folder=RunFolder(tmp_path / "x"))
    assert result.info.folder == tmp_path / "x"
