"""All runs of a task in a comparison are carried out alike, whatever process they are in."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.executor_grids import PLUGIN
from support.made_runs import write_run

from hgms.comparison import compare, load
from hgms.comparison.coordinator import Coordinator
from hgms.comparison.grid import Cell
from hgms.compiled import RouteChoice
from hgms.executors import Local
from hgms.report import build
from hgms.report.markdown import markdown
from hgms.report.page import html
from hgms.runs import Compilation, Execution, RunConfig, RunFolder
from hgms_core.registry import Registry

FAST = RouteChoice(route="fast", reason="half the time")
EXACT = RouteChoice(route="exact", reason="it is slower")

CHOOSES = '''
"""A method without a program, and one whose function chooses by the value of a tensor. The
products of every process are measured to be something else.
"""

import os
import time
from typing import ClassVar

from attrs import frozen

import hgms.runs.execution
from hgms.compiled import RouteChoice, programs_of
from hgms_core import hookimpl

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
class Chooses(Plain):
    """Chooses."""

    name: ClassVar[str] = "chooses"

    def step(self, problem, state, progress):
        function = lambda x: {name: leaf / (2 if leaf.sum() > 0 else 3) for name, leaf in x.items()}
        compiler = programs_of(problem)
        x = (compiler(("choice",), function) if compiler else function)(state["x"])
        return {**state, "x": x}, {"upper_loss": 1.0}

@hookimpl
def hgms_register_methods():
    return [Plain, Chooses]

def calibrated(problem):
    return RouteChoice(route="fast", reason=f"{os.getpid()} at {time.perf_counter_ns()}")

if "HGMS_TEST_MEASURES" in os.environ:
    hgms.runs.execution.calibrated = calibrated
'''


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("plugin") / "chooses.py"
    path.write_text(CHOOSES)
    return [str(PLUGIN), str(path)]


@pytest.fixture(scope="module")
def options(plugins: list[str]) -> dict[str, Any]:
    return {"registry": Registry.load(plugins), "baselines": False, "jobs": 0}


def recorded(out: Path, of: str) -> dict[str, dict[str, Any]]:
    """How each run was carried out, by the label of its method, its task and its seed."""
    return {
        str(path.parent.relative_to(out)): json.loads(path.read_bytes())["execution"][of]
        for path in out.glob("*/*/seed-*/env.json")
    }


def reasons(out: Path, of: str) -> list[str]:
    return [table["reason"] for table in recorded(out, of).values()]


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The routes of products and the seconds of steps that are measured, in this order; a further
    one is a failure.
    """
    left: list[Any] = []
    monkeypatch.setattr("hgms.runs.execution.calibrated", lambda _problem: left.pop(0))
    monkeypatch.setattr(
        "hgms.runs.loop.Run.discarded_step",
        lambda run: (left.pop(0), run.info.budget.spent(0.0, 1, 1)),
    )
    yield left
    assert left == [], "fewer were asked than expected"


BOTH = ["plain", {"name": "plain", "label": "other"}]


def test_the_first_run_of_a_task_decides_how_products_are_computed(
    tmp_path: Path, decisions: list[Any], options: dict[str, Any]
) -> None:
    def compared(seeds: int) -> str:
        return str(
            compare(["quadratic", "circle-kink"], BOTH, "1 steps", seeds, tmp_path, **options)
        )

    decisions += [FAST, EXACT]
    said = compared(1)
    assert "quadratic: float32 matrix products: fast in all runs" in said
    assert "circle-kink: float32" not in said
    compared(2)
    routes = {name: table["route"] for name, table in recorded(tmp_path, "matmul").items()}
    assert len(routes) == 8
    assert all((route == "fast") == ("quadratic" in name) for name, route in routes.items())
    for path in tmp_path.glob("quadratic/other-*/seed-*/env.json"):
        table = json.loads(path.read_bytes()) | {"execution": Execution(matmul=EXACT).as_table()}
        path.write_text(json.dumps(table))
    assert "exact in 2 (other) and fast in 2 (plain) of 4 runs" in compared(2)


def test_the_first_run_decides_whether_steps_are_compiled(
    interpreted: None, tmp_path: Path, decisions: list[Any], options: dict[str, Any]
) -> None:
    """Also for runs of a later comparison, and for those whose trials are too short to say."""
    fixed = {"run": {"matmul": "exact"}, **options}
    decisions += [2.0, 1.5]
    said = str(compare("quadratic", "plain", "50 steps", 2, tmp_path / "a", **fixed))
    assert "quadratic: steps: compiled in all runs" in said
    compare("quadratic", BOTH, "50 steps", 1, tmp_path / "a", **fixed)
    assert reasons(tmp_path / "a", "compile") == [Compilation.weighed(75.0, "cpu").reason] * 3

    decisions += [2.0, 2.0]
    sweep = {"trials": 2, "budget": "1 steps", "space": {"walk": {"noise": [0.1, 0.2]}}}
    compare("bowl", "walk", "50 steps", 1, tmp_path / "b", sweep=sweep, **fixed)
    assert set(reasons(tmp_path / "b", "compile")) == {Compilation.weighed(100.0, "cpu").reason}


def test_another_budget_is_another_decision(tmp_path: Path) -> None:
    coordinator = Coordinator()
    for budget, wanted in (("2 steps", False), ("60 s", True), ("50 steps", True)):
        table = {"task": "quadratic", "method": "uniform", "budget": budget}
        cell = Cell(config=RunConfig.from_dict(table), path=tmp_path / budget)
        execution = Execution(matmul=EXACT, compile=Compilation(wanted=wanted, reason=budget))
        known = coordinator.known(cell)
        for made, decided in ((Execution(matmul=EXACT), known), (execution, execution)):
            RunFolder(cell.path).create("", {"execution": made.as_table()})
            coordinator.recall(cell)
            assert coordinator.known(cell) == decided, "products alone decide nothing"


@pytest.mark.extended
def test_workers_at_the_same_time_wait_for_the_first_and_warn_once(
    plugins: list[str],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HGMS_TEST_MEASURES", "1")
    table = {"budget": "2 steps", "seeds": 3, "task": "bowl", "method": "chooses"}
    run = {"out": str(tmp_path), "compile": True}
    cells = load({**table, "run": run}, registry=options["registry"]).cells()
    with caplog.at_level(logging.WARNING), Coordinator(Local(jobs=2), plugins) as coordinator:
        endings = [(ending.status, ending.error) for ending in coordinator.carry_out(cells)]
    assert endings == [("done", None)] * 3
    [warning] = [each.getMessage() for each in caplog.records if each.name == "hgms.programs"]
    assert warning.startswith("choice cannot be traced: ")
    for of in ("matmul", "compile"):
        assert len(set(reasons(tmp_path, of))) == 1


# --- reports


def test_a_report_names_how_runs_were_carried_out_where_they_differ(tmp_path: Path) -> None:
    outcomes = {"cg": "compiled", "scores": "as written: it cannot be traced: so"}
    whole = Execution(matmul=FAST, compile=Compilation(wanted=True, reason="", outcomes=outcomes))
    plain = Execution(matmul=EXACT, compile=Compilation(wanted=False, reason=""))
    places = {"alike": (whole, whole), "mixed": (whole, plain), "exact": (plain, None)}
    studies = {}
    for place, pair in places.items():
        for (method, execution), seed in itertools.product(zip("ab", pair, strict=True), range(2)):
            table = {} if execution is None else {"execution": execution.as_table()}
            # what was measured differs from run to run, and is no other environment
            table.get("execution", {"compile": {}})["compile"]["seconds"] = float(seed)
            write_run(tmp_path / place, method=method, seed=seed, environment=table)
        studies[place] = build([tmp_path / place])
    assert "Float32 matrix products: fast in all runs." in markdown(studies["alike"])
    for text in (
        "exact in 2 (b) and fast in 2 (a) of 4 runs: their seconds do not compare.",
        "as written in 2 (b) and compiled in 2 (a) of 4 runs: their seconds do not compare.",
        "Compiled: cg (a). Scores (a) ran as written: it cannot be traced: so.",
    ):
        assert text in markdown(studies["mixed"])
    assert "matrix products" not in markdown(studies["exact"])
    assert [len(study.sections[0].environments) for study in studies.values()] == [1, 2, 1]
    assert "they differ in " in html(studies["mixed"])
    assert studies["alike"].runs[0].execution == {"matmul": "fast", "compile": "compiled"}
