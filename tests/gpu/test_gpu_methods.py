"""Every method steps on the device as on the CPU, and every task builds its problem there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from placement import Draws, brought, compare, elsewhere

from hgms.plugins import Registry, registry
from hgms.runs import RunConfig
from hgms.runs import traits as compat
from hgms.testing import inputs_on, instance_of, methods
from hgms.testing.kit import difference, snapshot
from hgms_core import Composition, Key, Problem, Sources
from hgms_core.errors import ConfigError, DataError, MissingExtra

pytestmark = pytest.mark.nightly

F64 = torch.float64
METHODS = sorted(each.name for each in Registry.load().components("method"))
TASKS = sorted(Registry.load().components("task"), key=lambda each: each.name)
SMALL: dict[str, dict[str, Any]] = {
    "hyper-cleaning": {"train_size": 60, "validation_size": 30, "test_size": 50, "hidden": 5},
    "quadratic": {},
    "sphere": {},
}
"""Tasks without files of their own; a method gets the first that has what it needs."""
HOST_LEAVES = ("seed",)
"""Leaves of batches that stay on the CPU, because they seed generators."""
STEPS = 3


def _method_and_task(name: str) -> tuple[Any, Any]:
    """A method and a task for it; None for one that needs data sources and gets the kit's
    mixture of two.
    """
    target = Registry.load().get("method", name).target
    refused: Any = None
    for task in SMALL:
        if isinstance(target, Composition):
            try:
                config = RunConfig.from_dict(_table(task, name))
            except ConfigError as error:
                refused = error
                continue
            method = config.method
        else:
            config = RunConfig.from_dict(_table(task, "uniform"))
            method = instance_of(target)
        if "sources" in compat.needs(method):
            return method, None
        refused = compat.missing_traits(method, config.task)
        if not refused:
            return method, config.task
    raise AssertionError(f"no small task fits {name}: {refused}")


def _table(task: str, method: str) -> dict[str, Any]:
    fields = {"task": {"name": task, **SMALL[task]}, "method": {"name": method, **_fields(method)}}
    return {**fields, "budget": f"{STEPS} steps"}


def _fields(name: str) -> dict[str, Any]:
    """Five lower steps instead of many; the mixture to keep, for the method that keeps one."""
    target = Registry.load().get("method", name).target
    parts = getattr(target, "parts", {})
    fields: dict[str, Any] = (
        {"generator": {"steps": 5}} if parts.get("generator", {}).get("steps", 1) > 5 else {}
    )
    return fields | ({"mixture": {"near": 1.0}} if name == "fixed" else {})


def _problem(method: Any, task: Any, device: torch.device) -> Problem:
    if task is not None:
        return task.problem(0, device, F64)  # type: ignore[no-any-return]
    with inputs_on(device):
        return methods.problem_for(method)


def _stepped(method: Any, problem: Problem) -> Any:
    state = method.init(problem, 4)
    records = []
    for step in range(STEPS):
        state, record = method.step(problem, state, step / STEPS)
        records.append(record)
    theta, x = method.result(state)
    return {"theta": theta, "x": x, "upper_loss": [record.get("upper_loss") for record in records]}


@pytest.mark.parametrize("name", METHODS)
def test_three_steps(name: str, device: torch.device, draws: Draws) -> None:
    if name == "tpe":
        pytest.importorskip("optuna", reason="its proposals come from Optuna")
    method, task = _method_and_task(name)
    try:
        here = snapshot(_stepped(method, _problem(method, task, torch.device("cpu"))))
    except MissingExtra as absent:
        pytest.skip(f"a package is not installed: {absent.message}")
    draws.clear()
    there = snapshot(_stepped(method, _problem(method, task, device)))
    trees = {name: leaf for name, leaf in there.items() if name.startswith(("theta", "x"))}
    astray = elsewhere(trees, device)
    assert not astray, f"not on {device}: {astray}"
    broken = [name for name, leaf in trees.items() if not leaf.isfinite().all()]
    assert not broken, f"not finite: {broken}"
    if not draws.on_device:
        differs = difference(here, brought(there), rtol=1e-5)
        assert not differs, f"after {STEPS} steps on {device}, {differs} (the CPU's)"


@pytest.mark.parametrize("component", TASKS, ids=lambda each: each.name)
def test_task_builds_its_problem_there(component: registry.Component, device: torch.device) -> None:
    task = instance_of(component.target)
    try:
        here, there = (_looked_at(task, place) for place in (torch.device("cpu"), device))
    except (DataError, MissingExtra) as absent:
        pytest.skip(f"its files are not here: {absent}")
    numbers = [
        {name: each.pop(name) for name in [*each] if name.startswith("metrics")}
        for each in (here, there)
    ]
    compare(here, there, device)
    assert not difference(*map(brought, numbers), rtol=1e-6)


def _looked_at(task: Any, device: torch.device) -> dict[str, Any]:
    """All that a problem holds and computes at its start."""
    problem = task.problem(3, device, F64)
    data = {"lower": problem.lower_data, **problem.upper_data}
    # tables of tokens stay in memory or on disk: only their batches go to the device
    tables = "cpu" if problem.find(Sources) is not None else device.type
    assert {each.device.type for each in data.values() if each.size} <= {tables}
    drawn = {role: each.draw(Key(1), 4, 2) for role, each in data.items()}
    batches = {
        role: each.batch(None if drawn[role] is None else drawn[role][0])
        for role, each in data.items()
    }
    shown = {
        role: {name: leaf for name, leaf in batch.items() if name not in HOST_LEAVES}
        for role, batch in batches.items()
    }
    start = problem.initial(Key(2))
    closed = getattr(task, "closed_form", None)
    exact = closed(3, device, F64) if closed is not None else None
    sources = problem.find(Sources)
    return snapshot(  # type: ignore[no-any-return]
        {
            "theta0": problem.theta0,
            "x0": problem.x0,
            "fresh": start,
            "references": problem.references,
            "batches": shown,
            "projected": problem.project(problem.theta0),
            "g": problem.g(problem.theta0, start, batches["lower"]),
            "f": {
                role: problem.f(problem.theta0, start, batches[role]) for role in problem.upper_data
            },
            "solution": exact.solution(problem.theta0) if exact is not None else None,
            "weights": sources.weights(problem.theta0) if sources is not None else None,
            "metrics": dict(problem.evaluate(problem.theta0, start)),
        }
    )
