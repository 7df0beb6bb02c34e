"""All runs of a task in a comparison are executed alike, whatever process they are in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.executor_grids import PLUGIN

from hgms.comparison import compare
from hgms.plugins import Registry
from hgms.runs import Compilation, Execution, RouteChoice

FAST = RouteChoice(route="fast", reason="half the time")
EXACT = RouteChoice(route="exact", reason="it is slower")


PLAIN = '''
"""A method without a program."""

from typing import ClassVar

from attrs import frozen
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

@hookimpl
def hgms_register_methods():
    return [Plain]
'''


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("plugin") / "plain.py"
    path.write_text(PLAIN)
    registry = Registry.load([str(PLUGIN), str(path)])
    return {"registry": registry, "baselines": False, "jobs": 0}


def recorded(out: Path, of: str) -> dict[str, dict[str, Any]]:
    """How each run was carried out, by the label of its method, its task and its seed."""
    return {
        str(path.parent.relative_to(out)): json.loads(path.read_bytes())["execution"][of]
        for path in out.glob("*/*/seed-*/env.json")
    }


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The routes of products and the seconds of steps that are measured, in this order; a further
    one is a failure.
    """
    left: list[Any] = []
    monkeypatch.setattr("hgms.runs.execution.calibrated", lambda _problem: left.pop(0))
    monkeypatch.setattr(
        "hgms.runs.loop.Run.discarded_step",
        lambda run, _problem: (left.pop(0), run.info.budget.spent_share(0.0, 1, 1)),
    )
    yield left
    assert left == [], "fewer were asked than expected"


BOTH = ["plain", {"name": "plain", "label": "other"}]


@pytest.mark.extended
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
    assert "exact in 2 and fast in 2 of 4 runs" in compared(2)


@pytest.mark.extended
def test_the_first_run_decides_whether_steps_are_compiled(
    interpreted: None, tmp_path: Path, decisions: list[Any], options: dict[str, Any]
) -> None:
    """Also for runs of a later comparison."""
    fixed = {"run": {"matmul": "exact"}, **options}
    decisions += [2.0, 1.5]  # eager steps, which decide to compile
    decisions += [9.0, 1.5, 0.5, 1.5, 0.5]  # the compilation, then steps of both kinds in turns
    said = str(compare("quadratic", "plain", "50 steps", 2, tmp_path / "a", **fixed))
    assert "quadratic: steps: compiled in all runs" in said
    compare("quadratic", BOTH, "50 steps", 1, tmp_path / "a", **fixed)
    tables = recorded(tmp_path / "a", "compile").values()
    assert [each["reason"] for each in tables] == [
        Compilation.decide_by_gain(75.0, "cpu").reason
    ] * 3
    assert [each["measured"] for each in tables] == [{"eager": 1.5, "compiled": 0.5}] * 3
