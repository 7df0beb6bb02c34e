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
from support.descent import Descent, descend, problem, resumed, signals, stopped
from support.helpers import run_files

from hgms.compiled import Product, RouteChoice
from hgms.runs import Interrupted, RunFolder, RunSettings
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


def test_however_a_run_ends_the_setting_is_back(decide: Decide) -> None:
    decide(FAST, FAST)
    newer = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    for disturbed in (Descent(before=lambda step: 1 / 0), signals(2, 2)):
        with pytest.raises((ZeroDivisionError, Interrupted)):
            descend(disturbed)
        assert precision() == "highest"
        assert torch.backends.mkldnn.matmul.fp32_precision == newer  # type: ignore[attr-defined]


def test_what_the_settings_say_is_not_measured(decide: Decide) -> None:
    decide()
    torch.set_float32_matmul_precision("high")
    try:
        routes: list[tuple[Any, str]] = [("exact", "highest"), ("fast", "medium")]
        for chosen, inside in routes:
            result = descend(WITNESS, settings=RunSettings(matmul=chosen))
            assert result.records[-1]["inside"] == inside
            assert route(result) == RouteChoice(route=chosen, reason="the settings say so")
            assert precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.mkldnn.matmul.fp32_precision = "none"  # type: ignore[attr-defined]
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_a_small_problem_stays_exact() -> None:
    assert (route(descend()).route, route(descend()).products) == ("exact", ())


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
    assert "env.json no longer tells" in caplog.text
    assert folder.read_environment()["versions"]["torch"] == torch.__version__


def test_fast_is_kept_elsewhere_and_another_machine_or_torch_is_said(
    tmp_path: Path, decide: Decide, caplog: pytest.LogCaptureFixture
) -> None:
    decide(FAST)
    folder = stopped(tmp_path / "run")
    table = folder.read_environment()
    older = {**table, "threads": 77, "versions": {**table["versions"], "torch": "1.0"}}
    (folder.path / "env.json").write_text(json.dumps(older))
    assert route(resumed(folder)) == FAST
    for part in ("threads 77", f"torch 1.0 → {torch.__version__}", "as recorded, matmul: fast"):
        assert part in caplog.text
    assert folder.read_environment() == {**table, "before": [older]}
