"""run.compile: when it pays, what it costs and who pays for it, what is recorded, resumed,
shared and shown.
"""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
from click.testing import CliRunner
from support.helpers import rejects
from support.made_runs import write_run
from torch import Tensor
from torch.fx import GraphModule

from hgms.cli import main
from hgms.comparison import compare, load
from hgms.comparison.coordinator import Coordinator
from hgms.comparison.grid import Cell
from hgms.compiled import Programs, RouteChoice, programs, programs_of
from hgms.executors import Local
from hgms.report import build
from hgms.report.markdown import markdown
from hgms.report.page import html
from hgms.runs import (
    Compilation,
    Execution,
    Interrupted,
    RunConfig,
    RunFolder,
    RunResult,
    RunSettings,
    run,
)
from hgms.runs.loop import ANNOUNCEMENT, Clock
from hgms.runs.signals import COMPILING
from hgms_core import Budget, ConfigError, Problem, State
from hgms_core.registry import Registry

EXACT = RouteChoice(route="exact", reason="")
MAKING = 100.0


class Time:
    """What clocks show; it goes on where a test says so."""

    now = 0.0


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are the traced graphs themselves: all but the compiler, which takes seconds for
    each.
    """

    def as_traced(graph: GraphModule, leaves: Sequence[Tensor]) -> Callable[..., Any]:
        Time.now += MAKING
        return lambda inputs: graph(*inputs)

    monkeypatch.setattr(programs, "_inductor", as_traced)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> None:
    """The clocks of runs show ``Time``; every program takes MAKING seconds to make."""

    class Stopped(Clock):
        def now(self) -> float:
            return Time.now

    monkeypatch.setattr(Time, "now", 0.0)
    monkeypatch.setattr("hgms.runs.loop.Clock", Stopped)


@attrs.define
class Walker:
    """A method with a program; its steps take the seconds that are ``left``, the last of them
    for good.
    """

    name: ClassVar[str] = "walker"
    left: list[float] = attrs.field(factory=lambda: [1.0], metadata={"toml": False})
    interrupts_at: int | None = attrs.field(default=None, metadata={"toml": False})
    steps: int = attrs.field(default=0, metadata={"toml": False})

    def init(self, problem: Problem, seed: int) -> State:
        return {"x": dict(problem.x0), "step": 0}

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, dict[str, Any]]:
        if state["step"] == self.interrupts_at:
            raise KeyboardInterrupt
        self.steps += 1
        Time.now += self.left[0] if len(self.left) == 1 else self.left.pop(0)
        compiler = programs_of(problem)
        x = state["x"] if compiler is None else compiler(("halve",), halved)(state["x"])
        record = {
            "oracle_calls": 100 * (state["step"] + 1),
            "compiled": float(compiler is not None),
        }
        return {
            "x": halved(state["x"]) if compiler is None else x,
            "step": state["step"] + 1,
        }, record

    def result(self, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return {}, state["x"]


def halved(x: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: leaf / 2 for name, leaf in x.items()}


def problem(**more: Any) -> Problem:
    fields: dict[str, Any] = {
        "theta0": {},
        "x0": {"x": torch.ones(2)},
        "g": lambda t, x, b: x["x"].sum(),
        "f": lambda t, x, b: x["x"].sum(),
    }
    return Problem(**(fields | more))


def compilation(result: RunResult) -> Compilation:
    assert result.execution is not None
    assert result.execution.compile is not None
    return result.execution.compile


def recorded(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((folder / "env.json").read_bytes())["execution"]["compile"]
    return table


class TestWhenItPays:
    @pytest.mark.parametrize(("seconds", "wanted"), [(59.9, False), (60.0, True)])
    def test_a_budget_in_seconds_says_it_by_itself(
        self, stopped: None, seconds: float, wanted: bool
    ) -> None:
        walker = Walker([30.0])
        result = run(walker, problem(), Budget(seconds=seconds))
        assert compilation(result).wanted is wanted
        assert walker.steps == 3, "the two that fit, and the one that warms up"
        assert [row["compiled"] for row in result.records[1:]] == [float(wanted)] * 2

    @pytest.mark.parametrize(
        ("budget", "times", "wanted", "discarded"),
        [
            (Budget(outer_steps=49), [9.0], False, 0),
            (Budget(outer_steps=50), [2.0], True, 2),
            (Budget(outer_steps=50), [1.0], False, 1),
            # the first step of a process loads modules
            (Budget(outer_steps=50), [9.0, 1.0], False, 2),
            (Budget(oracle_calls=4999), [9.0], False, 0),
            (Budget(oracle_calls=5000), [2.0], True, 2),
            (Budget(oracle_calls=5000), [1.0], False, 1),
        ],
    )
    def test_of_other_budgets_a_step_tells(
        self, stopped: None, budget: Budget, times: list[float], wanted: bool, discarded: int
    ) -> None:
        walker = Walker(times)
        result = run(walker, problem(), budget)
        assert compilation(result).wanted is wanted, compilation(result).reason
        assert walker.steps == 50 + discarded - (budget.outer_steps == 49)
        assert result.records[-1]["compiled"] == float(wanted)
        assert result.x["x"].tolist() == [0.5 ** result.records[-1]["step"]] * 2, (
            "a discarded step changes nothing"
        )
        assert result.records[-1]["oracle_calls"] == 100 * result.records[-1]["step"]

    def test_it_says_why(self, stopped: None) -> None:
        reasons = [
            compilation(run(Walker([time]), problem(), budget)).reason
            for time, budget in (
                (2.0, Budget(outer_steps=50)),
                (0.2, Budget(outer_steps=50)),
                (1.0, Budget(outer_steps=3)),
            )
        ]
        assert reasons == [
            "eager steps take about 100 s, of which compilation saves about 50 s in about 30 s",
            "eager steps take about 10 s, of which compilation saves about 5 s in about 30 s",
            "a budget of 3 outer steps is too short to time a step",
        ]

    @pytest.mark.parametrize(
        ("seconds", "steps", "device", "wanted"),
        [
            (0.0959, 100, "cuda", True),
            (0.12, 312, "cuda", True),
            (0.0454, 300, "cuda", True),
            (0.0454, 50, "cuda", False),
            (0.0959, 100, "cpu", False),
            (0.0959, 700, "cpu", True),
        ],
    )
    def test_the_time_of_a_step_decides_by_the_device(
        self, seconds: float, steps: int, device: str, wanted: bool
    ) -> None:
        decision = Compilation.timed(lambda: (seconds, 1 / steps), device)
        assert decision.wanted is wanted, decision.reason

    def test_no_step_is_timed_without_a_compiler(self) -> None:
        where = {"x": torch.ones(2, device="meta")}
        decision = Compilation.settled("auto", Budget(outer_steps=9999), problem(x0=where))
        assert decision is not None
        assert not decision.wanted
        assert decision.reason == "torch has no compiler for meta"

    @pytest.mark.parametrize("setting", [True, False])
    def test_the_settings_come_first(self, stopped: None, setting: bool) -> None:
        for budget in (Budget(outer_steps=2), Budget(seconds=100.0)):
            result = run(Walker([40.0]), problem(), budget, settings=RunSettings(compile=setting))
            assert compilation(result).wanted is setting
            assert compilation(result).reason == "the settings say so"
            assert {row["compiled"] for row in result.records[1:]} == {float(setting)}

    def test_losses_that_count_what_they_do_run_as_written(self, stopped: None) -> None:
        result = run(
            Walker(),
            problem(counters=dict),
            Budget(outer_steps=2),
            settings=RunSettings(compile=True),
        )
        assert "count what they do" in compilation(result).reason
        assert [row["compiled"] for row in result.records[1:]] == [0.0, 0.0]
        assert compilation(result).outcomes == {}

    def test_a_method_that_is_done_at_once_makes_no_step(self, stopped: None) -> None:
        class Done(Walker):
            def finished(self, state: State) -> bool:
                return True

        walker = Done()
        result = run(walker, problem(), Budget(outer_steps=100))
        assert walker.steps == 0
        assert result.execution is not None
        assert result.execution.compile is None

    def test_a_step_that_breaks_is_explained_as_ever(self, stopped: None, tmp_path: Path) -> None:
        class Broken(Walker):
            def step(self, problem: Problem, state: State, progress: float) -> Any:
                raise ConfigError("broken", "the step is broken")

        with rejects("broken", of=ConfigError):
            run(Broken(), problem(), Budget(outer_steps=100), folder=tmp_path)
        assert (RunFolder(tmp_path).read_summary() or {})["status"] == "failed"


class TestTime:
    @pytest.mark.parametrize("budget", [Budget(outer_steps=3), Budget(seconds=3.0)])
    def test_making_programs_is_on_no_clock(self, stopped: None, budget: Budget) -> None:
        result = run(Walker(), problem(), budget, settings=RunSettings(compile=True))
        assert Time.now >= MAKING
        assert [row["seconds"] for row in result.records] == [0.0, 1.0, 2.0, 3.0]
        assert compilation(result).seconds > 0
        assert compilation(result).outcomes == {"halve": "compiled"}

    def test_also_where_it_is_made_late(self, stopped: None) -> None:
        class Late(Walker):
            def step(self, problem: Problem, state: State, progress: float) -> Any:
                following, record = super().step(problem, state, progress)
                compiler = programs_of(problem)
                if compiler is not None and state["step"] == 2:
                    compiler(("twice",), lambda x: {name: 2 * leaf for name, leaf in x.items()})(
                        state["x"]
                    )
                return following, record

        result = run(Late(), problem(), Budget(seconds=4.0), settings=RunSettings(compile=True))
        assert Time.now == 2 * MAKING + 5
        assert result.seconds == 4.0
        assert compilation(result).compiled == ["halve", "twice"]

    def test_both_clocks_are_the_runs(
        self, monkeypatch: pytest.MonkeyPatch, interpreted: None
    ) -> None:
        made: list[Programs] = []

        def kept(clock: Callable[[], float]) -> Programs:
            made.append(Programs(clock))
            return made[-1]

        monkeypatch.setattr("hgms.runs.execution.Programs", kept)
        monkeypatch.setattr("time.process_time", lambda: -3.0)
        for settings in (RunSettings(compile=True, clock="cpu"), RunSettings(compile=True)):
            run(Walker(), problem(), Budget(outer_steps=1), settings=settings)
        assert made[0].clock() == -3.0
        assert made[1].clock() > 0


class TestRecords:
    def test_env_json_tells_what_was_compiled(self, stopped: None, tmp_path: Path) -> None:
        result = run(
            Walker(),
            problem(),
            Budget(outer_steps=2),
            folder=tmp_path,
            settings=RunSettings(compile=True),
        )
        table = recorded(tmp_path)
        assert table.pop("seconds") == compilation(result).seconds > 0
        assert table == {
            "wanted": True,
            "reason": "the settings say so",
            "outcomes": {"halve": "compiled"},
        }
        environment = RunFolder(tmp_path).read_environment()
        assert Execution.recorded(environment) == result.execution
        assert {"python", "versions", "device"} <= environment.keys()
        assert "compile" not in (tmp_path / "summary.json").read_text(), (
            "which is the same for every run of one seed"
        )

    def test_a_resumed_run_takes_what_was_recorded_and_adds_its_own(
        self, stopped: None, tmp_path: Path
    ) -> None:
        settings = RunSettings(checkpoint_seconds=0)
        with pytest.raises(Interrupted):
            run(
                Walker([2.0], interrupts_at=2),
                problem(),
                Budget(outer_steps=50),
                folder=tmp_path,
                settings=settings,
            )
        first = recorded(tmp_path)
        assert first["wanted"]
        walker = Walker([0.1])
        result = run(
            walker,
            problem(),
            Budget(outer_steps=50),
            folder=tmp_path,
            resume=True,
            settings=settings,
        )
        assert walker.steps == 48, "it asks no step for the time"
        assert {row["compiled"] for row in result.records[1:]} == {1.0}
        assert compilation(result).reason == first["reason"]
        assert compilation(result).seconds > first["seconds"] > 0
        assert recorded(tmp_path)["seconds"] == compilation(result).seconds
        assert "before" not in RunFolder(tmp_path).read_environment()
        again = run(
            Walker(),
            problem(),
            Budget(outer_steps=50),
            folder=tmp_path,
            resume=True,
            settings=settings,
        )
        assert again.execution == result.execution

    def test_what_could_not_be_compiled_is_not_tried_again(
        self, stopped: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def lacking(graph: GraphModule, leaves: Sequence[Tensor]) -> Any:
            raise RuntimeError("no C++ compiler")

        settings = RunSettings(compile=True, checkpoint_seconds=0)
        budget = Budget(outer_steps=4)
        with monkeypatch.context() as patch:
            patch.setattr(programs, "_inductor", lacking)
            with pytest.raises(Interrupted):
                run(Walker(interrupts_at=2), problem(), budget, folder=tmp_path, settings=settings)
        result = run(Walker(), problem(), budget, folder=tmp_path, resume=True, settings=settings)
        assert compilation(result).outcomes == {
            "halve": "as written: it cannot be compiled: no C++ compiler"
        }
        assert Time.now == 4 * 1.0

    def test_killed_before_it_was_decided_it_decides(self, stopped: None, tmp_path: Path) -> None:
        with pytest.raises(Interrupted):
            run(Walker(interrupts_at=0), problem(), Budget(outer_steps=50), folder=tmp_path)
        assert "compile" not in RunFolder(tmp_path).read_environment()["execution"]
        assert compilation(
            run(Walker([2.0]), problem(), Budget(outer_steps=50), folder=tmp_path, resume=True)
        ).wanted

    @pytest.mark.extended
    def test_a_resumed_run_equals_an_uninterrupted_one(
        self, interpreted: None, tmp_path: Path
    ) -> None:
        method = {"name": "hg-ms", "generator": {"name": "branches", "steps": 2}}
        config = RunConfig.from_dict(
            {"task": "quadratic", "method": method, "budget": "4 steps", "run": {"compile": True}}
        )

        def go(folder: str, stop: int | None = None, resume: bool = False) -> RunResult:
            def watch(_info: object, record: Mapping[str, Any], _share: float) -> None:
                if record["step"] == stop:
                    raise KeyboardInterrupt

            built = config.task.problem(0, torch.device("cpu"), torch.float32)
            return run(
                config.method,
                built,
                config.budget,
                folder=tmp_path / folder,
                resume=resume,
                settings=attrs.evolve(config.run, checkpoint_seconds=0),
                watch=watch,
            )

        with pytest.raises(Interrupted):
            go("resumed", stop=2)
        result = go("resumed", resume=True)
        whole = go("whole")
        assert result.info.resumed_from == 1
        assert set(compilation(result).outcomes.values()) == {"compiled"}
        assert {"branches", "linearization", "cg"} <= set(compilation(whole).outcomes)
        for name in ("steps.jsonl", "summary.json", "checkpoint-4.safetensors"):
            assert (tmp_path / "resumed" / name).read_bytes() == (
                tmp_path / "whole" / name
            ).read_bytes()


class TestConfiguration:
    def config(self, **settings: Any) -> RunConfig:
        return RunConfig.from_dict(
            {"task": "quadratic", "method": "hg-ms", "budget": "2 steps", "run": settings}
        )

    def test_each_value_has_a_hash(self) -> None:
        plain = self.config()
        assert 'compile = "auto"' in plain.to_toml()
        assert self.config(compile="auto").path == plain.path
        assert len({self.config(compile=value).config_hash for value in ("auto", True, False)}) == 3
        compiled = self.config(compile=True)
        assert "compile = true" in compiled.to_toml()
        assert RunConfig.from_toml(compiled.to_toml()) == compiled

    @pytest.mark.parametrize("value", ["always", 3, 1.5])
    def test_a_wrong_value_is_told_what_there_is(self, value: object) -> None:
        with rejects("wrong-type", "run", "compile", of=ConfigError):
            self.config(compile=value)
        with rejects("wrong-type", "compile", of=ConfigError):
            RunSettings(compile=value)  # type: ignore[arg-type]

    def test_a_run_from_python_says_it_too(self, stopped: None, tmp_path: Path) -> None:
        run(
            Walker(),
            problem(),
            Budget(outer_steps=1),
            folder=tmp_path / "a",
            settings=RunSettings(compile=True),
        )
        run(Walker(), problem(), Budget(outer_steps=1), folder=tmp_path / "b")
        assert "compile = true" in (tmp_path / "a" / "config.toml").read_text()
        assert "compile =" not in (tmp_path / "b" / "config.toml").read_text()


class TestInterrupts:
    """Ctrl-C while functions of a step are compiled."""

    @attrs.define
    class Two(Walker):
        """A step of two programs; Ctrl-C while the first one is made in step ``at``."""

        at: int = attrs.field(default=0, metadata={"toml": False})
        made: list[str] = attrs.field(factory=list, metadata={"toml": False})

        def step(self, problem: Problem, state: State, progress: float) -> Any:
            compiler = programs_of(problem)
            assert compiler is not None
            for name in ("first", "second"):
                key = (name, state["step"])

                def halved_here(x: Any, name: str = name, at: int = state["step"]) -> Any:
                    if not self.made and at == self.at:
                        self.made.append(name)
                        signal.raise_signal(signal.SIGINT)
                    return halved(x)

                compiler(key, halved_here)(state["x"])
            return super().step(problem, state, progress)

    @pytest.mark.parametrize("at", [0, 2])
    def test_the_run_ends_between_two_programs(
        self, interpreted: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], at: int
    ) -> None:
        method = self.Two(at=at)
        settings = RunSettings(compile=True)
        with pytest.raises(Interrupted) as caught:
            run(method, problem(), Budget(outer_steps=4), folder=tmp_path, settings=settings)
        assert method.made == ["first"]
        assert f"the state after step {at} is saved" in caught.value.message
        assert capsys.readouterr().err.splitlines() == [ANNOUNCEMENT, COMPILING]
        again = run(
            method,
            problem(),
            Budget(outer_steps=4),
            folder=tmp_path,
            settings=settings,
            resume=True,
        )
        assert again.info.resumed_from == at
        assert again.x["x"].tolist() == [0.5**4] * 2

    def test_a_compiler_that_ctrl_c_ended_is_not_refused(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def killed(graph: GraphModule, leaves: Sequence[Tensor]) -> Any:
            signal.raise_signal(signal.SIGINT)
            raise RuntimeError("the C++ compiler ended with signal 2")

        monkeypatch.setattr(programs, "_inductor", killed)
        with pytest.raises(Interrupted):
            run(
                Walker(),
                problem(),
                Budget(outer_steps=4),
                folder=tmp_path,
                settings=RunSettings(compile=True),
            )
        assert recorded(tmp_path)["outcomes"] == {}

    def test_a_compiler_that_exits_does_not_end_the_interpreter(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def leaving(graph: GraphModule, leaves: Sequence[Tensor]) -> Any:
            raise SystemExit(3)

        monkeypatch.setattr(programs, "_inductor", leaving)
        with caplog.at_level(logging.WARNING, "hgms.programs"):
            result = run(
                Walker(), problem(), Budget(outer_steps=2), settings=RunSettings(compile=True)
            )
        assert result.x["x"].tolist() == [0.25] * 2
        assert len(caplog.records) == 1
        assert compilation(result).outcomes == {"halve": "as written: it cannot be compiled: 3"}


class TestTerminal:
    def shown(self, tmp_path: Path, setting: str) -> Any:
        (tmp_path / "run.toml").write_text(
            'task = "quadratic"\nmethod = "uniform"\nbudget = "1 steps"\n'
        )
        command = [
            "run",
            str(tmp_path / "run.toml"),
            "--out",
            str(tmp_path / "out"),
            "--set",
            f"run.compile={setting}",
        ]
        return CliRunner().invoke(main, command)

    def test_it_says_what_was_compiled(self, interpreted: None, tmp_path: Path) -> None:
        done = self.shown(tmp_path, "true")
        assert done.exit_code == 0, done.output
        assert done.stderr.splitlines() == [ANNOUNCEMENT]
        [line] = [line for line in done.output.splitlines() if line.startswith("  compiled: ")]
        assert line.startswith("  compiled: branches")
        assert line.endswith(" s (the settings say so)")

    def test_it_says_nothing_where_nothing_was(self, interpreted: None, tmp_path: Path) -> None:
        assert "compile" not in self.shown(tmp_path, '"auto"').output

    def test_without_a_compiler_one_warning_says_so(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def lacking(graph: GraphModule, leaves: Sequence[Tensor]) -> Any:
            raise RuntimeError("no C++ compiler\nand a long story")

        monkeypatch.setattr(programs, "_inductor", lacking)
        done = self.shown(tmp_path, "true")
        assert done.exit_code == 0, done.output
        assert done.stderr.count("warning: ") == 1
        assert "cannot be compiled: no C++ compiler\n  it runs as it is written" in done.stderr
        assert "compiled: " not in done.stdout
        assert set(recorded(next((tmp_path / "out").glob("*/*/*")))["outcomes"].values()) == {
            "as written: it cannot be compiled: no C++ compiler"
        }


PLUGIN = Path(__file__).parents[2] / "support" / "grid_plugin.py"

CHOOSES = '''
"""A method without a program, and one whose function chooses by the value of a tensor."""

from typing import ClassVar

from attrs import frozen

from hgms_core import hookimpl
from hgms.compiled import programs_of

@frozen(kw_only=True)
class Plain:
    """Halves."""

    name: ClassVar[str] = "plain"

    def init(self, problem, seed):
        return {"theta": dict(problem.theta0), "x": dict(problem.x0)}

    def step(self, problem, state, progress):
        x = {name: leaf / 2 for name, leaf in state["x"].items()}
        return {**state, "x": x}, {"upper_loss": 1.0}

    def result(self, state):
        return state["theta"], state["x"]

@frozen(kw_only=True)
class Chooses:
    """Chooses."""

    name: ClassVar[str] = "chooses"

    def init(self, problem, seed):
        return {"theta": dict(problem.theta0), "x": dict(problem.x0)}

    def step(self, problem, state, progress):
        function = lambda x: {name: leaf / (2 if leaf.sum() > 0 else 3) for name, leaf in x.items()}
        compiler = programs_of(problem)
        x = (compiler(("choice",), function) if compiler else function)(state["x"])
        return {**state, "x": x}, {"upper_loss": 1.0}

    def result(self, state):
        return state["theta"], state["x"]

@hookimpl
def hgms_register_methods():
    return [Plain, Chooses]
'''


class TestComparison:
    @pytest.fixture
    def plugin(self, tmp_path_factory: pytest.TempPathFactory) -> str:
        path = tmp_path_factory.mktemp("plugin") / "chooses.py"
        path.write_text(CHOOSES)
        return str(path)

    @pytest.fixture
    def decisions(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
        """The seconds of the steps that decide, in this order; a further one is a failure."""
        left: list[float] = []
        monkeypatch.setattr(
            "hgms.runs.loop.Run.discarded_step",
            lambda run: (left.pop(0), run.info.budget.spent(0.0, 1, 1)),
        )
        yield left
        assert left == [], "fewer steps were asked than expected"

    def reasons(self, out: Path) -> set[tuple[bool, str]]:
        tables = [recorded(path.parent) for path in out.glob("*/*/seed-*/env.json")]
        return {(table["wanted"], table["reason"]) for table in tables}

    def test_the_first_run_decides_for_all(
        self, plugin: str, tmp_path: Path, decisions: list[float]
    ) -> None:
        decisions += [2.0, 1.5]
        registry = Registry.load([plugin])
        done = compare(
            "quadratic",
            "plain",
            "50 steps",
            2,
            tmp_path,
            jobs=0,
            registry=registry,
            baselines=False,
        )
        assert self.reasons(tmp_path) == {(True, Compilation.weighed(75.0, "cpu").reason)}
        assert "quadratic: steps: compiled in all runs" in str(done)
        more = ["plain", {"name": "plain", "label": "other"}]
        compare(
            "quadratic", more, "50 steps", 1, tmp_path, jobs=0, registry=registry, baselines=False
        )
        assert len(list(tmp_path.rglob("env.json"))) == 3
        assert len(self.reasons(tmp_path)) == 1, "what finished runs recorded holds for others"

    def test_the_table_says_what_was_compiled_for_whom(
        self, interpreted: None, plugin: str, tmp_path: Path
    ) -> None:
        methods = ["plain", {"name": "uniform", "label": "ours"}]
        registry = Registry.load([plugin])
        done = compare(
            "quadratic",
            methods,
            "1 steps",
            1,
            tmp_path,
            run={"compile": True},
            jobs=0,
            registry=registry,
            baselines=False,
        )
        line = next(line for line in str(done).splitlines() if "compiled: " in line)
        assert line.startswith("quadratic: compiled: branches")
        assert line.endswith(" (ours); nothing, so as written (plain)")
        tables = {
            path.parents[1].name[:4]: recorded(path.parent) for path in tmp_path.rglob("env.json")
        }
        assert tables["plai"]["wanted"]
        assert tables["plai"]["outcomes"] == {}
        assert tables["plai"]["seconds"] == 0.0
        study = build([tmp_path])
        assert "Steps: compiled in all runs. Compiled: branches" in markdown(study)
        assert " (ours); nothing, so as written (plain)." in markdown(study)
        assert " (ours); nothing, so as written (plain)." in html(study)
        assert [run.execution for run in study.runs] == [{"compile": "compiled"}] * 2
        assert len(study.sections[0].environments) == 1

    def test_nothing_is_said_where_nothing_is_compiled(self, tmp_path: Path) -> None:
        done = compare("quadratic", "uniform", "1 steps", 1, tmp_path, jobs=0)
        assert "compiled" not in str(done)
        assert "compiled" not in markdown(build([tmp_path]))

    def test_another_budget_is_another_decision(
        self, tmp_path: Path, decisions: list[float]
    ) -> None:
        with Coordinator() as coordinator:
            for budget, wanted in (("2 steps", False), ("60 s", True), ("50 steps", True)):
                config = RunConfig.from_dict(
                    {"task": "quadratic", "method": "uniform", "budget": budget}
                )
                cell = Cell(config=config, path=tmp_path / budget)
                known = coordinator.known(cell)
                assert known is None or known.compile is None
                execution = Execution(
                    matmul=EXACT, compile=Compilation(wanted=wanted, reason=budget, seconds=3.0)
                )
                folder = RunFolder(cell.path)
                folder.create("", {"execution": {"matmul": attrs.asdict(EXACT)}})
                coordinator.recall(cell)
                assert coordinator.known(cell) == known, "not decided yet"
                folder.create("", {"execution": execution.as_table()})
                coordinator.recall(cell)
                assert coordinator.known(cell) == execution

    def test_a_pilot_is_short_and_its_runs_are_not(
        self, interpreted: None, tmp_path: Path, decisions: list[float]
    ) -> None:
        decisions += [2.0, 2.0]
        sweep = {"trials": 2, "budget": "1 steps", "space": {"walk": {"noise": [0.1, 0.2]}}}
        compare(
            "bowl",
            "walk",
            "50 steps",
            1,
            tmp_path,
            sweep=sweep,
            jobs=0,
            registry=Registry.load([str(PLUGIN)]),
        )
        assert self.reasons(tmp_path) == {(True, Compilation.weighed(100.0, "cpu").reason)}

    @pytest.mark.extended
    def test_workers_do_the_same_and_say_once_what_cannot_be_compiled(
        self, plugin: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        plugins = [str(PLUGIN), plugin]
        grid = load(
            {
                "budget": "2 steps",
                "seeds": 3,
                "task": "bowl",
                "method": "chooses",
                "run": {"out": str(tmp_path / "runs"), "compile": True},
            },
            registry=Registry.load(plugins),
        )
        with caplog.at_level(logging.WARNING), Coordinator(Local(jobs=2), plugins) as coordinator:
            assert [
                (ending.status, ending.error) for ending in coordinator.carry_out(grid.cells())
            ] == [("done", None)] * 3
        [warning] = [
            record.getMessage() for record in caplog.records if record.name == "hgms.programs"
        ]
        assert warning.startswith("choice cannot be traced: ")
        assert self.reasons(tmp_path / "runs") == {(True, "the settings say so")}
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            coordinator = Coordinator()
            seeds = attrs.evolve(grid, seeds=[5, 6])
            assert len(list(coordinator.carry_out(seeds.cells()))) == 2
        assert len([record for record in caplog.records if record.name == "hgms.programs"]) == 1


class TestReport:
    def test_runs_that_differ_are_named(self, tmp_path: Path) -> None:
        compiled = Compilation(
            wanted=True,
            reason="",
            outcomes={"cg": "compiled", "scores": "as written: it cannot be traced: so"},
        )
        tables = {
            "a": Execution(matmul=EXACT, compile=compiled).as_table(),
            "b": Execution(matmul=EXACT, compile=Compilation(wanted=False, reason="")).as_table(),
        }
        for method, table in tables.items():
            for seed in range(2):
                table["compile"]["seconds"] = float(seed)
                write_run(tmp_path, method=method, seed=seed, environment={"execution": table})
        study = build([tmp_path])
        text = markdown(study)
        assert (
            "Steps: as written in 2 (b) and compiled in 2 (a) of 4 runs: their seconds do not "
            "compare."
        ) in text
        assert "Compiled: cg (a). Scores (a) ran as written: it cannot be traced: so." in text
        assert [
            environment["compile"]
            for environment, _ in study.sections[0].environments
            if "compile" in environment
        ] == ["compiled"]
