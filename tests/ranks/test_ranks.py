"""One run on several ranks: the numbers of one rank, whatever is placed where; lost ranks;
resumes on another number.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from launches import children_of
from support.fakes import call
from support.helpers import rejects

from hgms.distributed import RankLost
from hgms.plugins import Registry
from hgms.runs import RunConfig, RunResult, run_config
from hgms_core import ConfigError

pytestmark = pytest.mark.extended

PLUGIN = Path(__file__).parent / "own_plugin.py"
FOLLOWER = "hgms.runs.follower"
CLEANING: dict[str, Any] = {
    "name": "hyper-cleaning",
    "dataset": "digits",
    "train_size": 256,
    "validation_size": 64,
    "test_size": 64,
}
HG_MS: dict[str, Any] = {
    "name": "hg-ms",
    "generator": {"count": 4, "steps": 3, "batch_size": 32},
    "hypergradient": {"batch_size": 128, "upper_batch_size": 32},
}
SMALL = {"steps": 3, "batch_size": 32}
METHODS = [
    {"name": "hg-ms-tilted", "generator": {"count": 3, **SMALL}},
    {"name": "hg-baseline", "generator": SMALL},
    {"name": "hg-ms-ula", "generator": {"count": 4, "steps": 3}},
    {
        **HG_MS,
        "hypergradient": {
            "name": "averaged",
            "estimator": {
                "name": "implicit",
                "solver": {"name": "cg", "ridge": 0.1, "max_steps": 4},
            },
        },
    },
]


def config(
    out: Path,
    ranks: int = 1,
    method: Any = HG_MS,
    task: Any = CLEANING,
    steps: int = 20,
    **run: Any,
) -> RunConfig:
    settings = {
        "out": str(out),
        "dtype": "float64",
        "threads": 1,
        "evaluate_every": 5,
        "ranks": ranks,
        **run,
    }
    table = {"budget": f"{steps} steps", "seed": 3, "task": task, "method": method, "run": settings}
    return RunConfig.from_dict(table, registry=Registry.load([PLUGIN]))


def assert_same(ours: RunResult, alone: RunResult) -> None:
    """The same choices and costs, and numbers to rounding, at every step."""
    for own, other in zip(ours.records, alone.records, strict=True):
        assert own.keys() == other.keys()
        for name, value in other.items():
            numbers = isinstance(value, float) or (isinstance(value, list) and None not in value)
            wanted = pytest.approx(value, rel=1e-6, abs=1e-12) if numbers else value
            assert name == "seconds" or own[name] == wanted, name
    torch.testing.assert_close(ours.theta, alone.theta, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(ours.x, alone.x, rtol=1e-6, atol=1e-12)


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method["name"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_change_no_number(tmp_path: Path, ranks: int, method: dict[str, Any]) -> None:
    alone = run_config(config(tmp_path / "alone", method=method))
    assert method["name"] == "hg-baseline" or several_selected(alone)
    assert_same(run_config(config(tmp_path / "ranks", ranks, method=method)), alone)


def several_selected(result: RunResult) -> bool:
    return len({record["selected"] for record in result.records[1:]}) > 1


@pytest.mark.nightly
def test_a_loss_that_is_no_mean_is_computed_whole_and_a_generator_without_parts_by_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = run_config(config(tmp_path / "alone", method="hg-around", task="sum-of-rows"))
    with caplog.at_level(logging.WARNING):
        ours = run_config(config(tmp_path / "ranks", 2, method="hg-around", task="sum-of-rows"))
    assert "the lower loss is no mean over the rows of a batch: every rank" in caplog.text
    assert_same(ours, alone)


@pytest.mark.nightly
def test_a_run_resumes_on_its_ranks_to_the_bit_and_on_another_number_to_rounding(
    tmp_path: Path,
) -> None:
    whole = config(tmp_path / "whole", 2)
    uninterrupted = run_config(whole)
    for ranks in (2, 1):
        began, again = (
            config(tmp_path / str(ranks), count, checkpoint_seconds=0.0) for count in (2, ranks)
        )
        with pytest.raises(ZeroDivisionError):
            run_config(began, watch=Mock(side_effect=[*[False] * 10, ZeroDivisionError]))
        assert_same(run_config(again, resume=True), uninterrupted)
        rows = [each.path / "steps.jsonl" for each in (began, whole)]
        assert ranks == 1 or rows[0].read_bytes() == rows[1].read_bytes()


def test_a_rank_that_dies_is_named_and_the_resumed_run_has_the_numbers_of_one_process(
    tmp_path: Path,
) -> None:
    alone = run_config(config(tmp_path / "alone", steps=9))
    assert several_selected(alone)

    def watch(_info: object, record: dict[str, Any], _share: float) -> None:
        if record["step"] == 7:
            (follower,) = children_of(FOLLOWER)
            os.kill(follower.pid, signal.SIGKILL)

    lost = config(tmp_path / "lost", 2, steps=9)
    with rejects("rank-lost", "run", "ranks", of=RankLost) as caught:
        run_config(lost, watch=watch)
    shown = f"{caught.value.message} {caught.value.hint}"
    assert all(part in shown for part in ("step 8", "rank 1 of 2", "SIGKILL", "--resume"))
    assert not (lost.path / "summary.json").exists(), "it did not fail"
    resumed = run_config(lost, resume=True)
    assert resumed.info.resumed_from == 7
    assert_same(resumed, alone)
    assert not children_of(FOLLOWER)


def test_what_ranks_cannot_do_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rejects("conflicting-options", "run", "compile", of=ConfigError):
        run_config(config(tmp_path, 2, compile=True))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    (tmp_path / "run.toml").write_text(config(tmp_path, 2).to_toml())
    done = call("run", tmp_path / "run.toml")
    assert (done.exit_code, "(run.ranks)" in done.stderr) == (2, True)
