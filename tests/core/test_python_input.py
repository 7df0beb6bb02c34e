"""What people write in Python by mistake, and what they are told: problems, rows, pipelines,
hypergradients, losses.

A row is a label, what is written, the code and the place of the error, and parts of its text:
values, and suggestions (`'theta0'?`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.helpers import F64, rejects
from torch import nn
from torch.func import functional_call

from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit, Unrolled
from hgms.integrations.lower_solution import lower_solution
from hgms.outer import Adam, Sgd
from hgms.runs import run
from hgms.runs.held_out import hold_out
from hgms.runs.own_problem import OwnProblem
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms_core import (
    Budget,
    ConfigError,
    Data,
    Estimate,
    Key,
    NumericalError,
    Pipeline,
    Problem,
    check_losses,
    hypergradient,
    slopes,
    trainable,
)

pytestmark = pytest.mark.plugins

A = torch.linspace(-1, 1, 12).reshape(6, 2)
Y = torch.tensor([0.0, 1, 0, 1, 1, 0])
MODULE = nn.Linear(2, 1)


def g(theta: Any, x: Any, batch: Any) -> Any:
    losses = (batch["a"] @ x["w"] - batch["y"]).square()
    return (theta["t"][batch["index"]].sigmoid() * losses).mean() + 0.1 * x["w"].square().sum()


def f(theta: Any, x: Any, batch: Any) -> Any:
    return (batch["a"] @ x["w"] - batch["y"]).square().mean()


def problem(**changes: Any) -> Problem:
    parts: dict[str, Any] = {
        "theta0": {"t": torch.zeros(6)},
        "x0": {"w": torch.zeros(2)},
        "g": g,
        "f": f,
        "lower_data": {"a": A, "y": Y},
        "upper_data": {"a": A, "y": Y},
    }
    return Problem(
        **{name: value for name, value in {**parts, **changes}.items() if value is not ...}
    )


def pipeline(**changes: Any) -> Pipeline:
    parts: dict[str, Any] = {
        "generator": Branches(count=2, steps=3, lr=0.1),
        "selector": BestOfN(),
        "hypergradient": Implicit(solver=CG(ridge=0.1)),
        "outer": Adam(lr=0.1),
    }
    return Pipeline(
        **{name: value for name, value in {**parts, **changes}.items() if value is not ...}
    )


def h(**changes: Any) -> Any:
    parts: dict[str, Any] = {
        "f": lambda theta, x: (x - 1).square().sum(),
        "g": lambda theta, x: (x - theta).square().sum(),
        "theta": torch.ones(2),
        "x": torch.zeros(2),
        "solver": CG(),
    }
    return hypergradient(**{**parts, **changes})


def started(**changes: Any) -> Any:
    """A run of one step, which tries the losses first."""
    return run(pipeline(), problem(**changes), Budget(outer_steps=1))


def by_hand(**changes: Any) -> Any:
    """The first step of a pipeline in a loop of one's own."""
    made = problem(**changes)
    method = pipeline(hypergradient=Unrolled())
    return method.step(made, method.init(made, 0))


def no_gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
    def inner(theta: Any, x: Any, batch: Any) -> Any:
        with torch.no_grad():
            return loss(theta, x, batch)

    return inner


def on_module(theta: Any, x: Any, batch: Any) -> Any:
    return (theta["t"] * MODULE(batch["a"]).squeeze(1)).mean()


def as_tuple(theta: Any, x: Any, batch: Any) -> Any:
    a, y = batch
    return (a @ x["w"] - y).square().mean()


def squares(theta: Any, x: Any) -> Any:
    return (x["w"] - theta["t"].sum()).square().sum()


PROBLEM: dict[str, tuple[Any, ...]] = {
    "a misspelt argument": (
        lambda: problem(lower=f),
        "unknown-option",
        ("lower",),
        "'lower_data'?",
    ),
    "another misspelt one": (
        lambda: problem(theta_0=Y),
        "unknown-option",
        ("theta_0",),
        "'theta0'?",
    ),
    "no loss": (lambda: problem(f=...), "missing-option", ("f",)),
    "by position": (
        lambda: Problem({"t": Y}, {"w": Y}, g, f),  # type: ignore[misc]
        "positional-argument",
        (),
        "theta0=…, x0=…, g=…, f=…, lower_data=…",
    ),
    "no start": (
        lambda: Problem(f=f, g=g),  # type: ignore[call-arg]
        "missing-option",
        ("theta0",),
        "x0",
    ),
    "the value of a loss": (
        lambda: problem(f=Y.sum()),
        "wrong-type",
        ("f",),
        "(theta, x, batch)",
        "a Tensor",
    ),
    "a loss's class": (lambda: problem(g=nn.MSELoss), "wrong-type", ("g",), "class MSELoss"),
    "a loss of torch": (
        lambda: problem(g=nn.MSELoss()),
        "wrong-signature",
        ("g",),
        "(theta, x, batch)",
        "(input, target)",
    ),
    "a loss without batch": (
        lambda: problem(g=lambda theta, x: x),
        "wrong-signature",
        ("g",),
        "(theta, x, batch)",
        "(theta, x)",
    ),
    "a loss with its arguments the other way round": (
        lambda: problem(g=lambda x, theta, batch: x),
        "wrong-signature",
        ("g",),
        "(theta, x, batch)",
        "(x, theta, batch)",
    ),
    "a loss with more": (
        lambda: problem(f=lambda t, x, b, more: x),
        "wrong-signature",
        ("f",),
        "(t, x, b, more)",
    ),
    "evaluate of x": (
        lambda: problem(evaluate=lambda x: {}),
        "wrong-signature",
        ("evaluate",),
        "(theta, x)",
        "(x)",
    ),
    "a number in place of evaluate": (
        lambda: problem(evaluate=0.5),
        "wrong-type",
        ("evaluate",),
        "a float",
    ),
    "fresh without a key": (
        lambda: problem(fresh=lambda: {"w": Y}),
        "wrong-signature",
        ("fresh",),
        "(key)",
        "()",
    ),
    "fresh by its value": (
        lambda: problem(fresh={"w": Y}),
        "wrong-type",
        ("fresh",),
        "(key)",
        "a dict",
    ),
    "θ as a number": (lambda: problem(theta0=0.5), "wrong-type", ("theta0",), "torch.tensor(0.5)"),
    "θ as a list": (
        lambda: problem(theta0=[0.0, 0.0]),
        "wrong-type",
        ("theta0", "0"),
        "torch.tensor(0.0)",
    ),
    "θ as an array": (
        lambda: problem(theta0=np.zeros(6)),
        "wrong-type",
        ("theta0",),
        "ndarray",
        "torch.as_tensor",
    ),
    "whole numbers": (
        lambda: problem(theta0={"t": torch.arange(6)}),
        "wrong-dtype",
        ("theta0", "t"),
        ".float()",
        "int64",
    ),
    "x as a module": (
        lambda: problem(x0=MODULE),
        "wrong-type",
        ("x0",),
        "trainable(module)",
        "module Linear",
    ),
    "x as parameters": (
        lambda: problem(x0=MODULE.parameters()),
        "wrong-type",
        ("x0",),
        "trainable(module)",
        "iterator generator",
    ),
    "a frozen layer": (
        lambda: problem(x0={"a": nn.Parameter(Y), "b": nn.Parameter(Y, requires_grad=False)}),
        "frozen-parameter",
        ("x0", "b"),
        "trainable(module)",
    ),
    "a misspelt role": (
        lambda: problem(upper_data={"select": {"a": A}, "stopp": {"a": A}}),
        "unknown-choice",
        ("upper_data", "stopp"),
        "'stop'?",
    ),
    "a role without rows": (
        lambda: problem(upper_data={"select": {"a": A}}).upper_data["differentiate"],
        "no-rows-for-role",
        ("upper_data", "differentiate"),
        "select",
    ),
    "lengths": (
        lambda: problem(lower_data={"a": A, "y": Y[:5]}),
        "wrong-length",
        ("lower_data",),
        "a 6, y 5",
    ),
    "no data": (
        lambda: problem(lower_data=None),
        "wrong-type",
        ("lower_data",),
        "Data.none()",
        "None",
    ),
    "a path": (
        lambda: problem(lower_data="rows.csv"),
        "wrong-type",
        ("lower_data",),
        "pandas.read_csv('rows.csv')",
    ),
    "text": (
        lambda: problem(lower_data=pd.DataFrame({"label": ["a", "b"]})),
        "wrong-column",
        ("lower_data", "label"),
        "strings",
    ),
    "an argument of Data": (
        lambda: Data(3, row=lambda i: {}),  # type: ignore[call-arg]
        "unknown-option",
        ("row",),
        "'rows'?",
    ),
}


class Solve:
    def solve(self, matvec: Any, b: Any) -> Any:
        return b


class Choose:
    def select(self, problem: Any, theta: Any, candidates: Any) -> Any:
        return 0


class Alone:
    """A method whose step returns its state alone, a dictionary of two keys, or whose result
    does.
    """

    def __init__(self, row: Any = None) -> None:
        self.row = row
        self.name = "alone"

    def init(self, problem: Any, seed: int) -> Any:
        return {"theta": dict(problem.theta0), "x": dict(problem.x0)}

    def step(self, problem: Any, state: Any, progress: float) -> Any:
        return state if self.row is None else (state, self.row)

    def result(self, state: Any) -> Any:
        return state if self.row is not None else (state["theta"], state["x"])


class Estimating:
    """An estimator with an answer of one's own, in place of an Estimate with the shapes of θ and
    a state.
    """

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.answer = answer

    def init(self, problem: Any) -> Any:
        return {}

    def estimate(self, problem: Any, theta: Any, branch: Any, key: Any, state: Any) -> Any:
        return self.answer(theta)


def estimated(answer: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: run(pipeline(hypergradient=Estimating(answer)), problem(), "1 steps")


def valued(**value: Any) -> Callable[[], Any]:
    return estimated(lambda theta: (Estimate(value=value, upper_loss=torch.zeros(())), {}))


class Pair(Alone):
    """Its ``result`` is a pair, as it should be."""

    def result(self, state: Any) -> Any:
        return state["theta"], state["x"]


class Twice(Pair):
    """Goes through one graph twice."""

    def step(self, problem: Any, state: Any, progress: float) -> Any:
        theta = {name: leaf.clone().requires_grad_() for name, leaf in state["theta"].items()}
        loss = problem.g(theta, state["x"], problem.lower_data.batch(None))
        slopes(loss, list(theta.values()))
        slopes(loss, list(theta.values()))  # the second


class Renamed(Pair):
    def result(self, state: Any) -> Any:
        return {"weights": state["theta"]["t"]}, state["x"]


class Shorter(Pair):
    def result(self, state: Any) -> Any:
        return {"t": state["theta"]["t"][:2]}, state["x"]


class Raises(Pair):
    def step(self, problem: Any, state: Any, progress: float) -> Any:
        raise ConfigError("not-finite", "the weight is nan", place=("weights", "a"))


SECOND = 1 + next(
    n
    for n, line in enumerate(Path(__file__).read_text().splitlines())
    if line.endswith("# the second")
)

PIPELINE: dict[str, tuple[Any, ...]] = {
    "a selector without a key": (
        lambda: pipeline(selector=Choose()),
        "wrong-signature",
        ("selector", "select"),
        "(problem, theta, candidates, key)",
        "(problem, theta, candidates)",
    ),
    "a solver without a start": (
        lambda: h(solver=Solve()),
        "wrong-signature",
        ("solve",),
        "(matvec, b, x0)",
        "(matvec, b)",
    ),
    "a step of its state alone": (
        lambda: run(Alone(), problem(), "1 steps"),
        "wrong-result",
        ("method", "step"),
        "(state, record)",
        "(dict)",
    ),
    "a result in a dictionary": (
        lambda: run(Alone({}), problem(), "1 steps"),
        "wrong-result",
        ("method", "result"),
        "(theta, x)",
        "(dict)",
    ),
    "an estimate without a state": (
        estimated(lambda theta: Estimate(value=theta, upper_loss=torch.zeros(()))),
        "wrong-result",
        ("Estimating", "estimate"),
        "(Estimate, state)",
        "an Estimate,",
    ),
    "a dictionary for an estimate": (
        estimated(lambda theta: (theta, {})),
        "wrong-result",
        ("Estimating", "estimate"),
        "(Estimate, state)",
        "a dict and a dict",
    ),
    "an estimate of another shape, which would be broadcast": (
        valued(t=torch.ones(())),
        "wrong-result",
        ("Estimating", "estimate", "value"),
        "[6]",
        "[]",
    ),
    "an estimate without a leaf": (
        valued(),
        "wrong-result",
        ("Estimating", "estimate", "value"),
        "[6]",
        "nothing",
    ),
    "an estimate of numbers": (
        valued(t=0.5),
        "wrong-type",
        ("Estimating", "estimate", "value", "t"),
        "0.5",
    ),
    "a budget in calls that nobody counts": (
        lambda: run(Pair({}), problem(), "40 calls"),
        "wrong-result",
        ("method", "step", "oracle_calls"),
        "alone",
    ),
    "a result with another leaf": (
        lambda: run(Renamed({}), problem(), "1 steps"),
        "wrong-result",
        ("method", "result", "theta"),
        "alone",
        "{weights [6]}",
        "{t [6]}",
    ),
    "a result of another length": (
        lambda: run(Shorter({}), problem(), "1 steps"),
        "wrong-result",
        ("method", "result", "theta"),
        "[2]",
        "[6]",
        "alone",
    ),
    "a weight that is no number": (
        lambda: run(Raises({}), problem(), "1 steps"),
        "not-finite",
        ("weights", "a"),
        "step 1",
        "'alone'",
    ),
    "a graph that is used twice": (
        lambda: run(Twice({}), problem(), "1 steps"),
        "freed-graph",
        ("method",),
        "step 1",
        f"test_python_input.py:{SECOND}",
        "retain_graph=True",
    ),
    "a name": (
        lambda: pipeline(selector="best-of-n"),
        "wrong-part",
        ("selector",),
        "'best-of-n'",
        "hgms list",
    ),
    "a class": (lambda: pipeline(generator=Branches), "wrong-part", ("generator",), "Branches()"),
    "another kind": (
        lambda: pipeline(hypergradient=CG()),
        "wrong-part",
        ("hypergradient",),
        "a CG",
    ),
    "an optimiser of torch": (
        lambda: pipeline(outer=torch.optim.RMSprop([Y], lr=0.1)),
        "wrong-part",
        ("outer",),
        "TorchOptimizer(optimizer='RMSprop', settings={…})",
    ),
    "an optimiser's class of torch": (
        lambda: pipeline(outer=torch.optim.Adam),
        "wrong-part",
        ("outer",),
        "TorchOptimizer(optimizer='Adam'",
    ),
    "a class of another kind": (
        lambda: pipeline(selector=CG),
        "wrong-part",
        ("selector",),
        "class CG",
    ),
    "a function": (
        lambda: pipeline(selector=min),
        "wrong-part",
        ("selector",),
        "builtin_function_or_method",
    ),
    "nothing": (lambda: pipeline(outer=None), "wrong-part", ("outer",), "None"),
    "a table": (lambda: pipeline(outer={"name": "adam"}), "wrong-part", ("outer",), "a dict"),
    "a misspelt part": (
        lambda: pipeline(optimizer=Sgd()),
        "unknown-option",
        ("optimizer",),
        "outer",
    ),
    "a missing part": (lambda: pipeline(outer=...), "missing-option", ("outer",)),
    "stopping without rows": (
        lambda: pipeline(keep="best").init(problem(upper_data={"select": {"a": A}}), 0),
        "no-rows-for-role",
        ("method", "keep"),
        "stop",
    ),
    "no x": (lambda: pipeline().init(problem(x0={}), 0), "wrong-value", ("x0",)),
}

HYPERGRADIENT: dict[str, tuple[Any, ...]] = {
    "a strategy": (lambda: h(strategy="vpj"), "unknown-choice", ("strategy",), "'vjp'?"),
    "a solver's name": (lambda: h(solver="cg"), "wrong-part", ("solver",), "'cg'", "hgms list"),
    "a solver's class": (lambda: h(solver=CG), "wrong-part", ("solver",), "CG()"),
    "a leaf that is not there": (
        lambda: h(x={"a": Y}, f=lambda t, x: x["A"].sum()),
        "missing-column",
        ("f",),
        "'a'?",
        "[2]",
        "[6]",
    ),
    "v0 of another size": (lambda: h(v0=torch.zeros(3)), "wrong-shape", ("v0",), "[3]", "[2]"),
    "no solver": (lambda: h(solver=None), "wrong-part", ("solver",), "None"),
    "a solver of b": (
        lambda: h(solver=lambda b: b),
        "wrong-signature",
        ("solver",),
        "(matvec, b)",
        "(b)",
    ),
    "a solver like SciPy's": (
        lambda: h(solver=lambda matvec, b: (b, 0)),
        "wrong-result",
        ("solver",),
        "[2]",
        "a tuple",
    ),
    "a solver's shape": (
        lambda: h(solver=lambda matvec, b: b[:1]),
        "wrong-result",
        ("solver",),
        "[2]",
        "[1]",
    ),
    "x a module": (lambda: h(x=MODULE), "wrong-type", ("x",), "trainable(module)", "module Linear"),
    "x a state_dict": (
        lambda: h(x=nn.BatchNorm1d(2).state_dict()),
        "wrong-dtype",
        ("x", "num_batches_tracked"),
        "int64",
    ),
    "x empty": (lambda: h(x={}), "wrong-value", ("x",)),
    "θ empty": (lambda: h(theta=[]), "wrong-value", ("theta",)),
    "θ a number": (lambda: h(theta=0.5), "wrong-type", ("theta",), "torch.tensor(0.5)"),
    "a loss with a batch": (
        lambda: h(f=f),
        "wrong-signature",
        ("f",),
        "(theta, x)",
        "(theta, x, batch)",
    ),
    "the value of a loss": (lambda: h(g=Y.sum()), "wrong-type", ("g",), "(theta, x)", "a Tensor"),
    "losses of rows": (
        lambda: h(g=lambda t, x: (x - t) ** 2),
        "not-scalar",
        ("g",),
        ".mean()",
        "[2]",
    ),
    "a number of Python": (
        lambda: h(f=lambda t, x: x.sum().item()),
        "not-scalar",
        ("f",),
        "torch.no_grad()",
        ".detach()",
        ".item()",
        "a float",
    ),
    "no return": (lambda: h(g=lambda t, x: None), "not-scalar", ("g",), "return", "None"),
    "f without a gradient": (
        lambda: h(f=lambda t, x: x.detach().sum(), g=lambda t, x: ((x - t) ** 2).sum()),
        "no-gradient",
        ("f",),
        "torch.no_grad()",
        ".detach()",
        ".item()",
    ),
    "no θ": (
        lambda: h(g=lambda t, x: (x**2).sum()),
        "theta-unused",
        ("theta",),
        "torch.no_grad()",
        ".detach()",
        ".item()",
        "(theta)",
    ),
    "a lower solution's solver": (
        lambda: (
            lower_solution(
                lambda t, x: (x - t).square().sum(), Y.clone().requires_grad_(), Y, solver="cg"
            )
            .sum()
            .backward()
        ),
        "wrong-part",
        ("solver",),
        "'cg'",
    ),
    "a lower solution's loss": (
        lambda: lower_solution(f, Y.clone().requires_grad_(), Y, solver=CG()),
        "wrong-signature",
        ("g",),
        "(theta, x)",
    ),
}

LOSSES: dict[str, tuple[Any, ...]] = {
    "losses of rows": (
        lambda: started(f=lambda t, x, b: (b["a"] @ x["w"] - b["y"]).square()),
        "not-scalar",
        ("f",),
        ".mean()",
        ".sum()",
        "[6]",
    ),
    "g of rows": (
        lambda: started(g=lambda t, x, b: b["a"] @ x["w"] * t["t"]),
        "not-scalar",
        ("g",),
        "[6]",
    ),
    "no return": (lambda: started(f=lambda t, x, b: None), "not-scalar", ("f",), "return", "None"),
    "two values": (
        lambda: started(g=lambda t, x, b: (g(t, x, b), 1)),
        "not-scalar",
        ("g",),
        "a tuple",
    ),
    "a number of Python": (
        lambda: started(f=lambda t, x, b: f(t, x, b).item()),
        "not-scalar",
        ("f",),
        "torch.no_grad()",
        ".detach()",
        ".item()",
        "a float",
    ),
    "an array": (
        lambda: started(f=lambda t, x, b: f(t, x, b).detach().numpy()),
        "not-scalar",
        ("f",),
        "a ndarray",
    ),
    "a count": (
        lambda: started(f=lambda t, x, b: (b["a"] @ x["w"] > 0).sum()),
        "wrong-dtype",
        ("f",),
        "int64",
    ),
    "no_grad in f": (
        lambda: started(f=no_gradient(f)),
        "no-gradient",
        ("f",),
        "torch.no_grad()",
        ".detach()",
        ".item()",
    ),
    "no_grad in g": (lambda: started(g=no_gradient(g)), "theta-unused", ("theta0",), "(t)"),
    "x detached": (
        lambda: started(g=lambda t, x, b: g(t, {"w": x["w"].detach()}, b)),
        "no-gradient",
        ("g",),
        "torch.no_grad()",
        ".detach()",
        ".item()",
        "(w)",
    ),
    "a row that the first check does not see": (
        lambda: started(
            g=lambda t, x, b: squares(t, x) + Y[b["late"]].sum(),
            lower_data={"late": [0] * 499 + [500]},
        ),
        "loss-failed",
        ("g",),
        "[500]",
        "index 500 is out of bounds",
    ),
    "θ shorter than the rows": (
        lambda: started(
            g=lambda t, x, b: (t["t"][b["index"]].sigmoid() * (b["a"] @ x["w"] - 1)).mean(),
            lower_data={"a": torch.ones(80, 2)},
        ),
        "wrong-size",
        ("theta0",),
        "6 numbers",
        "80 rows",
    ),
    "labels with an axis": (
        lambda: started(
            f=lambda t, x, b: nn.functional.cross_entropy((b["a"] @ x["w"])[:, None], b["c"]),
            upper_data={"a": A, "c": torch.zeros(6, 1, dtype=torch.int64)},
        ),
        "loss-failed",
        ("f",),
        "batch['c'].squeeze(1)",
    ),
    "a batch as a tuple": (
        lambda: started(f=as_tuple, upper_data=(A, Y)),
        "loss-failed",
        ("f",),
        "batch['0'], batch['1']",
    ),
    "a batch by numbers": (
        lambda: started(f=lambda t, x, b: (b[0] @ x["w"] - b[1]).sum(), upper_data=(A, Y)),
        "missing-column",
        ("f",),
        "'0'?",
    ),
    "a batch of one column as a tuple": (
        lambda: started(f=as_tuple, upper_data=(A,)),
        "loss-failed",
        ("f",),
        "batch['0']",
    ),
    "θ not used": (lambda: started(g=f), "theta-unused", ("theta0",), "(t)"),
    "the module's own parameters": (
        lambda: started(x0=trainable(MODULE), g=on_module, f=on_module),
        "no-gradient",
        ("g",),
        "(weight, bias)",
    ),
    "a column that is not there": (
        lambda: started(f=lambda t, x, b: (b["A"] @ x["w"]).sum()),
        "missing-column",
        ("f",),
        "'a'?",
        "[6]",
        "[2]",
    ),
    "a leaf that is not there": (
        lambda: started(g=lambda t, x, b: x["weight"].sum()),
        "missing-column",
        ("g",),
        "weight",
    ),
    "shapes": (
        lambda: started(f=lambda t, x, b: (b["a"] @ x["w"][:1]).sum()),
        "loss-failed",
        ("f",),
        "[2]",
        "[6, 2]",
        "size mismatch",
    ),
    "types": (
        lambda: started(lower_data={"a": A.double(), "y": Y}),
        "loss-failed",
        ("g",),
        "batch[name].float()",
        "dtype",
    ),
    "a method that is not there": (
        lambda: started(f=lambda t, x, b: x["w"].summ()),
        "loss-failed",
        ("f",),
        "Tensor",
        "summ",
        "AttributeError",
    ),
    "dropout": (
        lambda: started(g=lambda t, x, b: g(t, {"w": nn.functional.dropout(x["w"] + 1)}, b)),
        "random-loss",
        ("loss",),
        "model.eval()",
    ),
    "numbers of numpy": (
        lambda: started(g=lambda t, x, b: g(t, x, b) + np.random.rand()),  # noqa: NPY002
        "random-loss",
        ("loss",),
        "numpy",
    ),
    "rows changed in place": (
        lambda: started(f=lambda t, x, b: f(t, {"w": x["w"] + 1}, {**b, "y": b["y"].add_(1)})),
        "random-loss",
        ("loss",),
        "in-place",
    ),
    "project without return": (
        lambda: started(project=lambda t: t.update(t=torch.zeros(6))),
        "wrong-result",
        ("project",),
        "return",
        "[6]",
        "None",
    ),
    "project to other leaves": (
        lambda: started(project=lambda t: {"s": t["t"]}),
        "wrong-result",
        ("project",),
        "[6]",
        "s [6]",
        "t [6]",
    ),
    "fresh of another size": (
        lambda: problem(fresh=lambda key: {"w": torch.zeros(3)}).initial(Key(0)),
        "wrong-result",
        ("fresh",),
        "[2]",
        "[3]",
    ),
    "evaluate of one number": (
        lambda: started(evaluate=lambda t, x: 0.5),
        "wrong-metric",
        ("evaluate",),
        "name",
        "a float",
        "{'name': number}",
    ),
    "evaluate without return": (
        lambda: started(evaluate=lambda t, x: None),
        "wrong-metric",
        ("evaluate",),
        "return",
        "None",
    ),
    "evaluate of vectors": (
        lambda: started(evaluate=lambda t, x: {"w": x["w"]}),
        "wrong-metric",
        ("evaluate", "w"),
        "[2]",
    ),
    "evaluate of text": (
        lambda: started(evaluate=lambda t, x: {"w": "good"}),
        "wrong-metric",
        ("evaluate", "w"),
        "a str",
    ),
    "by hand: a column": (
        lambda: by_hand(g=lambda t, x, b: (b["A"] @ x["w"]).sum()),
        "missing-column",
        ("g",),
        "A",
    ),
    "by hand: losses of rows": (
        lambda: by_hand(f=lambda t, x, b: b["a"] @ x["w"]),
        "not-scalar",
        ("f",),
        "[6]",
    ),
    "by hand: no θ": (lambda: by_hand(g=f), "theta-unused", ("theta0",)),
    "by hand: no_grad": (lambda: by_hand(g=no_gradient(g)), "theta-unused", ("theta0",)),
}

ROWS = [
    pytest.param(row, id=f"{table}: {label}")
    for table, rows in {
        "Problem": PROBLEM,
        "Pipeline": PIPELINE,
        "hypergradient": HYPERGRADIENT,
        "losses": LOSSES,
    }.items()
    for label, row in rows.items()
]


@pytest.mark.parametrize("row", ROWS)
def test_a_mistake_is_told_with_what_to_write(row: tuple[Any, ...]) -> None:
    wrong, code, place, *shown = row
    with rejects(code, of=ConfigError) as caught:
        wrong()
    assert caught.value.place == place
    assert [part for part in shown if part not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("change", "place", "shown"),
    [
        ({"f": lambda t, x, b: x["w"].sum().log()}, ("f",), ("-inf", "log(0)")),
        (
            {
                "g": lambda t, x, b: squares(t, x) * b["late"].sum(),
                "lower_data": {"late": [1.0] * 499 + [float("nan")]},
            },
            ("lower_data", "late"),
            ("nan", "1 of 500 training rows", "row 499"),
        ),
        ({"lower_data": {"a": A, "y": Y / 0}}, ("lower_data", "y"), ("nan", "6 of 6")),
        (
            {
                "g": lambda t, x, b: squares(t, x) + ((x["w"] + 1) * b["far"].sum()).tanh().sum(),
                "lower_data": {"far": [1.0] * 300 + [float("-inf")] * 2 + [1.0] * 10},
            },
            ("lower_data", "far"),
            ("its gradient", "2 of 312 training rows", "row 300"),
        ),
        (
            {
                "f": lambda t, x, b: squares(t, x) * b["s"].mean(),
                "upper_data": {
                    "differentiate": {"s": [1.0] * 20},
                    "select": {"s": [1.0] * 20},
                    "stop": {"s": [1.0] * 19 + [float("inf")]},
                },
            },
            ("upper_data", "stop", "s"),
            ("1 of 20 validation rows", "row 19"),
        ),
        (
            {"g": lambda t, x, b: squares(t, x) + x["w"].square().sum().sqrt()},
            ("g",),
            ("g is 0 ", "its gradient", "x: w", "sqrt"),
        ),
        (
            {"f": lambda t, x, b: squares(t, x) + x["w"].square().sum().sqrt()},
            ("f",),
            ("its gradient", "x: w"),
        ),
    ],
)
def test_a_loss_that_is_no_number_at_the_start_ends_the_run_there(
    change: Any, place: tuple[str, ...], shown: tuple[str, ...]
) -> None:
    with rejects("not-finite", *place, of=NumericalError) as caught:
        started(**change)
    assert all(part in str(caught.value) for part in shown)


def test_a_single_validation_row_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "hgms"):
        started()
        assert not caplog.records
        started(upper_data={"a": A[:1], "y": Y[:1]})
    assert "1 validation row" in caplog.text


def test_another_exception_of_a_loss_says_what_it_was_called_with() -> None:
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        h(theta=torch.ones(3))
    assert caught.value.__notes__ == [
        "g was called with\n  θ: theta [3], float32\n  x: x [2], float32"
    ]


def test_there_are_more_than_fifty_rows() -> None:
    assert len(ROWS) > 80


def test_what_is_right_is_not_refused_and_costs_the_budget_nothing() -> None:
    seen = []

    def counted(theta: Any, x: Any, batch: Any) -> Any:
        seen.append(len(batch["index"]))
        return g(theta, x, batch)

    made = problem(g=counted, evaluate=lambda t, x: {"w": x["w"].sum(), "n": np.float64(2)})
    result = run(pipeline(), made, Budget(oracle_calls=1))
    assert result.records[0]["metric.n"] == 2.0
    assert seen[:2] == [6, 6]  # before the first step
    cost = {
        name.removeprefix("cost_"): value
        for name, value in result.records[-1].items()
        if name.startswith("cost_")
    }
    assert len(seen) - 2 <= cost["lower_gradients"] + cost["cross_products"]
    check_losses(made, made.theta0, made.x0, Key(0))
    assert h().outcome.label == "converged"


def test_an_evaluate_that_works_in_place_changes_nothing() -> None:
    def in_place(theta: Any, x: Any) -> Any:
        x["w"].data.add_(1.0)
        return {"mean": theta["t"].sigmoid_().mean()}

    def plain(theta: Any, x: Any) -> Any:
        return {"mean": theta["t"].sigmoid().mean()}

    made = problem(evaluate=in_place)
    ends = [run(pipeline(), own, Budget(outer_steps=3)) for own in (made, problem(evaluate=plain))]
    for name in ("theta", "x"):
        one, other = (getattr(end, name) for end in ends)
        assert all(torch.equal(one[leaf], other[leaf]) for leaf in other), name
    means = [[row["metric.mean"] for row in end.records] for end in ends]
    assert means[0] == means[1]
    assert not made.theta0["t"].any()
    assert not made.x0["w"].any()


def test_the_loss_of_a_comparison_is_that_of_the_result() -> None:
    made = problem(evaluate=lambda t, x: {"w": x["w"].add_(1.0).sum()})
    own = OwnProblem.of(made, measured=True, metric="upper_loss").problem(
        0, torch.device("cpu"), torch.float32
    )
    numbers = own.metrics(made.theta0, made.x0)
    (held,) = hold_out(made)[1]
    expected = f(made.theta0, made.x0, held.batch(None))
    assert numbers == {"w": 2.0, "upper_loss": pytest.approx(float(expected))}


def test_a_module_s_losses_need_no_more() -> None:
    module = nn.Linear(2, 1).to(F64)
    rows = pd.DataFrame({"u": A[:, 0], "v": A[:, 1], "y": Y})

    def loss(theta: Any, x: Any, batch: Any) -> Any:
        inputs = torch.stack([batch["u"], batch["v"]], -1)
        return (
            theta[batch["index"]].sigmoid()
            * (functional_call(module, x, (inputs,)).squeeze(1) - batch["y"]) ** 2
        ).mean()

    made = Problem(
        theta0=torch.zeros(6),
        x0=trainable(module),
        g=loss,
        f=loss,
        lower_data=rows,
        upper_data=rows,
    )
    assert run(pipeline(), made, Budget(outer_steps=1)).theta.shape == (6,)
