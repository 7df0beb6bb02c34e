"""Watchers that end a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.own_problems import Follow, bowl

from hgms.plugins import Host
from hgms.runs import RunResult, RunSettings, StopRun, run, trial_pruner
from hgms_core import RunInfo


def half(budget: str = "9 steps", **options: Any) -> RunResult:
    method: Any = Follow(0.25)
    made = options.pop("problem", bowl())
    watch = options.pop("watch", ())
    several = watch if isinstance(watch, list | tuple) else [watch]
    return run(method, made, budget, watch=[Host(), *several], **options)


def at(step: int, answer: Any = True) -> Any:
    def watch(info: RunInfo, record: Mapping[str, Any], share: float) -> Any:
        if record["step"] == step and isinstance(answer, BaseException):
            raise answer
        return record["step"] == step and answer

    return watch


@pytest.mark.parametrize(
    ("answer", "says"),
    [(True, "watch"), (StopRun("enough"), "watch: enough"), (StopIteration(), "watch")],
)
def test_a_watcher_ends_the_run_which_is_finished_and_has_metrics(
    tmp_path: Path, answer: Any, says: str
) -> None:
    seen: list[int] = []
    watch = [at(3, answer), lambda info, record, share: seen.append(record["step"])]
    result = half(folder=tmp_path, watch=watch, settings=RunSettings(evaluate_every=2))
    told = [result.summary[name] for name in ("status", "outer_steps", "stopped_by")]
    assert told == ["done", 3, says]
    assert seen == [0, 1, 2, 3], "all watchers see every row"
    assert "metric.distance" not in result.records[-1]
    again = half(folder=tmp_path, resume=True, settings=RunSettings(evaluate_every=2))
    assert again.summary == result.summary
    alone = half("3 steps")
    assert result.summary["metrics"] == alone.summary["metrics"]
    torch.testing.assert_close(result.theta, alone.theta, rtol=0, atol=0)


def test_a_study_of_optuna_prunes_in_one_line() -> None:
    optuna = pytest.importorskip("optuna")

    def objective(trial: Any) -> float:
        result = half("6 steps", watch=trial_pruner(trial, "distance"))
        return float(result.summary["metrics"]["distance"])

    study = optuna.create_study(pruner=Mock(prune=Mock(side_effect=[*[False] * 12, True])))
    study.optimize(objective, n_trials=2)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]
    assert list(study.trials[1].intermediate_values) == [0, 1, 2, 3, 4, 5]
