"""The number of threads of a run: measured once, in force, recorded, and not measured if set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support.descent import Descent, descend, problem

from hgms.runs import RunFolder, RunSettings
from hgms.runs.threads import VARIABLES, ThreadChoice, choose_threads
from hgms_core import Problem

WITNESS = Descent(record=lambda step: {"inside": torch.get_num_threads()})


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def timed(several: float) -> tuple[Problem, Any]:
    """A problem and a clock: a gradient takes one second, and ``several`` with two threads."""
    now = [0.0]
    plain = problem()

    def g(theta: Any, x: Any, batch: Any) -> Any:
        now[0] += several if torch.get_num_threads() == 2 else 1.0
        return plain.g(theta, x, batch)

    return attrs.evolve(plain, g=g), lambda: now[0]


@pytest.mark.parametrize(("several", "chosen"), [(4.5, 1), (0.95, 1), (0.6, 2)])
def test_the_faster_number_of_threads_is_chosen(several: float, chosen: int) -> None:
    choice = choose_threads(*timed(several))
    assert choice is not None
    assert choice.threads == chosen
    assert choice.seconds == pytest.approx({"1": 1.0, "2": several})
    assert torch.get_num_threads() == 2


def test_the_choice_is_in_force_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ThreadChoice(threads=1, reason="two are slower", seconds={"1": 1.0, "2": 2.0})
    monkeypatch.setattr("hgms.runs.execution.choose_threads", lambda problem, clock: one)
    result = descend(WITNESS, folder=tmp_path)
    assert {row["inside"] for row in result.records[1:]} == {1}
    assert torch.get_num_threads() == 2
    assert result.execution.threads == one
    assert RunFolder(tmp_path).read_environment()["execution"]["threads"] == attrs.asdict(one)


def test_what_the_user_has_set_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert descend(WITNESS, settings=RunSettings(threads=2)).execution.threads is None
    monkeypatch.setenv(VARIABLES[0], "2")
    assert descend(WITNESS).execution.threads is None


def test_one_thread_and_counting_losses_are_not_measured() -> None:
    counting = attrs.evolve(problem(), counters=lambda: {"calls": 0})
    assert choose_threads(counting, lambda: 0.0) is None
    torch.set_num_threads(1)
    assert choose_threads(problem(), lambda: 0.0) is None
