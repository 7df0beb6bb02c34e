"""run.compile: when it pays, what it costs and who pays for it, what is recorded and resumed."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner
from support.helpers import rejects, run_files
from support.programs import MAKING, Time, Walker, halved, problem
from torch.fx import GraphModule

from hgms.cli import main
from hgms.compiled import programs, programs_of
from hgms.runs import Compilation, Execution, Interrupted, RunFolder, RunResult, RunSettings, run
from hgms.runs.loop import ANNOUNCEMENT, Clock
from hgms.runs.signals import COMPILING
from hgms.tasks.quadratic import Quadratic
from hgms_core import Budget, ConfigError, Problem, State
from hgms_core.host import Host

COMPILED = RunSettings(compile=True)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> None:
    """The clocks of runs show ``Time``; every program takes MAKING seconds to make."""

    class Stopped(Clock):
        def now(self) -> float:
            return Time.now

    monkeypatch.setattr(Time, "now", 0.0)
    monkeypatch.setattr("hgms.runs.loop.Clock", Stopped)


def walk(budget: Budget, walker: Any = None, **options: Any) -> RunResult:
    made = options.pop("problem", problem())
    return run(walker or Walker(), made, budget, host=Host(), **options)


def steps(count: int) -> Budget:
    return Budget(outer_steps=count)


def compilation(result: RunResult) -> Compilation:
    assert result.execution is not None
    assert result.execution.compile is not None
    return result.execution.compile


def recorded(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = RunFolder(folder).read_environment()["execution"].get("compile", {})
    return table


def compiler_that(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> None:
    """Puts another compiler in the place of torch's."""

    def inductor(graph: GraphModule, leaves: Sequence[torch.Tensor]) -> Any:
        act()
        raise RuntimeError("no C++ compiler\nand a long story")

    monkeypatch.setattr(programs, "_inductor", inductor)


# --- when it pays


@pytest.mark.parametrize(("seconds", "wanted"), [(59.9, False), (60.0, True)])
def test_a_budget_in_seconds_decides_alone(stopped: None, seconds: float, wanted: bool) -> None:
    walker = Walker([30.0])
    result = walk(Budget(seconds=seconds), walker)
    assert compilation(result).wanted is wanted
    assert walker.steps == 3, "the two that fit, and the one that warms up"
    assert [row["compiled"] for row in result.records[1:]] == [float(wanted)] * 2


@pytest.mark.parametrize(
    ("budget", "times", "wanted", "discarded"),
    [
        (steps(49), [9.0], False, 0),
        (steps(50), [2.0], True, 2),
        (steps(50), [1.0], False, 1),
        # the first step of a process loads modules
        (steps(50), [9.0, 1.0], False, 2),
        (Budget(oracle_calls=4999), [9.0], False, 0),
        (Budget(oracle_calls=5000), [2.0], True, 2),
        (Budget(oracle_calls=5000), [1.0], False, 1),
    ],
)
def test_with_other_budgets_the_time_of_a_step_decides(
    stopped: None, budget: Budget, times: list[float], wanted: bool, discarded: int
) -> None:
    walker = Walker(times)
    result = walk(budget, walker)
    last = result.records[-1]
    assert compilation(result).wanted is wanted, compilation(result).reason
    assert walker.steps == 50 + discarded - (budget.outer_steps == 49)
    assert last["compiled"] == float(wanted)
    assert result.x["x"].tolist() == [0.5 ** last["step"]] * 2, "a discarded step changes nothing"
    assert last["oracle_calls"] == 100 * last["step"]


@pytest.mark.parametrize(
    ("seconds", "count", "device", "wanted"),
    [
        (0.0959, 100, "cuda", True),
        (0.12, 312, "cuda", True),
        (0.0454, 300, "cuda", True),
        (0.0454, 50, "cuda", False),
        (0.0959, 100, "cpu", False),
        (0.0959, 700, "cpu", True),
    ],
)
def test_the_time_of_a_step_is_weighed_by_the_device(
    seconds: float, count: int, device: str, wanted: bool
) -> None:
    decision = Compilation.timed(lambda: (seconds, 1 / count), device)
    assert decision.wanted is wanted, decision.reason


def test_no_step_is_timed_without_a_compiler() -> None:
    where = {"x": torch.ones(2, device="meta")}
    decision = Compilation.settled("auto", steps(9999), problem(x0=where))
    assert decision is not None
    assert not decision.wanted


@pytest.mark.parametrize("setting", [True, False])
@pytest.mark.parametrize("budget", [steps(2), Budget(seconds=100.0)])
def test_the_settings_come_first(stopped: None, setting: bool, budget: Budget) -> None:
    result = walk(budget, Walker([40.0]), settings=RunSettings(compile=setting))
    assert compilation(result).wanted is setting
    assert {row["compiled"] for row in result.records[1:]} == {float(setting)}


def test_losses_that_count_their_calls_are_not_compiled(stopped: None) -> None:
    result = walk(steps(2), problem=problem(counters=dict), settings=COMPILED)
    assert [row["compiled"] for row in result.records[1:]] == [0.0, 0.0]
    assert compilation(result).outcomes == {}


def test_a_timed_step_that_fails_has_its_own_error(stopped: None, tmp_path: Path) -> None:
    class Broken(Walker):
        def step(self, problem: Problem, state: State, progress: float) -> Any:
            raise ConfigError("broken", "the step is broken")

    with rejects("broken", of=ConfigError):
        walk(steps(100), Broken(), folder=tmp_path)
    assert (RunFolder(tmp_path).read_summary() or {})["status"] == "failed"


# --- time


@pytest.mark.parametrize("budget", [steps(4), Budget(seconds=4.0)])
def test_making_programs_is_on_no_clock_whenever_it_happens(stopped: None, budget: Budget) -> None:
    class Late(Walker):
        def step(self, problem: Problem, state: State, progress: float) -> Any:
            compiler = programs_of(problem)
            if compiler is not None and state["step"] == 2:
                compiler(("twice",), halved)(state["x"])
            return super().step(problem, state, progress)

    result = walk(budget, Late(), settings=COMPILED)
    assert Time.now >= 2 * MAKING
    assert [row["seconds"] for row in result.records] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert compilation(result).seconds > 0
    assert compilation(result).compiled == ["halve", "twice"]


# --- records


def test_what_was_compiled_is_recorded_apart_from_the_result(stopped: None, tmp_path: Path) -> None:
    result = walk(steps(2), folder=tmp_path, settings=COMPILED)
    table = recorded(tmp_path)
    assert table["seconds"] == compilation(result).seconds > 0
    assert (table["wanted"], table["outcomes"]) == (True, {"halve": "compiled"})
    assert Execution.recorded(RunFolder(tmp_path).read_environment()) == result.execution
    assert "compile = true" in (tmp_path / "config.toml").read_text()
    # which is the same for every run of one seed
    assert "compile" not in (tmp_path / "summary.json").read_text()


def test_a_resumed_run_takes_what_was_recorded_and_adds_its_own(
    stopped: None, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"folder": tmp_path, "settings": RunSettings(checkpoint_seconds=0)}
    with pytest.raises(Interrupted):
        walk(steps(50), Walker(interrupts_at=0), **options)
    assert not recorded(tmp_path), "it was not decided"
    with pytest.raises(Interrupted):
        walk(steps(50), Walker([2.0], interrupts_at=2), resume=True, **options)
    first = recorded(tmp_path)
    assert first["wanted"]
    walker = Walker([0.1])
    result = walk(steps(50), walker, resume=True, **options)
    assert walker.steps == 48, "it asks no step for the time"
    assert {row["compiled"] for row in result.records[1:]} == {1.0}
    assert compilation(result).reason == first["reason"]
    assert compilation(result).seconds > first["seconds"] > 0
    assert recorded(tmp_path)["seconds"] == compilation(result).seconds
    assert "before" not in RunFolder(tmp_path).read_environment()
    assert walk(steps(50), resume=True, **options).execution == result.execution


def test_what_could_not_be_compiled_is_not_tried_again(
    stopped: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "folder": tmp_path,
        "settings": RunSettings(compile=True, checkpoint_seconds=0),
    }
    with monkeypatch.context() as patch:
        compiler_that(patch, lambda: None)
        with pytest.raises(Interrupted):
            walk(steps(4), Walker(interrupts_at=2), **options)
    result = walk(steps(4), resume=True, **options)
    assert compilation(result).compiled == []
    assert compilation(result).outcomes.keys() == {"halve"}
    assert Time.now == 4 * 1.0


@pytest.mark.extended
def test_a_resumed_run_of_compiled_steps_equals_an_uninterrupted_one(
    interpreted: None, tmp_path: Path
) -> None:
    settings = RunSettings(compile=True, checkpoint_seconds=0)
    method = {"name": "hg-ms", "generator": {"name": "branches", "steps": 2}}
    made = Quadratic().problem(0, torch.device("cpu"), torch.float32)

    def go(folder: str, stop: int | None = None, **options: Any) -> RunResult:
        def watch(_info: object, record: Mapping[str, Any], _share: float) -> None:
            if record["step"] == stop:
                raise KeyboardInterrupt

        options |= {"folder": tmp_path / folder, "settings": settings, "watch": watch}
        return run(method, made, "4 steps", **options)

    with pytest.raises(Interrupted):
        go("resumed", stop=2)
    result, whole = go("resumed", resume=True), go("whole")
    assert result.info.resumed_from == 1
    assert set(compilation(result).outcomes.values()) == {"compiled"}
    assert {"branches", "linearization", "cg"} <= set(compilation(whole).outcomes)
    assert run_files(tmp_path / "resumed") == run_files(tmp_path / "whole")


# --- interrupts and failures of the compiler


@attrs.define
class Two(Walker):
    """A step of two more programs; Ctrl-C while the first one is made in step ``at``."""

    at: int = attrs.field(default=0, metadata={"toml": False})
    made: list[str] = attrs.field(factory=list, metadata={"toml": False})

    def step(self, problem: Problem, state: State, progress: float) -> Any:
        compiler = programs_of(problem)
        assert compiler is not None
        for name in ("first", "second"):

            def halved_here(x: Any, name: str = name, at: int = state["step"]) -> Any:
                if not self.made and at == self.at:
                    self.made.append(name)
                    signal.raise_signal(signal.SIGINT)
                return halved(x)

            compiler((name, state["step"]), halved_here)(state["x"])
        return super().step(problem, state, progress)


@pytest.mark.parametrize("at", [0, 2])
def test_ctrl_c_ends_the_run_between_two_programs(
    interpreted: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], at: int
) -> None:
    method = Two(at=at)
    options: dict[str, Any] = {"folder": tmp_path, "settings": COMPILED}
    with pytest.raises(Interrupted):
        walk(steps(4), method, **options)
    assert method.made == ["first"]
    assert capsys.readouterr().err.splitlines() == [ANNOUNCEMENT, COMPILING]
    again = walk(steps(4), method, resume=True, **options)
    assert again.info.resumed_from == at
    assert again.x["x"].tolist() == [0.5**4] * 2


def test_a_compiler_that_ctrl_c_ended_is_not_excluded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler_that(monkeypatch, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Interrupted):
        walk(steps(4), folder=tmp_path, settings=COMPILED)
    assert recorded(tmp_path)["outcomes"] == {}


def test_a_compiler_that_exits_does_not_end_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def leave() -> None:
        raise SystemExit(3)

    compiler_that(monkeypatch, leave)
    with caplog.at_level(logging.WARNING, "hgms.programs"):
        result = walk(steps(2), settings=COMPILED)
    assert result.x["x"].tolist() == [0.25] * 2
    assert len(caplog.records) == 1
    assert compilation(result).outcomes.keys() == {"halve"}


# --- the terminal


def shown(folder: Path, *settings: str) -> Any:
    text = 'task = "quadratic"\nmethod = "uniform"\nbudget = "1 steps"\n'
    (folder / "run.toml").write_text(text)
    command = ["run", str(folder / "run.toml"), "--out", str(folder / "out")]
    done = CliRunner().invoke(main, command + [part for one in settings for part in ("--set", one)])
    assert done.exit_code == 0, done.output
    return done


def test_the_terminal_says_what_was_compiled_and_how_products_are_computed(
    interpreted: None, tmp_path: Path
) -> None:
    done = shown(tmp_path, "run.compile=true", 'run.matmul="fast"')
    assert done.stderr.splitlines() == [ANNOUNCEMENT]
    assert "\n  compiled: branches" in done.output
    assert "\n  matmul: fast (" in done.output
    plain = shown(tmp_path).output
    assert "compile" not in plain
    assert "matmul" not in plain


def test_without_a_compiler_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler_that(monkeypatch, lambda: None)
    done = shown(tmp_path, "run.compile=true")
    assert done.stderr.count("warning: ") == 1
    assert "no C++ compiler\n" in done.stderr
    assert "compiled: " not in done.stdout
