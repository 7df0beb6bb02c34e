"""The kit's checks of candidate generators, tasks and methods: a sound one passes them all, and a mutant for each (asked
in test_testing_mutants.py)."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

from hgms_core import Candidates, ConfigError, Cost, Data, Key, Problem, Record, State, Tree, gradient, hypergradient, stack
from hgms_core.testing import check_component, checks_of, tasks
from hgms_core.testing.generators import proposed

DOC = """A small sound component to break in many ways.

    >>> 1 + 1
    2

    Source: this test.
    """


@frozen(kw_only=True)
class Runs:
    """N runs of noisy gradient descent."""

    __doc__ = DOC
    name: ClassVar[str] = "runs"
    count: int = 3
    steps: int = 5
    lr: float = 0.1
    noise: float = 0.5
    batch_size: int | None = None
    mode: str = "loop"
    chunk: int | None = None
    carry_rule: Literal["selected", "per-branch", "restart"] = "selected"

    def init(self, problem: Problem, key: Key) -> State:
        return {"x": stack([problem.x0] * self.count), "step": 0}

    def run(self, problem: Problem, theta: Tree, start: State, key: Key, i: int, graph: bool = False) -> tuple[Tree, Tensor]:
        generator = key.fold(i).generator()
        noise = {
            name: torch.randn(leaf[i].shape, generator=generator, dtype=torch.float64) for name, leaf in start["x"].items()
        }
        x = {name: leaf[i] + (self.noise if i else 0.0) * noise[name].to(leaf) for name, leaf in start["x"].items()}
        index = problem.lower_data.draw(key.fold("batch", i), self.batch_size, self.steps)
        loss = torch.zeros(())
        for step in range(self.steps):
            batch = problem.lower_data.batch(None if index is None else index[step])
            if graph:
                leaves = {name: leaf if leaf.requires_grad else leaf.requires_grad_() for name, leaf in x.items()}
                loss = problem.g(theta, leaves, batch)
                grads = list(torch.autograd.grad(loss, list(leaves.values()), create_graph=True))
            else:
                grads, loss = gradient(problem.g, theta, x, batch)
            x = {name: leaf - self.lr * grad for (name, leaf), grad in zip(x.items(), grads, strict=True)}
        return x, loss

    def propose(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
        ends = [self.run(problem, theta, start, key, i) for i in range(self.count)]
        cost = Cost(lower_gradients=self.count * self.steps)
        return Candidates(x=stack([x for x, _ in ends]), losses=torch.stack([loss for _, loss in ends]), cost=cost)

    def replay(
        self, problem: Problem, theta: Tree, start: State, key: Key, index: Tensor, last: int | None
    ) -> tuple[Tree, Cost]:
        with torch.enable_grad():
            return self.run(problem, theta, start, key, int(index), graph=True)[0], Cost(lower_gradients=self.steps)

    def carry(self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem) -> State:
        if self.carry_rule == "restart":
            return {"x": stack([problem.initial(key)] * self.count), "step": start["step"] + 1}
        x = candidates.x if self.carry_rule == "per-branch" else stack([candidates.at(index)] * candidates.count)
        return {"x": x, "step": start["step"] + 1}


class WrongAxis(Runs):
    def propose(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
        found = super().propose(problem, theta, start, key)
        return evolve(found, x={name: leaf.movedim(0, -1) for name, leaf in found.x.items()})


class Ascends(Runs):
    def run(self, problem: Problem, theta: Tree, start: State, key: Key, i: int, graph: bool = False) -> tuple[Tree, Tensor]:
        return Runs.run(evolve(Runs(), noise=0.0, lr=-0.01), problem, theta, start, key, i, graph)


class OtherDraws(Runs):
    def replay(
        self, problem: Problem, theta: Tree, start: State, key: Key, index: Tensor, last: int | None
    ) -> tuple[Tree, Cost]:
        return super().replay(problem, theta, start, key.fold("again"), index, last)


class HalfTheDerivative(Runs):
    """Lets only half of the derivative through."""

    def replay(
        self, problem: Problem, theta: Tree, start: State, key: Key, index: Tensor, last: int | None
    ) -> tuple[Tree, Cost]:
        whole, cost = super().replay(problem, theta, start, key, index, last)
        with torch.enable_grad():
            return {name: leaf.detach() + 0.5 * (leaf - leaf.detach()) for name, leaf in whole.items()}, cost


class FirstForSelected(Runs):
    def carry(self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem) -> State:
        return super().carry(start, candidates, torch.zeros_like(index), key, problem)


class CarriesGenerator(Runs):
    """Carries a generator of random numbers along."""

    def carry(self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem) -> State:
        return {**super().carry(start, candidates, index, key, problem), "generator": key.generator()}


class OneForAllStacked(Runs):
    def propose(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
        found = super().propose(problem, theta, start, key)
        return evolve(found, x={name: leaf + 0.1 for name, leaf in found.x.items()}) if self.mode == "stacked" else found


class Alike(Runs):
    """All runs are the noise-free one, which begins a little to the right."""

    def run(self, problem: Problem, theta: Tree, start: State, key: Key, i: int, graph: bool = False) -> tuple[Tree, Tensor]:
        right = {"x": {name: leaf + 1e-3 for name, leaf in start["x"].items()}}
        return super().run(problem, theta, right, key, 0, graph)


@frozen(kw_only=True)
class Cold(Runs):
    """Has a temperature and forgets it: what it returns is the start, with noise."""

    temperature: float = 1.0

    def propose(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
        shape = (self.count, *problem.x0["x"].shape)
        return Candidates(x={"x": torch.randn(shape, generator=key.generator(), dtype=torch.float64)})


@frozen(kw_only=True)
class Line:
    """A line through noisy points."""

    __doc__ = DOC
    name: ClassVar[str] = "line"
    version: ClassVar[str] = "1"
    metrics: ClassVar[Mapping[str, bool]] = {"test_error": False}
    rows: int = 12

    def table(self, seed: int, role: str, dtype: torch.dtype) -> Tree:
        generator = Key(seed).fold("line", role).generator()
        a = torch.randn(self.rows, 3, generator=generator, dtype=torch.float64)
        y = a.sum(1) + 0.1 * torch.randn(self.rows, generator=generator, dtype=torch.float64)
        return {"a": a.to(dtype), "y": y.to(dtype)}

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        def error(x: Tree, batch: Tree) -> Tensor:
            return (batch["a"] @ x["x"] - batch["y"]).square().mean()

        test = self.table(seed, "test", dtype)
        return Problem(
            theta0={"penalty": torch.zeros(1, dtype=dtype)},
            x0={"x": torch.zeros(3, dtype=dtype)},
            g=lambda theta, x, batch: error(x, batch) + theta["penalty"].exp().sum() * x["x"].square().sum(),
            f=lambda theta, x, batch: error(x, batch),
            lower_data=Data.of(self.table(seed, "train", dtype)),
            upper_data={role: Data.of(self.table(seed, role, dtype)) for role in ("differentiate", "select", "stop")},
            evaluate=lambda theta, x: {"test_error": float(error(x, test))},
        )


def task(**changes: Any) -> Any:
    """The task with a problem that is changed on its way out."""

    class Changed(Line):
        __doc__ = DOC

        def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
            made = super().problem(seed, device, dtype)
            return evolve(made, **{name: change(made) for name, change in changes.items()})

    return Changed()


class Online(Line):
    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        with socket.socket() as one:
            one.connect(("127.0.0.1", 9))
        return super().problem(seed, device, dtype)


class Seedless(Line):
    calls: ClassVar[list[int]] = []

    def table(self, seed: int, role: str, dtype: torch.dtype) -> Tree:
        self.calls.append(1)
        return super().table(len(self.calls), role, dtype)


class Leaks(Line):
    """Validates on rows it trains on."""

    def table(self, seed: int, role: str, dtype: torch.dtype) -> Tree:
        return super().table(seed, "train" if role == "select" else role, dtype)


@frozen(kw_only=True)
class Walk:
    """A few gradient steps on x, then one on θ along the implicit hypergradient with H = I."""

    __doc__ = DOC
    name: ClassVar[str] = "walk"
    lr: float = 0.2

    def init(self, problem: Problem, seed: int) -> State:
        return {"theta": dict(problem.theta0), "x": dict(problem.x0), "calls": 0}

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        theta, x = state["theta"], dict(state["x"])
        below, above = problem.lower_data.whole, problem.upper_data["differentiate"].whole
        for _ in range(5):
            grads, _ = gradient(problem.g, theta, x, below)
            x = {name: leaf - 0.5 * grad for (name, leaf), grad in zip(x.items(), grads, strict=True)}
        found = hypergradient(
            lambda t, x: problem.f(t, x, above), lambda t, x: problem.g(t, x, below), theta, x, solver=lambda matvec, b: b
        )
        theta = {name: leaf - self.lr * found.value[name] for name, leaf in theta.items()}
        calls = state["calls"] + 5 + found.cost.calls
        return {"theta": theta, "x": x, "calls": calls}, {"upper_loss": found.upper_loss, "oracle_calls": calls}

    def result(self, state: State) -> tuple[Tree, Tree]:
        return state["theta"], state["x"]


class Swapped(Walk):
    def result(self, state: State) -> tuple[Tree, Tree]:
        return state["x"], state["theta"]


class NoCalls(Walk):
    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        state, record = super().step(problem, state, progress)
        return state, {"upper_loss": record["upper_loss"]}


class Nested(Walk):
    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        state, record = super().step(problem, state, progress)
        return state, {**record, "theta": state["theta"]}


class Away(Walk):
    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        return Walk.step(Walk(lr=-0.2), problem, state, progress)


class KeepsObjects(Walk):
    """Its state holds what no file does."""

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        following, record = super().step(problem, state, progress)
        return {**following, "history": [*state.get("history", ()), object()]}, record


class CountsAnew(Walk):
    """Starts counting anew."""

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        following, record = super().step(problem, state, progress)
        return following, {**record, "oracle_calls": record["oracle_calls"] % 17}


class OwnBudget(Walk):
    """Raises when it thinks it is done."""

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        if state["calls"] > 10:
            raise RuntimeError("no more steps")
        return super().step(problem, state, progress)


class Swallows(Walk):
    """Raises an error of its own where the losses break down."""

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        following, record = super().step(problem, state, progress)
        if not math.isfinite(float(record["upper_loss"])):
            raise ZeroDivisionError("the loss is gone")
        return following, record


MUTANTS: list[tuple[str, str, Any, str]] = [
    ("generator", "candidates", WrongAxis(count=2), "x has the shapes {'w': [3, 2], 'b': [2]}; they are"),
    ("generator", "descends", Ascends(), "g began at"),
    ("generator", "replay", OtherDraws(), "candidate 1 replayed: "),
    ("generator", "replay-gradient", HalfTheDerivative(), "differences give"),
    ("generator", "carry-rule", FirstForSelected(), "the rule is 'selected', and the next start does not hold that state"),
    ("generator", "state", CarriesGenerator(), "state holds a Generator at 'generator'"),
    ("generator", "chunks", OneForAllStacked(), "with {'mode': 'stacked'} instead of a loop"),
    ("generator", "wells", Alike(), "all went to one side"),
    ("generator", "moments", Cold(), "the variance is"),
    ("task", "smoke", Online(), "no network while a task is checked"),
    ("task", "seed", Seedless(), "built again, data."),
    ("task", "losses", task(f=lambda p: lambda theta, x, batch: p.f(theta, x, batch)[None]), "is no scalar"),
    (
        "task",
        "losses",
        task(upper_data=lambda p: {"differentiate": p.lower_data}),
        "no validation rows for the roles ['select', 'stop']",
    ),
    (
        "task",
        "metrics",
        task(evaluate=lambda p: lambda theta, x: {"test_eror": 0.0}),
        "evaluate gives ['test_eror'], declared are",
    ),
    ("task", "metrics", task(evaluate=lambda p: lambda theta, x: {"test_error": math.nan}), "no finite numbers"),
    ("task", "splits", Leaks(), "12 of the 12 rows of 'lower' are among the 12 of 'select'"),
    ("task", "twice-differentiable", task(g=lambda p: lambda t, x, b: p.g(t, x, b) + x["x"].detach() @ x["x"]), "is off by"),
    (
        "task",
        "stacked",
        task(g=lambda p: lambda t, x, b: p.g(t, x, b) * (1.0 + 0.0 * float(x["x"].sum()))),
        "it raised RuntimeError",
    ),
    (
        "task",
        "projection",
        task(project=lambda p: lambda theta: {"penalty": theta["penalty"].clamp_min(0.5)}),
        "project moves θ0",
    ),
    ("task", "projection", task(project=lambda p: lambda theta: {"penalty": 0.5 * theta["penalty"]}), "projected twice"),
    ("method", "result", Swapped(), "(θ, x) is"),
    ("method", "records", NoCalls(), "the record's oracle_calls are None"),
    ("method", "records", Nested(), "these entries of the record cannot be one column of a table: {'theta': 'dict'}"),
    ("method", "records", CountsAnew(), "oracle_calls fell from"),
    ("method", "optimum", Away(), "the distance was"),
    ("method", "resume", KeepsObjects(), "state holds a object at 'history/0'"),
    ("method", "budget", OwnBudget(), "it raised RuntimeError: no more steps"),
    ("method", "failure", Swallows(), "it raised ZeroDivisionError: the loss is gone"),
]


@pytest.mark.parametrize("sound", [Runs(), Runs(carry_rule="per-branch"), Runs(carry_rule="restart"), Line(), Walk()], ids=str)
def test_a_sound_component(sound: Any) -> None:
    assert check_component(sound) == {}


def test_a_task_that_takes_too_long_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "SECONDS", 0.0)
    (check,) = (each for each in checks_of(Line()) if each.name == "smoke")
    assert "make the settings that are checked smaller" in check.fault(Line())


def test_a_generator_that_cannot_be_replayed_may_say_so() -> None:
    class Refuses(Runs):
        __doc__ = DOC

        def replay(self, *_: Any) -> Any:
            raise ConfigError("no trajectory to differentiate; use implicit")

    for check in checks_of(Refuses()):
        if check.name.startswith("replay"):
            check(Refuses())
    assert proposed(Refuses(), Line().problem(0, torch.device("cpu"), torch.float64)).count == 3
