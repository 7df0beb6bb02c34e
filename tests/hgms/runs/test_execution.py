"""How a run is carried out: decided once, in force during the run, recorded, resumed, the same
for all runs of a comparison.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
from click.testing import CliRunner
from support.helpers import rejects
from support.made_runs import write_run

from hgms.cli import main
from hgms.comparison import compare, load
from hgms.comparison.coordinator import Coordinator
from hgms.comparison.run_grid import run_grid
from hgms.compiled import Product, RouteChoice
from hgms.executors import Local
from hgms.report import build
from hgms.report.markdown import markdown
from hgms.report.page import html
from hgms.runs import Execution, Interrupted, RunConfig, RunFolder, RunSettings, run
from hgms_core import Budget, CheckpointError, ConfigError, Problem, State
from hgms_core.registry import Registry

STEPS = Budget(outer_steps=4)
MEASURED = Product(
    rows=9,
    shape=(9, 8, 7),
    seconds={"exact": 2.0, "fast": 1.0},
    errors={"exact": 1e-7, "fast": 2e-7},
)
FAST = RouteChoice(route="fast", reason="half the time", products=(MEASURED,))
EXACT = RouteChoice(route="exact", reason="it is slower", products=(MEASURED,))


@attrs.frozen(kw_only=True)
class Witness:
    """A method whose every call records the precision that is in force; x depends on it, as
    rounding does.
    """

    name = "witness"
    breaks_at: int | None = attrs.field(default=None, metadata={"toml": False})
    interrupts_at: int | None = attrs.field(default=None, metadata={"toml": False})

    def init(self, problem: Problem, seed: int) -> State:
        return {"step": 0, "x": dict(problem.x0), "init": precision()}

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, dict[str, Any]]:
        if state["step"] == self.breaks_at:
            raise RuntimeError("no more")
        if state["step"] == self.interrupts_at:
            raise KeyboardInterrupt
        x = {"x": state["x"]["x"] * (0.5 if precision() == "medium" else 0.25)}
        return {**state, "step": state["step"] + 1, "x": x}, {
            "init": state["init"],
            "inside": precision(),
        }

    def result(self, state: State) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return {}, state["x"]


def precision() -> str:
    return torch.get_float32_matmul_precision()


def problem() -> Problem:
    return Problem(
        theta0={},
        x0={"x": torch.ones(2)},
        g=lambda t, x, b: x["x"].sum(),
        f=lambda t, x, b: x["x"].sum(),
        evaluate=lambda theta, x: {"fast": float(precision() == "medium")},
    )


def decide(monkeypatch: pytest.MonkeyPatch, *choices: RouteChoice) -> None:
    """Lets the calibration choose so, in this order; a further one is a failure."""
    left = list(choices)
    monkeypatch.setattr("hgms.runs.execution.calibrated", lambda _problem: left.pop(0))


def environment(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((folder / "env.json").read_bytes())
    return table


class TestOneRun:
    def test_the_choice_is_in_force_from_init_to_the_last_evaluation(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decide(monkeypatch, FAST)
        result = run(Witness(), problem(), STEPS, folder=tmp_path / "run")
        assert [row["inside"] for row in result.records[1:]] == ["medium"] * 4
        assert result.records[1]["init"] == "medium"
        assert [row["metric.fast"] for row in result.records] == [1.0] * 5
        assert precision() == "highest"
        assert result.execution is not None
        assert result.execution.matmul == FAST
        assert environment(tmp_path / "run")["execution"]["matmul"] == json.loads(
            json.dumps(attrs.asdict(FAST))
        )

    @pytest.mark.parametrize("disturbed", [Witness(breaks_at=2), Witness(interrupts_at=2)])
    def test_however_it_ends_the_setting_is_back(
        self, disturbed: Witness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decide(monkeypatch, FAST)
        newer = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        with pytest.raises((RuntimeError, Interrupted)):
            run(disturbed, problem(), STEPS)
        assert precision() == "highest"
        assert torch.backends.mkldnn.matmul.fp32_precision == newer  # type: ignore[attr-defined]

    def test_what_the_settings_say_is_not_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        decide(monkeypatch)
        torch.set_float32_matmul_precision("high")
        try:
            routes: list[tuple[Any, str]] = [("exact", "highest"), ("fast", "medium")]
            for route, inside in routes:
                chosen = RunSettings(matmul=route)
                result = run(Witness(), problem(), STEPS, settings=chosen)  # type: ignore[arg-type]
                assert result.records[-1]["inside"] == inside
                assert result.execution is not None
                assert result.execution.matmul == RouteChoice(
                    route=route, reason="the settings say so"
                )
                assert precision() == "high"
        finally:
            torch.set_float32_matmul_precision("highest")
            torch.backends.mkldnn.matmul.fp32_precision = "none"  # type: ignore[attr-defined]
            torch.backends.cuda.matmul.fp32_precision = "none"

    def test_a_small_problem_stays_exact(self) -> None:
        result = run(Witness(), problem(), STEPS)
        assert result.execution is not None
        assert (result.execution.matmul.route, result.execution.matmul.products) == ("exact", ())


class TestResuming:
    def interrupted(self, folder: Path) -> None:
        with pytest.raises(Interrupted):
            run(
                Witness(interrupts_at=2),
                problem(),
                STEPS,
                folder=folder,
                settings=RunSettings(checkpoint_seconds=0),
            )

    def test_it_takes_what_was_recorded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decide(monkeypatch, FAST, FAST)  # each run decides once, and the resumed one does not
        self.interrupted(tmp_path / "resumed")
        result = run(Witness(), problem(), STEPS, folder=tmp_path / "resumed", resume=True)
        run(Witness(), problem(), STEPS, folder=tmp_path / "whole")
        assert result.execution is not None
        assert result.execution.matmul == FAST
        for name in ("steps.jsonl", "summary.json", "checkpoint-4.safetensors"):
            assert (tmp_path / "resumed" / name).read_bytes() == (
                tmp_path / "whole" / name
            ).read_bytes()
        # read back
        again = run(Witness(), problem(), STEPS, folder=tmp_path / "resumed", resume=True)
        assert again.execution == result.execution
        assert "before" not in environment(tmp_path / "resumed")

    @pytest.mark.parametrize(
        "damage",
        [
            "{",
            '{"python": "3.12"}',
            '{"execution": 3}',
            '{"execution": {"matmul": {"route": "quick", "reason": ""}}}',
        ],
    )
    def test_what_cannot_be_read_is_decided_again_and_said(
        self,
        tmp_path: Path,
        damage: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        decide(monkeypatch, FAST, EXACT)
        self.interrupted(tmp_path)
        (tmp_path / "env.json").write_text(damage)
        result = run(Witness(), problem(), STEPS, folder=tmp_path, resume=True)
        assert result.execution is not None
        assert result.execution.matmul == EXACT
        assert "no longer tells how this run was carried out" in caplog.text

    def test_fast_is_kept_on_another_machine_and_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        decide(monkeypatch, FAST)
        self.interrupted(tmp_path)
        (tmp_path / "env.json").write_text(json.dumps(environment(tmp_path) | {"threads": 77}))
        assert (
            run(Witness(), problem(), STEPS, folder=tmp_path, resume=True).records[-1]["inside"]
            == "medium"
        )
        assert "threads 77" in caplog.text
        assert "as recorded, matmul: fast (half the time)" in caplog.text

    def test_another_setting_is_another_run(self, tmp_path: Path) -> None:
        self.interrupted(tmp_path)
        with rejects("other-settings", str(tmp_path), of=CheckpointError):
            run(
                Witness(),
                problem(),
                STEPS,
                folder=tmp_path,
                resume=True,
                settings=RunSettings(matmul="exact"),
            )


class TestConfiguration:
    TABLE: ClassVar[dict[str, str]] = {"task": "quadratic", "method": "hg-ms", "budget": "2 steps"}

    def config(self, **settings: Any) -> RunConfig:
        return RunConfig.from_dict({**self.TABLE, "run": settings})

    def test_each_value_has_a_hash(self) -> None:
        plain = self.config()
        assert 'matmul = "auto"' in plain.to_toml()
        assert self.config(matmul="auto").path == plain.path
        hashes = {self.config(matmul=route).config_hash for route in ("auto", "exact", "fast")}
        assert len(hashes) == 3
        exact = self.config(matmul="exact")
        assert 'matmul = "exact"' in exact.to_toml()
        assert RunConfig.from_toml(exact.to_toml()) == exact

    def test_a_wrong_value_is_told_what_there_is(self) -> None:
        with rejects("unknown-choice", "run", "matmul", of=ConfigError):
            self.config(matmul="quick")

    def test_the_terminal_says_what_was_chosen_unless_it_is_exact(self, tmp_path: Path) -> None:
        (tmp_path / "run.toml").write_text(
            'task = "quadratic"\nmethod = "uniform"\nbudget = "1 steps"\n'
        )
        shown = {}
        for route in ("auto", "fast"):
            command = [
                "run",
                str(tmp_path / "run.toml"),
                "--out",
                str(tmp_path / route),
                "--set",
                f'run.matmul="{route}"',
            ]
            done = CliRunner().invoke(main, command)
            assert done.exit_code == 0, done.output
            shown[route] = done.output
        assert "  matmul: fast (the settings say so)\n" in shown["fast"]
        assert "matmul" not in shown["auto"]


PLUGIN = Path(__file__).parents[2] / "support" / "grid_plugin.py"

MEASURES = '''
"""Every process measures something else."""

import os
import time

import hgms.runs.execution
from hgms_core import hookimpl
from hgms.compiled import RouteChoice

@hookimpl
def hgms_register_tasks():
    return []

def calibrated(problem):
    return RouteChoice(route="fast", reason=f"{os.getpid()} at {time.perf_counter_ns()}")

hgms.runs.execution.calibrated = calibrated
'''


class TestComparison:
    def compared(self, out: Path, seeds: int = 2, **more: Any) -> Any:
        return compare(
            "quadratic",
            ["uniform", {"name": "uniform", "label": "other"}],
            "1 steps",
            seeds,
            out,
            jobs=0,
            baselines=False,
            **more,
        )

    def recorded(self, out: Path) -> set[tuple[str, str]]:
        tables = [
            json.loads(path.read_bytes())["execution"]["matmul"]
            for path in out.glob("*/*/seed-*/env.json")
        ]
        return {(table["route"], table["reason"]) for table in tables}

    def test_the_first_run_decides_for_all(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decide(monkeypatch, FAST)
        done = self.compared(tmp_path)
        assert len(list(tmp_path.glob("*/*/seed-*/env.json"))) == 4
        assert self.recorded(tmp_path) == {("fast", "half the time")}
        assert "quadratic: float32 matrix products: fast in all runs" in str(done)

    def test_what_finished_runs_recorded_holds_for_further_ones(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decide(monkeypatch, FAST)
        self.compared(tmp_path, 1)
        self.compared(tmp_path, 3)
        assert len(list(tmp_path.glob("*/*/seed-*/env.json"))) == 6
        assert self.recorded(tmp_path) == {("fast", "half the time")}

    def test_tasks_decide_for_themselves(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decide(monkeypatch, FAST, EXACT)
        done = compare(
            ["quadratic", "circle-kink"], "uniform", "1 steps", 2, tmp_path, jobs=0, baselines=False
        )
        routes = {
            path.parents[2].name: environment(path.parent)["execution"]["matmul"]["route"]
            for path in tmp_path.rglob("env.json")
        }
        assert routes == {"quadratic": "fast", "circle-kink": "exact"}
        assert "circle-kink: float32" not in str(done)

    @pytest.mark.extended
    def test_workers_at_the_same_time_wait_for_the_first(self, tmp_path: Path) -> None:
        (tmp_path / "measures.py").write_text(MEASURES)
        registry = Registry.load([str(PLUGIN)])
        grid = load(
            {
                "budget": "2 steps",
                "seeds": 2,
                "task": "bowl",
                "method": ["walk", {"name": "walk", "label": "other"}],
                "run": {"out": str(tmp_path / "runs")},
            },
            registry=registry,
        )
        with Coordinator(
            Local(jobs=2), [str(PLUGIN), str(tmp_path / "measures.py")]
        ) as coordinator:
            assert [
                (ending.status, ending.error) for ending in coordinator.carry_out(grid.cells())
            ] == [("done", None)] * 4
        assert len(self.recorded(tmp_path / "runs")) == 1
        run_grid(attrs.evolve(grid, seeds=[0, 1, 2]), jobs=0, progress=False)
        assert len(self.recorded(tmp_path / "runs")) == 1

    def test_runs_that_differ_are_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decide(monkeypatch, FAST)
        self.compared(tmp_path)
        for path in tmp_path.glob("*/other-*/seed-*/env.json"):
            path.write_text(
                json.dumps(
                    {**environment(path.parent), "execution": Execution(matmul=EXACT).as_table()}
                )
            )
        assert (
            "exact in 2 (other) and fast in 2 (uniform) of 4 runs: their seconds do not compare"
            in str(self.compared(tmp_path))
        )


class TestReport:
    def test_it_says_which_route_and_where_runs_differ(self, tmp_path: Path) -> None:
        for seed, seconds in enumerate((1.0, 1.1)):
            product = attrs.evolve(MEASURED, seconds={"exact": 2.0, "fast": seconds})
            table = Execution(matmul=attrs.evolve(FAST, products=(product,))).as_table()
            for folder, methods in (("alike", ("a", "b")), ("mixed", ("a",))):
                for method in methods:
                    write_run(
                        tmp_path / folder,
                        method=method,
                        seed=seed,
                        environment={"execution": table},
                    )
            write_run(tmp_path / "mixed", method="b", seed=seed)
            write_run(
                tmp_path / "exact",
                method="b",
                seed=seed,
                environment={"execution": Execution(matmul=EXACT).as_table()},
            )
            write_run(tmp_path / "exact", method="a", seed=seed)
        alike, mixed, exact = (build([tmp_path / name]) for name in ("alike", "mixed", "exact"))
        assert "Float32 matrix products: fast in all runs." in markdown(alike)
        assert (
            "exact in 2 (b) and fast in 2 (a) of 4 runs: their seconds do not compare."
            in markdown(mixed)
        )
        assert "matrix products" not in markdown(exact)
        # what was measured differs from run to run, and is no other environment
        assert [len(study.sections[0].environments) for study in (alike, mixed, exact)] == [1, 2, 1]
        assert "they differ in matmul" in html(mixed)

    def test_a_stored_run_says_it(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path, environment={"execution": Execution(matmul=FAST).as_table()})
        assert build([tmp_path]).runs[0].execution == {"matmul": "fast"}
        assert RunFolder(folder).read_environment()["execution"]["matmul"]["products"][0][
            "seconds"
        ] == {"exact": 2.0, "fast": 1.0}
