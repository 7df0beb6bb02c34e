"""Mistakes in Python: each is one error with a code and a place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.helpers import rejects
from support.weighted_rows import MODULE, A, Y, f, g, h, pipeline, problem
from torch import nn

from hgms.generators.branches import Branches
from hgms.methods import KeepBest
from hgms.outer import Sgd
from hgms.runs import run
from hgms.solvers import CG
from hgms_core import ConfigError, Data, Estimate, Problem, slopes

pytestmark = pytest.mark.plugins

PROBLEM: dict[str, tuple[Any, ...]] = {
    "a misspelt argument": (lambda: problem(lower=f), "unknown-option", ("lower",)),
    "another misspelt one": (lambda: problem(theta_0=Y), "unknown-option", ("theta_0",)),
    "no loss": (lambda: problem(f=...), "missing-option", ("f",)),
    "by position": (
        lambda: Problem({"t": Y}, {"w": Y}, g, f),  # type: ignore[misc]
        "positional-argument",
        (),
    ),
    "no start": (
        lambda: Problem(theta0={}, f=f, g=g),  # type: ignore[call-arg]
        "missing-option",
        ("x0",),
    ),
    "the value of a loss": (lambda: problem(f=Y.sum()), "wrong-type", ("f",)),
    "a loss's class": (lambda: problem(g=nn.MSELoss), "wrong-type", ("g",)),
    "a loss of torch": (lambda: problem(g=nn.MSELoss()), "wrong-signature", ("g",)),
    "a loss without batch": (lambda: problem(g=lambda theta, x: x), "wrong-signature", ("g",)),
    "a loss with its arguments the other way round": (
        lambda: problem(g=lambda x, theta, batch: x),
        "wrong-signature",
        ("g",),
    ),
    "a loss with more": (lambda: problem(f=lambda t, x, b, more: x), "wrong-signature", ("f",)),
    "evaluate of x": (lambda: problem(evaluate=lambda x: {}), "wrong-signature", ("evaluate",)),
    "a number in place of evaluate": (lambda: problem(evaluate=0.5), "wrong-type", ("evaluate",)),
    "fresh without a key": (lambda: problem(fresh=lambda: {"w": Y}), "wrong-signature", ("fresh",)),
    "fresh by its value": (lambda: problem(fresh={"w": Y}), "wrong-type", ("fresh",)),
    "θ as a number": (lambda: problem(theta0=0.5), "wrong-type", ("theta0",)),
    "θ as a list": (lambda: problem(theta0=[0.0, 0.0]), "wrong-type", ("theta0", "0")),
    "θ as an array": (lambda: problem(theta0=np.zeros(6)), "wrong-type", ("theta0",)),
    "whole numbers": (
        lambda: problem(theta0={"t": torch.arange(6)}),
        "wrong-dtype",
        ("theta0", "t"),
    ),
    "x as a module": (lambda: problem(x0=MODULE), "wrong-type", ("x0",)),
    "x as a state_dict": (
        lambda: problem(x0=nn.BatchNorm1d(2).state_dict()),
        "wrong-dtype",
        ("x0", "num_batches_tracked"),
    ),
    "x as parameters": (lambda: problem(x0=MODULE.parameters()), "wrong-type", ("x0",)),
    "a frozen layer": (
        lambda: problem(x0={"a": nn.Parameter(Y), "b": nn.Parameter(Y, requires_grad=False)}),
        "frozen-parameter",
        ("x0", "b"),
    ),
    "a misspelt role": (
        lambda: problem(upper_data={"select": {"a": A}, "stopp": {"a": A}}),
        "unknown-choice",
        ("upper_data", "stopp"),
    ),
    "a role without rows": (
        lambda: problem(upper_data={"select": {"a": A}}).upper_data["differentiate"],
        "no-rows-for-role",
        ("upper_data", "differentiate"),
    ),
    "lengths": (lambda: problem(lower_data={"a": A, "y": Y[:5]}), "wrong-length", ("lower_data",)),
    "no data": (lambda: problem(lower_data=None), "wrong-type", ("lower_data",)),
    "a path": (lambda: problem(lower_data="rows.csv"), "wrong-type", ("lower_data",)),
    "text": (
        lambda: problem(lower_data=pd.DataFrame({"label": ["a", "b"]})),
        "wrong-column",
        ("lower_data", "label"),
    ),
    "an argument of Data": (
        lambda: Data(3, row=lambda i: {}),  # type: ignore[call-arg]
        "unknown-option",
        ("row",),
    ),
}


class Solve:
    solve = staticmethod(lambda matvec, b: b)


class Choose:
    select = staticmethod(lambda problem, theta, candidates: 0)


class Own:
    """A method with a step and a result of one's own."""

    name = "own"

    def __init__(
        self,
        step: Any = lambda problem, state: (state, {}),
        result: Any = lambda state: (state["theta"], state["x"]),
    ) -> None:
        self.of_step = step
        self.result = result

    def init(self, problem: Any, seed: int) -> Any:
        return {"theta": dict(problem.theta0), "x": dict(problem.x0)}

    def step(self, problem: Any, state: Any, progress: float) -> Any:
        return self.of_step(problem, state)


def ran(budget: str = "1 steps", **parts: Any) -> Callable[[], Any]:
    return lambda: run(Own(**parts), problem(), budget)


class Estimating:
    """An estimator with an answer of one's own, in place of an Estimate with the shapes of θ and
    a state.
    """

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.answer = answer

    def init(self, problem: Any) -> Any:
        return {}

    def estimate(
        self, problem: Any, theta: Any, candidates: Any, selection: Any, key: Any, state: Any
    ) -> Any:
        return self.answer(theta)


def estimated(answer: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: run(pipeline(hypergradient=Estimating(answer)), problem(), "1 steps")


def valued(**value: Any) -> Callable[[], Any]:
    return estimated(lambda theta: (Estimate(value=value, upper_loss=torch.zeros(())), {}))


class Moving:
    """An outer optimiser with an answer of one's own."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.answer = answer

    def init(self, theta: Any) -> Any:
        return {}

    def step(self, theta: Any, gradient: Any, state: Any, progress: float) -> Any:
        return self.answer(theta)


def moves(answer: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: run(pipeline(outer=Moving(answer)), problem(), "1 steps")


def twice(problem: Any, state: Any) -> Any:
    """Goes through one graph twice."""
    theta = {name: leaf.clone().requires_grad_() for name, leaf in state["theta"].items()}
    loss = problem.g(theta, state["x"], problem.lower_data.batch(None))
    return [slopes(loss, list(theta.values())) for _ in range(2)]


def raises(problem: Any, state: Any) -> Any:
    raise ConfigError("not-finite", "the weight is nan", place=("weights", "a"))


PIPELINE: dict[str, tuple[Any, ...]] = {
    "a selector without a key": (
        lambda: pipeline(selector=Choose()),
        "wrong-signature",
        ("selector", "select"),
    ),
    "a solver without a start": (lambda: h(solver=Solve()), "wrong-signature", ("solve",)),
    "a step of its state alone": (
        ran(step=lambda problem, state: state),
        "wrong-result",
        ("method", "step"),
    ),
    "a result in a dictionary": (
        ran(result=lambda state: state),
        "wrong-result",
        ("method", "result"),
    ),
    "an estimate without a state": (
        estimated(lambda theta: Estimate(value=theta, upper_loss=torch.zeros(()))),
        "wrong-result",
        ("Estimating", "estimate"),
    ),
    "a dictionary for an estimate": (
        estimated(lambda theta: (theta, {})),
        "wrong-result",
        ("Estimating", "estimate"),
    ),
    "an estimate of another shape, which would be broadcast": (
        valued(t=torch.ones(())),
        "wrong-result",
        ("Estimating", "estimate", "value"),
    ),
    "an estimate without a leaf": (valued(), "wrong-result", ("Estimating", "estimate", "value")),
    "an estimate of numbers": (valued(t=0.5), "wrong-result", ("Estimating", "estimate", "value")),
    "an outer step without a state": (
        moves(lambda theta: theta),
        "wrong-result",
        ("Moving", "step"),
    ),
    "an outer step to another shape, which would be broadcast": (
        moves(lambda theta: ({"t": torch.ones(1)}, {})),
        "wrong-result",
        ("Moving", "step", "theta"),
    ),
    "an outer step to other names": (
        moves(lambda theta: ({"other": theta["t"]}, {})),
        "wrong-result",
        ("Moving", "step", "theta"),
    ),
    "a budget in calls that nobody counts": (
        ran("40 calls"),
        "wrong-result",
        ("method", "step", "oracle_calls"),
    ),
    "a result with another leaf": (
        ran(result=lambda state: ({"weights": state["theta"]["t"]}, state["x"])),
        "wrong-result",
        ("method", "result", "theta"),
    ),
    "a result of another length": (
        ran(result=lambda state: ({"t": state["theta"]["t"][:2]}, state["x"])),
        "wrong-result",
        ("method", "result", "theta"),
    ),
    "a weight that is no number": (ran(step=raises), "not-finite", ("weights", "a")),
    "a graph that is used twice": (ran(step=twice), "freed-graph", ("method",)),
    "a name": (lambda: pipeline(selector="best-of-n"), "wrong-part", ("selector",)),
    "a class": (lambda: pipeline(generator=Branches), "wrong-part", ("generator",)),
    "another kind": (lambda: pipeline(hypergradient=CG()), "wrong-part", ("hypergradient",)),
    "an optimiser of torch": (
        lambda: pipeline(outer=torch.optim.RMSprop([Y], lr=0.1)),
        "wrong-part",
        ("outer",),
    ),
    "an optimiser's class of torch": (
        lambda: pipeline(outer=torch.optim.Adam),
        "wrong-part",
        ("outer",),
    ),
    "a class of another kind": (lambda: pipeline(selector=CG), "wrong-part", ("selector",)),
    "a function": (lambda: pipeline(selector=min), "wrong-part", ("selector",)),
    "nothing": (lambda: pipeline(outer=None), "wrong-part", ("outer",)),
    "a table": (lambda: pipeline(outer={"name": "adam"}), "wrong-part", ("outer",)),
    "a misspelt part": (lambda: pipeline(optimizer=Sgd()), "unknown-option", ("optimizer",)),
    "a missing part": (lambda: pipeline(outer=...), "missing-option", ("outer",)),
    "stopping without rows": (
        lambda: KeepBest(method=pipeline()).init(problem(upper_data={"select": {"a": A}}), 0),
        "no-rows-for-role",
        ("method", "keep"),
    ),
    "what to keep": (
        lambda: KeepBest(method=pipeline(), keep="median"),
        "unknown-choice",
        ("keep",),
    ),
    "no x": (lambda: pipeline().init(problem(x0={}), 0), "wrong-value", ("x0",)),
}


@pytest.mark.parametrize(
    ("wrong", "code", "place"), (PROBLEM | PIPELINE).values(), ids=PROBLEM | PIPELINE
)
def test_wrong_problems_and_pipelines(wrong: Any, code: str, place: tuple[Any, ...]) -> None:
    with rejects(code, of=ConfigError) as caught:
        wrong()
    assert caught.value.place == place
