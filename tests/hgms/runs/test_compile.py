"""run.compile: when it pays, what it costs and who pays for it, what is recorded and resumed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import run_files
from support.programs import MAKING, Time, Walker, halved, problem
from torch.fx import GraphModule

from hgms.compiled import programs
from hgms.plugins import Host
from hgms.runs import Execution, Interrupted, RunFolder, RunResult, RunSettings, run
from hgms.runs.clock import Clock
from hgms.runs.compiling import ANNOUNCEMENT
from hgms.runs.signals import COMPILING
from hgms.tasks.quadratic import Quadratic
from hgms_core import Problem, State

TIMED = 5
"""Discarded steps that time compiled steps against eager ones: the first compiles."""
COMPILED = RunSettings(compile=True, checkpoint_seconds=0)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> None:
    """The clocks of runs show ``Time``; every program takes MAKING seconds to make."""
    monkeypatch.setattr(Time, "now", 0.0)
    monkeypatch.setattr(Clock, "now", lambda clock: Time.now)


def walk(budget: str, walker: Any = None, **options: Any) -> RunResult:
    made = options.pop("problem", problem())
    watch = [Host(), *options.pop("watch", ())]
    return run(walker or Walker(), made, budget, watch=watch, **options)


def compilation(result: Any) -> Any:
    return result.execution.compile


def recorded(folder: Path) -> Any:
    return RunFolder(folder).read_environment()["execution"].get("compile", {})


# --- when it pays


@pytest.mark.parametrize(
    ("budget", "times", "wanted", "steps"),
    [
        # in seconds it decides alone: the two steps that fit, and the one that warms up
        ("59.9 s", [30.0], False, 3),
        ("60 s", [30.0], True, 3 + TIMED),
        # with other budgets the time of a step decides, which is discarded
        ("49 steps", [9.0], False, 49),
        ("50 steps", [2.0], True, 50 + 2 + TIMED),
        ("50 steps", [1.0], False, 50 + 1),
        # the first step of a process loads modules
        ("50 steps", [9.0, 1.0], False, 50 + 2),
        ("4999 calls", [9.0], False, 50),
        ("5000 calls", [2.0], True, 50 + 2 + TIMED),
    ],
)
def test_a_budget_in_seconds_or_the_time_of_a_step_decides(
    stopped: None, budget: str, times: list[float], wanted: bool, steps: int
) -> None:
    walker = Walker(times)
    result = walk(budget, walker)
    last = result.records[-1]
    assert compilation(result).wanted is wanted, compilation(result).reason
    assert walker.steps == steps
    assert {row["compiled"] for row in result.records[1:]} == {float(wanted)}
    assert result.x["x"].tolist() == [0.5 ** last["step"]] * 2, "a discarded step changes nothing"
    assert last["oracle_calls"] == 100 * last["step"]


@pytest.mark.parametrize(("compiled", "wanted"), [(2.5, False), (0.5, True)])
def test_compiled_steps_are_used_only_if_they_are_faster(
    stopped: None, compiled: float, wanted: bool, tmp_path: Path
) -> None:
    class Timed(Walker):
        def step(self, problem: Problem, state: State, progress: float) -> Any:
            Time.now += 0.0 if problem.compiler is None else compiled - 2.0
            return super().step(problem, state, progress)

    result = walk("50 steps", Timed([2.0]), folder=tmp_path)
    assert {row["compiled"] for row in result.records[1:]} == {float(wanted)}
    found = recorded(tmp_path)
    assert found["measured"] == {"eager": 2.0, "compiled": compiled}
    assert (found["wanted"], found["seconds"] > 0) == (wanted, True)
    assert ("a compiled step takes 2.5 s" in found["reason"]) is not wanted
    assert [row["seconds"] for row in result.records[:2]] == [0.0, compiled if wanted else 2.0]


# --- time and records


@pytest.mark.parametrize("budget", ["4 steps", "4 s"])
def test_making_programs_is_on_no_clock_whenever_it_happens(
    stopped: None, budget: str, tmp_path: Path
) -> None:
    class Late(Walker):
        def step(self, problem: Problem, state: State, progress: float) -> Any:
            compiler = problem.compiler
            if compiler is not None and state["step"] == 2:
                compiler(("twice",), halved)(state["x"])
            return super().step(problem, state, progress)

    result = walk(budget, Late(), settings=COMPILED, folder=tmp_path)
    assert Time.now >= 2 * MAKING
    assert [row["seconds"] for row in result.records] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert compilation(result).compiled_names == ["halve", "twice"]
    # recorded apart from the result, which is the same for every run of one seed
    table = recorded(tmp_path)
    assert table["seconds"] == compilation(result).seconds > 0
    assert table["outcomes"] == {"halve": "compiled", "twice": "compiled"}
    assert Execution.from_environment(RunFolder(tmp_path).read_environment()) == result.execution
    assert "compile" not in (tmp_path / "summary.json").read_text()


def test_a_resumed_run_takes_what_was_recorded_and_adds_its_own(
    stopped: None, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"folder": tmp_path, "settings": RunSettings(checkpoint_seconds=0)}
    with pytest.raises(Interrupted):
        walk("50 steps", Walker(interrupts_at=0), **options)
    assert not recorded(tmp_path), "it was not decided"
    with pytest.raises(Interrupted):
        walk("50 steps", Walker([2.0], interrupts_at=2), resume=True, **options)
    first = recorded(tmp_path)
    walker = Walker([0.1])
    result = walk("50 steps", walker, resume=True, **options)
    assert walker.steps == 48, "it asks no step for the time"
    assert {row["compiled"] for row in result.records[1:]} == {1.0}
    assert compilation(result).reason == first["reason"]
    assert recorded(tmp_path)["seconds"] == compilation(result).seconds > first["seconds"] > 0
    assert walk("50 steps", resume=True, **options).execution == result.execution


@pytest.mark.extended
def test_a_resumed_run_of_compiled_steps_equals_an_uninterrupted_one(
    interpreted: None, tmp_path: Path
) -> None:
    method = {"name": "hg-ms", "generator": {"name": "branches", "steps": 2}}
    made = Quadratic().problem(0, torch.device("cpu"), torch.float32)

    def go(folder: str, stop: int | None = None, **options: Any) -> RunResult:
        def watch(_info: object, record: Mapping[str, Any], _share: float) -> None:
            if record["step"] == stop:
                raise KeyboardInterrupt

        options |= {"folder": tmp_path / folder, "settings": COMPILED, "watch": [watch]}
        return run(method, made, "4 steps", **options)

    with pytest.raises(Interrupted):
        go("resumed", stop=2)
    result, whole = go("resumed", resume=True), go("whole")
    assert result.info.resumed_from == 1
    assert set(compilation(result).outcomes.values()) == {"compiled"}
    assert "step" in compilation(whole).outcomes
    assert run_files(tmp_path / "resumed") == run_files(tmp_path / "whole")


# --- interrupts


@pytest.mark.parametrize(("at", "step"), [(1, 0), (6, 2)])
def test_ctrl_c_while_a_program_is_made_ends_the_run_before_the_next_one_and_excludes_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    at: int,
    step: int,
) -> None:
    """It ends a C++ compiler too, whose error is then no fault of the function."""
    made = []

    class Two(Walker):
        def step(self, problem: Problem, state: State, progress: float) -> Any:
            compiler: Any = problem.compiler
            for name in ("first", "second"):
                compiler((name, state["step"]), halved)(state["x"])
            return super().step(problem, state, progress)

    def inductor(
        graph: GraphModule, leaves: Sequence[torch.Tensor], **_: Any
    ) -> Callable[..., Any]:
        made.append(graph)
        if len(made) == at:
            signal.raise_signal(signal.SIGINT)
            raise RuntimeError("the compiler ended")
        return lambda inputs: graph(*inputs)

    monkeypatch.setattr(programs, "compile_graph", inductor)
    options: dict[str, Any] = {"folder": tmp_path, "settings": COMPILED}
    with pytest.raises(Interrupted):
        walk("4 steps", Two(), **options)
    assert len(made) == at
    assert set(recorded(tmp_path)["outcomes"].values()) <= {"compiled"}
    assert capsys.readouterr().err.splitlines() == [ANNOUNCEMENT, COMPILING]
    again = walk("4 steps", Two(), resume=True, **options)
    assert again.info.resumed_from == step
    assert again.x["x"].tolist() == [0.5**4] * 2


EAGER = """
import sys
from hgms.cli import main

try:
    main(["run", sys.argv[1], "--out", sys.argv[2]])
except SystemExit as ended:
    assert not ended.code, ended
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.extended
def test_an_eager_run_does_not_import_torchs_compiler(tmp_path: Path) -> None:
    """Its import takes seconds; forward-mode derivatives would import it."""
    config = tmp_path / "run.toml"
    config.write_text(
        'budget = "1 steps"\n[task]\nname = "quadratic"\n[method]\nname = "hg-ms"\n'
        "[run]\ncompile = false\n"
    )
    command = [sys.executable, "-c", EAGER, config, tmp_path / "runs"]
    subprocess.run(command, check=True)
