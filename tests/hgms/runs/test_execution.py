"""How a run is carried out: decided once, in force during the run, recorded, resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import attrs
import pytest
import torch
from support.descent import Descent, descend, problem, resumed, stopped
from support.helpers import run_files

from hgms.runs import Product, RouteChoice, RunFolder, RunSettings
from hgms_core import Problem

MEASURED = Product(
    rows=9,
    shape=(9, 8, 7),
    seconds={"exact": 2.0, "fast": 1.0},
    errors={"exact": 1e-7, "fast": 2e-7},
)
FAST = RouteChoice(route="fast", reason="half the time", products=(MEASURED,))
EXACT = RouteChoice(route="exact", reason="it is slower", products=(MEASURED,))

Decide = Callable[..., None]


@pytest.fixture
def decide(monkeypatch: pytest.MonkeyPatch) -> Decide:
    """Lets the calibration choose so, in this order; a further one is a failure."""

    return lambda *choices: monkeypatch.setattr(
        "hgms.runs.execution.calibrated", Mock(side_effect=choices)
    )


def precision() -> str:
    return torch.get_float32_matmul_precision()


WITNESS = Descent(record=lambda step: {"inside": precision()})


def witnessed() -> Problem:
    return attrs.evolve(
        problem(), evaluate=lambda theta, x: {"fast": float(precision() == "medium")}
    )


def route(result: Any) -> Any:
    return result.execution.matmul


def test_the_choice_is_in_force_from_the_first_step_to_the_last_evaluation(
    tmp_path: Path, decide: Decide
) -> None:
    decide(FAST)
    result = descend(WITNESS, problem=witnessed(), folder=tmp_path)
    assert {row["inside"] for row in result.records[1:]} == {"medium"}
    assert {row["metric.fast"] for row in result.records} == {1.0}
    assert precision() == "highest"
    assert route(result) == FAST
    recorded = RunFolder(tmp_path).read_environment()["execution"]["matmul"]
    assert recorded == json.loads(json.dumps(attrs.asdict(FAST)))


def test_what_the_settings_say_is_not_measured(decide: Decide) -> None:
    decide()
    routes: list[tuple[Any, str]] = [("exact", "highest"), ("fast", "medium")]
    for chosen, inside in routes:
        result = descend(WITNESS, settings=RunSettings(matmul=chosen))
        assert result.records[-1]["inside"] == inside
        assert route(result) == RouteChoice(route=chosen, reason="the settings say so")


# --- resuming


def test_a_resumed_run_takes_what_was_recorded(tmp_path: Path, decide: Decide) -> None:
    decide(FAST, FAST)  # each run decides once, and the resumed one does not
    folder = stopped(tmp_path / "run")
    result = resumed(folder)
    descend(folder=tmp_path / "whole")
    assert route(result) == FAST
    assert run_files(folder.path) == run_files(tmp_path / "whole")
    assert resumed(folder).execution == result.execution, "it is read back"
    assert "before" not in folder.read_environment()


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[]",
        "[" * 9999,
        '{"python": "\\u001b[31m"}',
        '{"versions": null}',
        '{"versions": "x", "before": 3}',
        '{"execution": 3}',
        '{"execution": {"matmul": {"route": "quick", "reason": ""}}}',
    ],
)
def test_what_cannot_be_read_is_decided_again_and_said(
    tmp_path: Path, damage: str, decide: Decide, caplog: pytest.LogCaptureFixture
) -> None:
    decide(FAST, EXACT)
    folder = stopped(tmp_path / "run")
    (folder.path / "env.json").write_text(damage)
    assert route(resumed(folder)) == EXACT
    assert "env.json no longer contains" in caplog.text
    assert folder.read_environment()["versions"]["torch"] == torch.__version__
