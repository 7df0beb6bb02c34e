"""Checks of methods: known optima, budgets, resumption and readable errors."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from hgms.config import Budget
from hgms.runs import RunFolder, RunResult, RunSettings, needs, run
from hgms.testing import oracle, problems
from hgms.testing.kit import F64, ask_if, demand, demand_equal, place, run_steps, shapes, unsound
from hgms_core import HgmsError, Problem, Record, Tree
from hgms_core.capabilities import Finishes, find

EVERY_STEP = RunSettings(checkpoint_seconds=0.0)
STEPS = 60


def problem_for(method: Any, dtype: torch.dtype = F64, variant: int = 0) -> Problem:
    """Return the problem for a method: sources or row weights if needed, else point tracking."""
    wanted = needs(method)
    make = (
        problems.mixture
        if "sources" in wanted
        else problems.weighted_rows
        if "row-weights" in wanted
        else problems.tracking
    )
    return make(dtype, variant)


def exercise(method: Any, dtype: torch.dtype, variant: int) -> tuple[Any, Callable[[], Any]]:
    problem = problem_for(method, dtype, variant)
    start = method.init(problem, 7 + variant)
    state, _ = method.step(problem, start, 0.0)
    data = {
        role: data.whole
        for role, data in {"lower": problem.lower_data, **problem.upper_data}.items()
    }

    def call() -> Any:
        following, _ = method.step(problem, state, 0.5)
        theta, x = method.result(following)
        return {"theta": theta, "x": x}

    return {"state": state, "theta0": problem.theta0, "x0": problem.x0, "data": data}, call


def _results(method: Any, problem: Problem) -> Iterator[tuple[Tree, Tree]]:
    """Yield (θ, x) after each of three steps."""
    for state, _ in run_steps(method, problem, method.init(problem, 0), 3):
        yield method.result(state)


def check_result(method: Any) -> None:
    """`result` returns (θ, x) with the names and shapes of the problem and without a graph,
    before the first step and after it.
    """
    problem = problem_for(method)
    state = method.init(problem, 0)
    for when in ("before the first step", "after it"):
        theta, x = method.result(state)
        came = (shapes(theta), shapes(x))
        wanted = (shapes(problem.theta0), shapes(problem.x0))
        demand(came == wanted, f"{when} (θ, x) is {came} instead of {wanted}")
        bad = unsound({**theta, **x})
        demand(not bad, f"{when}: {', '.join(bad)}")
        state, _ = method.step(problem, state, 0.0)


def check_records(method: Any) -> None:
    """A record is one flat row of numbers, short tensors, strings and None. Its `oracle_calls`
    never decrease. They count the calls of f and g and the backward passes through them, within
    a factor of two of the larger count.
    """
    problem, tally = oracle.watch(problem_for(method))
    before = 0
    for _, record in run_steps(method, problem, method.init(problem, 0), 3):
        kinds = torch.Tensor | bool | int | float | str | None
        bad = {
            name: type(value).__name__
            for name, value in record.items()
            if not isinstance(value, kinds)
        }
        demand(not bad, f"these entries of the record cannot be one column of a table: {bad}")
        calls: Any = record.get("oracle_calls")
        demand(
            isinstance(calls, int),
            f"the record's oracle_calls are {calls!r}; a budget in calls needs them",
        )
        columns = shapes(
            {name: value for name, value in record.items() if isinstance(value, torch.Tensor)}
        )
        long = {name: shape for name, shape in columns.items() if math.prod(shape) > 1000}
        demand(
            not long, f"these entries are too long for a row that is written at every step: {long}"
        )
        demand(calls >= before, f"oracle_calls fell from {before} to {calls}")
        before = int(calls)
    oracle.demand_close("f and g", sum(tally.calls.values()), sum(tally.passes.values()), before)


def check_roles(method: Any) -> None:
    """Rows of the role `stop` are not used for training: no backward pass goes through a loss on
    them. θ and x do not depend on them, unless the method `needs` the trait `stop-rows`.
    """
    plain = problem_for(method)
    problem, tally = oracle.watch(plain)
    other = {**plain.upper_data, "stop": problem_for(method, variant=1).upper_data["stop"]}
    own, others = (
        list(list(_results(method, variant))[-1])
        for variant in (problem, evolve(plain, upper_data=other))
    )
    demand(
        not tally.on_stop,
        f"{tally.on_stop} backward passes went through f on rows of the role `stop`",
    )
    if "stop-rows" not in needs(method):
        why = "; name the trait `stop-rows` in `needs` if that is meant"
        demand_equal(own, others, "with other rows of the role `stop`", why)


def check_projection(method: Any) -> None:
    """Every θ is in Θ: after each step `project` does not change the result."""
    own = "its θ comes from the problem's map of weights"
    ask_if("sources" not in needs(method), own)
    plain = problem_for(method)

    def project(theta: Tree) -> Tree:
        return {name: leaf.clamp(-0.01, 0.01) for name, leaf in theta.items()}

    references = {name: project(theta) for name, theta in plain.references.items()}
    problem = evolve(plain, project=project, references=references)
    for step, (theta, _) in enumerate(_results(method, problem), 1):
        demand_equal(
            project(theta),
            theta,
            f"after step {step}, where problem.project gives another,",
            rtol=1e-9,
        )


def check_optimum(method: Any) -> None:
    """60 outer steps on a problem of size 1 with a known optimum halve the distance of θ to the
    optimum (or select the right source).
    """
    problem = problem_for(method)
    state = start = method.init(problem, 0)
    first = _distance(method, problem, start)
    for step, (state, _) in enumerate(run_steps(method, problem, start, STEPS)):
        if step % 5 == 4 and _distance(method, problem, state) <= 0.25 * first:
            return
    last = _distance(method, problem, state)
    demand(
        last <= max(0.5 * first, 1e-9),
        f"the distance was {first:.3g} at the start and is {last:.3g} after {STEPS} steps",
    )


def _distance(method: Any, problem: Problem, state: Any) -> float:
    (distance,) = problem.evaluate(*method.result(state)).values()
    return float(distance)


def _run(method: Any, problem: Problem, budget: Budget, **options: Any) -> RunResult:
    return run(method, problem, budget, seed=3, settings=EVERY_STEP, **options)


def check_resume(method: Any) -> None:
    """A run that stops after 2 of 4 steps, is saved to disk and resumes has bit for bit the same
    end as an uninterrupted run.
    """
    problem = problem_for(method)
    whole = _run(method, problem, Budget(outer_steps=4))
    with tempfile.TemporaryDirectory() as room:
        folder = RunFolder(Path(room) / "run")
        folder.create("", {})
        states = [
            state for state, _ in run_steps(method, problem, method.init(problem, 3), 4, range(2))
        ]
        if len(states) < 2:
            return
        folder.save(states[-1], 2)
        loaded = folder.load(place())
    assert loaded is not None
    state = loaded[0]
    # Steps of another run must have no effect: the state contains all information.
    method.step(problem, method.init(problem, 99), 0.0)
    states = [state, *(later for later, _ in run_steps(method, problem, state, 4, range(2, 4)))]
    demand_equal([whole.theta, whole.x], list(method.result(states[-1])), "resumed,")


def check_budget(method: Any) -> None:
    """A budget of steps and a budget of oracle calls end the run: no step starts after the
    budget is spent.
    """
    problem = problem_for(method)
    done = _run(method, problem, Budget(outer_steps=3))
    steps = done.summary["outer_steps"]
    demand(steps == 3 or find(method, Finishes), f"with a budget of 3 steps it made {steps}")
    records = [row["oracle_calls"] for row in done.records if row["step"]]
    if len(records) >= 2 and records[1] > records[0] > 0:

        def watch(_info: object, record: Record, _share: float) -> None:
            demand(
                record["step"] <= 50,
                "its oracle_calls stop growing while the budget is not spent, so that such a run "
                "never ends",
            )

        short = _run(method, problem, Budget(oracle_calls=records[0] + 1), watch=watch)
        steps = short.summary["outer_steps"]
        demand(steps == 2, f"with a budget of {records[0] + 1} calls it made {steps} steps")


def check_failure(method: Any) -> None:
    """If losses are no longer finite, the run ends with a readable error or with a result. The
    folder records the last step and the error.
    """
    problem = problem_for(method)
    calls = 0

    def lower_loss(theta: Tree, x: Tree, batch: Tree) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return problem.g(theta, x, batch) * (float("nan") if calls > 40 else 1.0)

    with tempfile.TemporaryDirectory() as room:
        folder = RunFolder(Path(room) / "run")
        try:
            _run(method, evolve(problem, g=lower_loss), Budget(outer_steps=20), folder=folder)
            expected = "done"
        except HgmsError:
            expected = "failed"
        summary = folder.read_summary()
        rows = folder.records()
        demand(summary is not None, "there is no summary.json")
        assert summary is not None
        demand(
            summary["status"] == expected,
            f"the summary says {summary['status']!r}, the run ended as {expected!r}",
        )
        demand(expected == "done" or summary.get("error"), "the summary names no error")
        last = rows[-1]["step"] if rows else 0
        demand(
            last == summary["outer_steps"],
            f"steps.jsonl ends with step {last}, the summary says {summary['outer_steps']}",
        )
        demand(
            folder.load() is not None or not rows, "there is no checkpoint of the last good state"
        )
