"""What people write in Python by mistake, and what they are told: problems, rows, pipelines,
hypergradients, losses.

A row is a label, what is written, and the message, which is the whole error: one that says what,
where, what was expected and what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import F64
from torch import nn
from torch.func import functional_call

from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit, Unrolled
from hgms.integrations.lower_solution import lower_solution
from hgms.outer import Adam, Sgd
from hgms.runs import run
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


def squares(theta: Any, x: Any) -> Any:
    return (x["w"] - theta["t"].sum()).square().sum()


PARTS = "an object with"
IN_A_FILE = (
    "a name stands for an object in configurations only; `hgms list` shows where each is "
    "imported from"
)
COPY = (
    r"leave out `torch.no_grad\(\)`, `.detach\(\)`, `.item\(\)`, `.data` and numpy: what they "
    r"give is no longer"
)
NO_TENSOR = "{} must return a tensor with one number, and it returns {}"

PROBLEM: dict[str, tuple[Callable[[], Any], str]] = {
    "a misspelt argument": (
        lambda: problem(lower=f),
        r"unknown argument 'lower'.*\n  available: .*lower_data.* @ Problem",
    ),
    "another misspelt one": (
        lambda: problem(theta_0=Y),
        "unknown argument 'theta_0'; did you mean 'theta0'",
    ),
    "no loss": (lambda: problem(f=...), "Problem needs 'f'"),
    "by position": (
        lambda: Problem({"t": Y}, {"w": Y}, g, f),  # type: ignore[misc]
        "Problem takes its arguments by name: theta0=…, x0=…, g=…, f=…, lower_data=…",
    ),
    "no start": (
        lambda: Problem(f=f, g=g),  # type: ignore[call-arg]
        "Problem needs 'theta0', 'x0'",
    ),
    "the value of a loss": (
        lambda: problem(f=Y.sum()),
        r"'f' must be a function, f\(theta, x, batch\), and it is a Tensor",
    ),
    "a loss's class": (
        lambda: problem(g=nn.MSELoss),
        r"'g' must be a function, g\(theta, x, batch\), .* the class MSELoss",
    ),
    "a loss of torch": (
        lambda: problem(g=nn.MSELoss()),
        r"g\(theta, x, batch\), and this one takes \(input, target\)",
    ),
    "a loss without batch": (
        lambda: problem(g=lambda theta, x: x),
        r"as g\(theta, x, batch\), and this one takes \(theta, x\)",
    ),
    "a loss with its arguments the other way round": (
        lambda: problem(g=lambda x, theta, batch: x),
        r"as g\(theta, x, batch\), and this one takes \(x, theta, batch\)",
    ),
    "a loss with more": (
        lambda: problem(f=lambda t, x, b, more: x),
        r"and this one takes \(t, x, b, more\)",
    ),
    "evaluate of x": (
        lambda: problem(evaluate=lambda x: {}),
        r"evaluate\(theta, x\), and this one takes \(x\)",
    ),
    "a number in place of evaluate": (
        lambda: problem(evaluate=0.5),
        r"'evaluate' must be a function, .* it is a float",
    ),
    "fresh without a key": (
        lambda: problem(fresh=lambda: {"w": Y}),
        r"called as fresh\(key\), and this one takes \(\)",
    ),
    "fresh by its value": (
        lambda: problem(fresh={"w": Y}),
        r"'fresh' must be a function, fresh\(key\), and it is a dict",
    ),
    "θ as a number": (
        lambda: problem(theta0=0.5),
        r"'theta0' is the number 0.5; write `torch.tensor\(0.5\)`",
    ),
    "θ as a list": (
        lambda: problem(theta0=[0.0, 0.0]),
        r"'theta0', at '0', is the number 0.0; .* for a list of numbers one tensor",
    ),
    "θ as an array": (
        lambda: problem(theta0=np.zeros(6)),
        r"'theta0' is a ndarray; write `torch.as_tensor\(…\)` of it",
    ),
    "whole numbers": (
        lambda: problem(theta0={"t": torch.arange(6)}),
        r"and 't' is int64\n  write `.float\(\)`",
    ),
    "x as a module": (
        lambda: problem(x0=MODULE),
        r"'x0' must be tensors, not the module Linear\n  write `trainable\(module\)`",
    ),
    "x as parameters": (
        lambda: problem(x0=MODULE.parameters()),
        r"not the iterator generator\n  write `trainable\(module\)`",
    ),
    "a frozen layer": (
        lambda: problem(x0={"a": nn.Parameter(Y), "b": nn.Parameter(Y, requires_grad=False)}),
        r"'x0' holds the frozen parameter 'b' among trained ones\n  write `trainable\(module\)`",
    ),
    "a misspelt role": (
        lambda: problem(upper_data={"select": {"a": A}, "stopp": {"a": A}}),
        "'stopp'; did you mean 'stop'",
    ),
    "a role without rows": (
        lambda: problem(upper_data={"select": {"a": A}}).upper_data["differentiate"],
        (
            r"no validation rows for the role 'differentiate', only for: select\n  give "
            r"`upper_data` one table for all roles"
        ),
    ),
    "lengths": (
        lambda: problem(lower_data={"a": A, "y": Y[:5]}),
        "must have the same number of rows: a 6, y 5 @ Problem.lower_data",
    ),
    "no data": (
        lambda: problem(lower_data=None),
        r"and this is None\n  a loss without data takes `Data.none\(\)`",
    ),
    "a path": (
        lambda: problem(lower_data="rows.csv"),
        r"read the file first, for example by `pandas.read_csv\('rows.csv'\)`",
    ),
    "text": (
        lambda: problem(lower_data=pd.DataFrame({"label": ["a", "b"]})),
        "the column 'label' holds strings",
    ),
    "an argument of Data": (
        lambda: Data(3, row=lambda i: {}),
        "unknown argument 'row'; did you mean 'rows'",
    ),  # type: ignore[call-arg]
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
        return state


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
        raise ConfigError(f"the weight of 'a' must be >= 0: {float('nan')}")


SECOND = 1 + next(
    n
    for n, line in enumerate(Path(__file__).read_text().splitlines())
    if line.endswith("# the second")
)
VALUE = "the value of the Estimate that Estimating.estimate returns"

PIPELINE: dict[str, tuple[Callable[[], Any], str]] = {
    "a selector without a key": (
        lambda: pipeline(selector=Choose()),
        (
            r"called as selector.select\(problem, theta, candidates, key\), and this one takes "
            r"\(problem, theta, candidates\)"
        ),
    ),
    "a solver without a start": (
        lambda: h(solver=Solve()),
        r"'solve' is called as solve\(matvec, b, x0\), and this one takes \(matvec, b\)",
    ),
    "a step of its state alone": (
        lambda: run(Alone(), problem(), "1 steps"),
        r"`step` must return two dictionaries, \(state, record\), and it returns \(dict\)",
    ),
    "a result in a dictionary": (
        lambda: run(Alone({}), problem(), "1 steps"),
        r"`result` must return two dictionaries, \(theta, x\), and it returns \(dict\)",
    ),
    "an estimate without a state": (
        estimated(lambda theta: Estimate(value=theta, upper_loss=torch.zeros(()))),
        r"Estimating.estimate must return \(Estimate, state\), and it returns an Estimate$",
    ),
    "a dictionary for an estimate": (
        estimated(lambda theta: (theta, {})),
        r"Estimating.estimate must return \(Estimate, state\), and it returns a dict and a dict$",
    ),
    "an estimate of another shape, which would be broadcast": (
        valued(t=torch.ones(())),
        rf"{VALUE} must be like t \[6\], float32, and it is t \[\], float32$",
    ),
    "an estimate without a leaf": (
        valued(),
        rf"{VALUE} must be like t \[6\], float32, and it is nothing$",
    ),
    "an estimate of numbers": (valued(t=0.5), rf"{VALUE}, at 't', is the number 0.5; write"),
    "a budget in calls that nobody counts": (
        lambda: run(Pair({}), problem(), "40 calls"),
        "method 'alone' records no oracle_calls; a budget in calls needs them",
    ),
    "a result with another leaf": (
        lambda: run(Renamed({}), problem(), "1 steps"),
        r"method 'alone': result's θ has leaves {weights \[6\]}, the problem's {t \[6\]}$",
    ),
    "a result of another length": (
        lambda: run(Shorter({}), problem(), "1 steps"),
        r"method 'alone': result's θ has leaves {t \[2\]}, the problem's {t \[6\]}$",
    ),
    "a weight that is no number": (
        lambda: run(Raises({}), problem(), "1 steps"),
        "method 'alone', step 1: the weight of 'a' must be >= 0: nan$",
    ),
    "a graph that is used twice": (
        lambda: run(Twice({}), problem(), "1 steps"),
        (
            r"step 1: a graph is gone through a second time "
            rf"\(test_python_input.py:{SECOND}\).*\n.*retain_graph=True"
        ),
    ),
    "a name": (
        lambda: pipeline(selector="best-of-n"),
        (
            rf"expected a selector \({PARTS} select\), got 'best-of-n' @ Pipeline.selector\n  "
            rf"{IN_A_FILE}"
        ),
    ),
    "a class": (
        lambda: pipeline(generator=Branches),
        (
            rf"expected a candidate generator \({PARTS} init, propose, carry\), got the class "
            r"Branches; write Branches\(\)"
        ),
    ),
    "another kind": (
        lambda: pipeline(hypergradient=CG()),
        (
            rf"expected a hypergradient estimator \({PARTS} init, estimate\), got a CG @ "
            r"Pipeline.hypergradient"
        ),
    ),
    "an optimiser of torch": (
        lambda: pipeline(outer=torch.optim.RMSprop([Y], lr=0.1)),
        (
            r"got torch's RMSprop @ Pipeline.outer\n  .*write "
            r"`TorchOptimizer\(optimizer='RMSprop', settings={…}\)`"
        ),
    ),
    "an optimiser's class of torch": (
        lambda: pipeline(outer=torch.optim.Adam),
        r"TorchOptimizer\(optimizer='Adam'",
    ),
    "a class of another kind": (
        lambda: pipeline(selector=CG),
        "got the class CG @ Pipeline.selector",
    ),
    "a function": (
        lambda: pipeline(selector=min),
        "got a builtin_function_or_method @ Pipeline.selector",
    ),
    "nothing": (lambda: pipeline(outer=None), "got None @ Pipeline.outer"),
    "a table": (lambda: pipeline(outer={"name": "adam"}), "got a dict @ Pipeline.outer"),
    "a misspelt part": (
        lambda: pipeline(optimizer=Sgd()),
        r"unknown argument 'optimizer'.*\n  available: .*outer.* @ Pipeline",
    ),
    "a missing part": (lambda: pipeline(outer=...), "Pipeline needs 'outer'"),
    "stopping without rows": (
        lambda: pipeline(keep="best").init(problem(upper_data={"select": {"a": A}}), 0),
        'keep = "best" needs validation rows for the role `stop`',
    ),
    "no x": (
        lambda: pipeline().init(problem(x0={}), 0),
        "'x0' holds no tensor, so there is no lower level to solve",
    ),
}

HYPERGRADIENT: dict[str, tuple[Callable[[], Any], str]] = {
    "a strategy": (lambda: h(strategy="vpj"), "unknown strategy 'vpj'; did you mean 'vjp'"),
    "a solver's name": (
        lambda: h(solver="cg"),
        rf"expected a linear solver \({PARTS} solve\), got 'cg' @ solver\n  {IN_A_FILE}",
    ),
    "a solver's class": (lambda: h(solver=CG), r"got the class CG; write CG\(\) @ solver"),
    "a leaf that is not there": (
        lambda: h(x={"a": Y}, f=lambda t, x: x["A"].sum()),
        (
            r"f asks for 'A', which is not there; did you mean 'a'\?\n  θ: theta \[2\], float32\n  "
            r"x: a \[6\], float32"
        ),
    ),
    "v0 of another size": (
        lambda: h(v0=torch.zeros(3)),
        r"'v0' must be a vector of as many numbers as x has, 2, .* \[3\]",
    ),
    "no solver": (lambda: h(solver=None), "got None @ solver"),
    "a solver of b": (
        lambda: h(solver=lambda b: b),
        r"'solver' is called as solver\(matvec, b\), and this one takes \(b\)",
    ),
    "a solver like SciPy's": (
        lambda: h(solver=lambda matvec, b: (b, 0)),
        r"'solver' must return a tensor like b, \[2\], and it returns a tuple",
    ),
    "a solver's shape": (
        lambda: h(solver=lambda matvec, b: b[:1]),
        r"a tensor like b, \[2\], and it returns \[1\]",
    ),
    "x a module": (
        lambda: h(x=MODULE),
        r"'x' must be tensors, not the module Linear\n  write `trainable\(module\)`",
    ),
    "x a state_dict": (
        lambda: h(x=nn.BatchNorm1d(2).state_dict()),
        "and 'num_batches_tracked' is int64",
    ),
    "x empty": (lambda: h(x={}), "'x' holds no tensor, so there is nothing to differentiate by"),
    "θ empty": (lambda: h(theta=[]), "'theta' holds no tensor"),
    "θ a number": (lambda: h(theta=0.5), r"'theta' is the number 0.5; write `torch.tensor\(0.5\)`"),
    "a loss with a batch": (
        lambda: h(f=f),
        r"'f' is called as f\(theta, x\), and this one takes \(theta, x, batch\)",
    ),
    "the value of a loss": (
        lambda: h(g=Y.sum()),
        r"'g' must be a function, g\(theta, x\), and it is a Tensor",
    ),
    "losses of rows": (
        lambda: h(g=lambda t, x: (x - t) ** 2),
        r"g must return one number, .* \[2\]\n  write `.mean\(\)` or `.sum",
    ),
    "a number of Python": (
        lambda: h(f=lambda t, x: x.sum().item()),
        rf"f must return a tensor .* a float\n  {COPY} a tensor",
    ),
    "no return": (
        lambda: h(g=lambda t, x: None),
        rf"{NO_TENSOR.format('g', 'None')}\n  add a `return`",
    ),
    "f without a gradient": (
        lambda: h(f=lambda t, x: x.detach().sum(), g=lambda t, x: ((x - t) ** 2).sum()),
        rf"f has no gradient with respect to θ or x\n  {COPY} θ or x",
    ),
    "no θ": (
        lambda: h(g=lambda t, x: (x**2).sum()),
        rf"neither loss depends on θ \(theta\), .*\n  .*{COPY} θ",
    ),
    "a lower solution's solver": (
        lambda: (
            lower_solution(
                lambda t, x: (x - t).square().sum(), Y.clone().requires_grad_(), Y, solver="cg"
            )
            .sum()
            .backward()
        ),
        "expected a linear solver",
    ),
    "a lower solution's loss": (
        lambda: lower_solution(f, Y.clone().requires_grad_(), Y, solver=CG()),
        r"'g' is called as g\(theta, x\)",
    ),
}

LOSSES: dict[str, tuple[Callable[[], Any], str]] = {
    "losses of rows": (
        lambda: started(f=lambda t, x, b: (b["a"] @ x["w"] - b["y"]).square()),
        r"f must return one number, and it returns \[6\]\n  write `.mean\(\)` or `.sum\(\)`",
    ),
    "g of rows": (
        lambda: started(g=lambda t, x, b: b["a"] @ x["w"] * t["t"]),
        r"g must return one number, and it returns \[6\]",
    ),
    "no return": (
        lambda: started(f=lambda t, x, b: None),
        rf"{NO_TENSOR.format('f', 'None')}\n  add a `return`",
    ),
    "two values": (
        lambda: started(g=lambda t, x, b: (g(t, x, b), 1)),
        rf"{NO_TENSOR.format('g', 'a tuple')}\n  return the loss alone",
    ),
    "a number of Python": (
        lambda: started(f=lambda t, x, b: f(t, x, b).item()),
        rf"{NO_TENSOR.format('f', 'a float')}\n  {COPY}",
    ),
    "an array": (
        lambda: started(f=lambda t, x, b: f(t, x, b).detach().numpy()),
        f"{NO_TENSOR.format('f', 'a ndarray')}",
    ),
    "a count": (
        lambda: started(f=lambda t, x, b: (b["a"] @ x["w"] > 0).sum()),
        "f must return a floating-point number, .* int64",
    ),
    "no_grad in f": (
        lambda: started(f=no_gradient(f)),
        rf"f has no gradient with respect to θ or x\n  {COPY} θ or x",
    ),
    "no_grad in g": (lambda: started(g=no_gradient(g)), r"neither loss depends on θ \(t\)"),
    "x detached": (
        lambda: started(g=lambda t, x, b: g(t, {"w": x["w"].detach()}, b)),
        rf"g has no gradient with respect to x \(w\)\n  use its leaves in g; {COPY} x",
    ),
    "a row that the first check does not see": (
        lambda: started(
            g=lambda t, x, b: squares(t, x) + Y[b["late"]].sum(),
            lower_data={"late": [0] * 499 + [500]},
        ),
        r"g fails on a few rows: IndexError: index 500 is out of bounds(?s:.*)late \[500\]",
    ),
    "θ not used": (
        lambda: started(g=f),
        r"neither loss depends on θ \(t\), so there is nothing to learn",
    ),
    "the module's own parameters": (
        lambda: started(x0=trainable(MODULE), g=on_module, f=on_module),
        r"g has no gradient with respect to x \(weight, bias\)",
    ),
    "a column that is not there": (
        lambda: started(f=lambda t, x, b: (b["A"] @ x["w"]).sum()),
        (
            r"f asks for 'A', which is not there; did you mean 'a'\?\n  θ: t \[6\], float32\n  "
            r"x: w \[2\].*\n  batch: a \[6, 2\]"
        ),
    ),
    "a leaf that is not there": (
        lambda: started(g=lambda t, x, b: x["weight"].sum()),
        "g asks for 'weight', which is not there",
    ),
    "shapes": (
        lambda: started(f=lambda t, x, b: (b["a"] @ x["w"][:1]).sum()),
        (
            r"f fails on a few rows: RuntimeError: size mismatch(?s:.*)x: w \[2\](?s:.*)batch: a "
            r"\[6, 2\]"
        ),
    ),
    "types": (
        lambda: started(lower_data={"a": A.double(), "y": Y}),
        (
            r"g fails on a few rows: RuntimeError: .*dtype(?s:.*)tensors keep their type; "
            r"`batch\[name\].float\(\)`, or `.long"
        ),
    ),
    "a method that is not there": (
        lambda: started(f=lambda t, x, b: x["w"].summ()),
        r"f fails on a few rows: AttributeError: 'Tensor' object has no attribute 'summ'\n  θ",
    ),
    "dropout": (
        lambda: started(g=lambda t, x, b: g(t, {"w": nn.functional.dropout(x["w"] + 1)}, b)),
        r"a loss draws random numbers, as dropout does in training mode\n  .*`module.eval\(\)`",
    ),
    "numbers of numpy": (
        lambda: started(g=lambda t, x, b: g(t, x, b) + np.random.rand()),  # noqa: NPY002
        (
            r"a loss has another value when it is called again .*\n  it draws random numbers \(of "
            r"numpy"
        ),
    ),
    "rows changed in place": (
        lambda: started(f=lambda t, x, b: f(t, {"w": x["w"] + 1}, {**b, "y": b["y"].add_(1)})),
        "in place",
    ),
    "project without return": (
        lambda: started(project=lambda t: t.update(t=torch.zeros(6))),
        r"what `project` returns must be like t \[6\], float32, and it is None; add a `return`",
    ),
    "project to other leaves": (
        lambda: started(project=lambda t: {"s": t["t"]}),
        r"must be like t \[6\], .* and it is s \[6\]",
    ),
    "fresh of another size": (
        lambda: problem(fresh=lambda key: {"w": torch.zeros(3)}).initial(Key(0)),
        r"what `fresh` returns must be like w \[2\], float32, and it is w \[3\], float32",
    ),
    "evaluate of one number": (
        lambda: started(evaluate=lambda t, x: 0.5),
        r"`evaluate` must return numbers by name, and it returns a float\n  write {'name': number}",
    ),
    "evaluate without return": (
        lambda: started(evaluate=lambda t, x: None),
        "it returns None\n  add a `return`",
    ),
    "evaluate of vectors": (
        lambda: started(evaluate=lambda t, x: {"w": x["w"]}),
        r"numbers by name, and 'w' is \[2\]",
    ),
    "evaluate of text": (
        lambda: started(evaluate=lambda t, x: {"w": "good"}),
        "numbers by name, and 'w' is a str",
    ),
    "by hand: a column": (
        lambda: by_hand(g=lambda t, x, b: (b["A"] @ x["w"]).sum()),
        "g asks for 'A', which is not there",
    ),
    "by hand: losses of rows": (
        lambda: by_hand(f=lambda t, x, b: b["a"] @ x["w"]),
        r"f must return one number",
    ),
    "by hand: no θ": (lambda: by_hand(g=f), "neither loss depends on θ"),
    "by hand: no_grad": (lambda: by_hand(g=no_gradient(g)), "neither loss depends on θ"),
}

ROWS = [
    pytest.param(wrong, message, id=f"{table}: {label}")
    for table, rows in {
        "Problem": PROBLEM,
        "Pipeline": PIPELINE,
        "hypergradient": HYPERGRADIENT,
        "losses": LOSSES,
    }.items()
    for label, (wrong, message) in rows.items()
]


@pytest.mark.parametrize(("wrong", "message"), ROWS)
def test_a_mistake_is_told_with_what_to_write(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrong()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"f": lambda t, x, b: x["w"].sum().log()},
            r"f is -inf before the first step\n  look at the start, and for log\(0\)",
        ),
        (
            {
                "g": lambda t, x, b: squares(t, x) * b["late"].sum(),
                "lower_data": {"late": [1.0] * 499 + [float("nan")]},
            },
            "g is nan before the first step; 'late' of the batch holds numbers that are not finite",
        ),
        (
            {"lower_data": {"a": A, "y": Y / 0}},
            "g is nan before the first step; 'y' of the batch holds numbers that are not",
        ),
    ],
)
def test_a_loss_that_is_no_number_at_the_start_ends_the_run_there(
    change: Any, message: str
) -> None:
    with pytest.raises(NumericalError, match=message):
        started(**change)


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
