"""A run in memory: its budget, its clock, its rows and its device."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from support.descent import Descent, descend, problem

from hgms.config import Budget
from hgms.runs import Interrupted, RunFolder, RunSettings, run
from hgms.runs.clock import Clock
from hgms.runs.signals import counted_suspensions

# --- budget


def test_a_budget_is_counted_in_steps_calls_or_seconds_after_a_step_that_warms_up() -> None:
    assert descend(steps=7).summary["outer_steps"] == 7
    assert descend(budget=Budget(oracle_calls=10)).summary["outer_steps"] == 4
    calls: list[int] = []

    def before(step: int) -> None:
        calls.append(step)
        time.sleep(0.3 if len(calls) == 1 else 0.02)

    timed = descend(Descent(before=before), budget=Budget(seconds=0.1))
    assert 0.1 <= timed.seconds < 0.2
    assert 3 <= timed.summary["outer_steps"] == len(calls) - 1 <= 5
    calls.clear()
    descend(Descent(before=before), steps=3)
    assert calls == [0, 1, 2], "no step is discarded"


# --- clock


def test_the_clock_counts_steps_only_and_the_cpu_clock_counts_work_only() -> None:
    wall, cpu = (
        descend(
            Descent(before=lambda step: time.sleep(0.02)),
            steps=5,
            problem=problem(evaluate_seconds=0.05),
            watch=lambda *_: time.sleep(0.05),
            settings=RunSettings(clock=clock),
        ).seconds
        for clock in ("wall", "cpu")
    )
    assert 0.1 <= wall < 0.2  # evaluation and watching took 600 ms
    assert 0 < cpu < 0.5 * wall


@pytest.mark.skipif(not hasattr(signal, "SIGCONT"), reason="this system does not stop processes")
@pytest.mark.parametrize("suspended", [False, True])
def test_the_clock_does_not_count_suspended_time(
    suspended: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(0.0, torch.device("cpu"))
    times = iter((0.0, 1000.0))
    clock._time = lambda: next(times)
    with counted_suspensions() as count:
        clock.suspensions = count
        with clock:
            if suspended:
                os.kill(os.getpid(), signal.SIGCONT)
    assert (clock.seconds < 10) == suspended
    assert ("suspended" in caplog.text) == suspended
    assert signal.getsignal(signal.SIGCONT) is signal.SIG_DFL


# --- rows


def test_rows_on_disk_and_in_memory_agree_and_the_global_generator_is_untouched(
    tmp_path: Path,
) -> None:
    before = torch.random.get_rng_state()
    folder = RunFolder(tmp_path / "run")
    result = descend(steps=6, folder=folder, settings=RunSettings(evaluate_every=2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert folder.records() == result.records
    assert [row["step"] for row in result.records] == list(range(7))
    assert [row["step"] for row in result.records if "metric.size" in row] == [0, 2, 4, 6]
    assert result.records[1]["gap"] is None, "JSON has no infinity"


def test_ctrl_c_before_the_first_step_says_that_nothing_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("hgms.runs.launch.Registry.load", interrupted)
    monkeypatch.setattr(Descent, "init", interrupted)
    for method in ("uniform", Descent()):
        with pytest.raises(Interrupted) as caught:
            run(method, problem(), "1 steps")
        assert "nothing is saved" in caught.value.message


# --- device


def test_a_gpu_is_used_by_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as the first GPU of the machine, which a run on the second does not use."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    with Clock(0.0, torch.device("cuda:1")):
        assert waited == [torch.device("cuda:1")]
    with Clock(0.0, torch.device("cpu")):
        pass
    assert waited == [torch.device("cuda:1")] * 2
