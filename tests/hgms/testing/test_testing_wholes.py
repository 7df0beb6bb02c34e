"""The kit's checks of candidate generators, tasks and methods: a sound one passes them all, and a
mutant for each (asked in test_testing_mutants.py)."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

from hgms.testing import check_component, checks_of, tasks
from hgms.testing.check import target_of
from hgms.testing.generators import proposed
from hgms.testing.instances import instance_of
from hgms_core import (
    Candidates,
    Cost,
    Data,
    Key,
    Problem,
    Record,
    State,
    Tree,
    gradient,
    hypergradient,
    stack,
)
from hgms_core.registry import Registry

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

    def run(
        self, problem: Problem, theta: Tree, start: State, key: Key, i: int, graph: bool = False
    ) -> tuple[Tree, Tensor]:
        generator = key.fold(i).generator()
        noise = {
            name: torch.randn(leaf[i].shape, generator=generator, dtype=torch.float64)
            for name, leaf in start["x"].items()
        }
        x = {
            name: leaf[i] + (self.noise if i else 0.0) * noise[name].to(leaf)
            for name, leaf in start["x"].items()
        }
        index = problem.lower_data.draw(key.fold("batch", i), self.batch_size, self.steps)
        loss = torch.zeros(())
        for step in range(self.steps):
            batch = problem.lower_data.batch(None if index is None else index[step])
            if graph:
                leaves = {
                    name: leaf if leaf.requires_grad else leaf.requires_grad_()
                    for name, leaf in x.items()
                }
                loss = problem.g(theta, leaves, batch)
                grads = list(torch.autograd.grad(loss, list(leaves.values()), create_graph=True))
            else:
                grads, loss = gradient(problem.g, theta, x, batch)
            x = {
                name: leaf - self.lr * grad
                for (name, leaf), grad in zip(x.items(), grads, strict=True)
            }
        return x, loss

    def propose(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
        ends = [self.run(problem, theta, start, key, i) for i in range(self.count)]
        calls = self.count * self.steps
        cost = Cost(lower_gradients=calls, rows=calls * problem.lower_data.count(self.batch_size))
        replay = partial(self._replay, problem, start, key)
        return Candidates(
            x=stack([x for x, _ in ends]),
            losses=torch.stack([loss for _, loss in ends]),
            cost=cost,
            replay=replay,
        )

    def _replay(
        self, problem: Problem, start: State, key: Key, index: Tensor, theta: Tree, last: int | None
    ) -> tuple[Tree, Cost]:
        return self.again(problem, theta, start, key, index, last)

    def again(
        self, problem: Problem, theta: Tree, start: State, key: Key, index: Tensor, last: int | None
    ) -> tuple[Tree, Cost]:
        with torch.enable_grad():
            end, _ = self.run(problem, theta, start, key, int(index), graph=True)
        within = self.steps if any(leaf.requires_grad for leaf in theta.values()) else 0
        rows = problem.lower_data.count(self.batch_size) * (self.steps + 2 * within)
        return end, Cost(
            lower_gradients=self.steps, products=within, cross_products=within, rows=rows
        )

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        if self.carry_rule == "restart":
            return {"x": stack([problem.initial(key)] * self.count), "step": start["step"] + 1}
        x = (
            candidates.x
            if self.carry_rule == "per-branch"
            else stack([candidates.at(index)] * candidates.count)
        )
        return {"x": x, "step": start["step"] + 1}


class WrongAxis(Runs):
    def propose(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
        candidates = super().propose(problem, theta, start, key)
        return evolve(
            candidates, x={name: leaf.movedim(0, -1) for name, leaf in candidates.x.items()}
        )


class DrawsByRow(Runs):
    """Proposes by parts, each from its first candidate on."""

    def propose_some(
        self, problem: Problem, theta: Tree, start: State, key: Key, members: list[int]
    ) -> Candidates:
        some = evolve(self, count=len(members)).propose(problem, theta, start, key)
        return evolve(some, replay=partial(self._replay, problem, start, key))


class CostsAllOfThem(Runs):
    def propose_some(
        self, problem: Problem, theta: Tree, start: State, key: Key, members: list[int]
    ) -> Candidates:
        whole = self.propose(problem, theta, start, key)
        return evolve(whole, x={name: leaf[members] for name, leaf in whole.x.items()})


class CountsFromItsPart(Runs):
    """Its way back takes the row of a candidate in its part."""

    def propose_some(
        self, problem: Problem, theta: Tree, start: State, key: Key, members: list[int]
    ) -> Candidates:
        whole = self.propose(problem, theta, start, key)

        def replay(index: Tensor, elsewhere: Tree, last: int | None) -> tuple[Tree, Cost]:
            return self._replay(
                problem,
                start,
                key,
                torch.tensor(members[int(index) % len(members)]),
                elsewhere,
                last,
            )

        return evolve(
            whole, x={name: leaf[members] for name, leaf in whole.x.items()}, replay=replay
        )


class Ascends(Runs):
    def run(
        self, problem: Problem, theta: Tree, start: State, key: Key, i: int, graph: bool = False
    ) -> tuple[Tree, Tensor]:
        return Runs.run(evolve(Runs(), noise=0.0, lr=-0.01), problem, theta, start, key, i, graph)


class OtherDraws(Runs):
    def again(
        self, problem: Problem, theta: Tree, start: State, key: Key, index: Tensor, last: int | None
    ) -> tuple[Tree, Cost]:
        return super().again(problem, theta, start, key.fold("again"), index, last)


class HalfTheDerivative(Runs):
    """Lets only half of the derivative through."""

    def again(
        self, problem: Problem, theta: Tree, start: State, key: Key, index: Tensor, last: int | None
    ) -> tuple[Tree, Cost]:
        whole, cost = super().again(problem, theta, start, key, index, last)
        with torch.enable_grad():
            return {
                name: leaf.detach() + 0.5 * (leaf - leaf.detach()) for name, leaf in whole.items()
            }, cost


class FirstForSelected(Runs):
    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        return super().carry(start, candidates, torch.zeros_like(index), key, problem)


class StaysAtTheta(Runs):
    """Replays at the θ it proposed at, as a graph that is kept does."""

    def propose(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
        def replay(index: Tensor, elsewhere: Tree, last: int | None) -> tuple[Tree, Cost]:
            leaves = {
                name: leaf + (elsewhere[name] - elsewhere[name].detach())
                for name, leaf in theta.items()
            }
            return self.again(problem, leaves, start, key, index, last)

        return evolve(super().propose(problem, theta, start, key), replay=replay)


class SkipsSteps(Runs):
    """Runs only the steps that it differentiates."""

    def again(
        self, problem: Problem, theta: Tree, start: State, key: Key, index: Tensor, last: int | None
    ) -> tuple[Tree, Cost]:
        return Runs.again(
            evolve(self, steps=self.steps if last is None else last),
            problem,
            theta,
            start,
            key,
            index,
            None,
        )


def counted(share: float) -> Any:
    """A generator that declares a share of its cost."""

    class Declares(Runs):
        __doc__ = DOC

        def propose(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
            candidates = super().propose(problem, theta, start, key)
            return evolve(
                candidates,
                cost=Cost(
                    **{
                        name: int(share * count)
                        for name, count in candidates.cost.numbers().items()
                    }
                ),
            )

    return Declares()


class NoLosses(Runs):
    def propose(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
        candidates = super().propose(problem, theta, start, key)
        return evolve(candidates, losses=torch.zeros(candidates.count, dtype=torch.float64))


class OneKey(Runs):
    """Draws from a key of its own."""

    def run(
        self, problem: Problem, theta: Tree, start: State, key: Key, i: int, graph: bool = False
    ) -> tuple[Tree, Tensor]:
        return super().run(problem, theta, start, Key(0), i, graph)


@frozen(kw_only=True)
class NoRule:
    """Two runs of gradient descent with two rates; the next ones start where the second, the
    slower, came to.
    """

    __doc__ = DOC
    name: ClassVar[str] = "no-rule"
    rates: tuple[float, ...] = (0.2, 0.1)

    def init(self, problem: Problem, key: Key) -> State:
        return {"x": dict(problem.x0)}

    def propose(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
        grads, _ = gradient(problem.g, theta, start["x"], problem.lower_data.whole)
        moved = [
            {
                n: leaf - rate * grad
                for (n, leaf), grad in zip(start["x"].items(), grads, strict=True)
            }
            for rate in self.rates
        ]
        rows = problem.lower_data.count(None)
        return Candidates(x=stack(moved), cost=Cost(lower_gradients=1, rows=rows))

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        return {"x": candidates.at(index)}


class FirstForAny(NoRule):
    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        return {"x": candidates.at(0)}


class CarriesGenerator(Runs):
    """Carries a generator of random numbers along."""

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        return {
            **super().carry(start, candidates, index, key, problem),
            "generator": key.generator(),
        }


class OneForAllStacked(Runs):
    def propose(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
        candidates = super().propose(problem, theta, start, key)
        return (
            evolve(candidates, x={name: leaf + 0.1 for name, leaf in candidates.x.items()})
            if self.mode == "stacked"
            else candidates
        )


class Alike(Runs):
    """All runs are the noise-free one, which begins a little to the right."""

    def run(
        self, problem: Problem, theta: Tree, start: State, key: Key, i: int, graph: bool = False
    ) -> tuple[Tree, Tensor]:
        right = {"x": {name: leaf + 1e-3 for name, leaf in start["x"].items()}}
        return super().run(problem, theta, right, key, 0, graph)


@frozen(kw_only=True)
class Cold(Runs):
    """Has a temperature and forgets it: what it returns is the start, with noise."""

    temperature: float = 1.0

    def propose(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
        shape = (self.count, *problem.x0["x"].shape)
        return Candidates(
            x={"x": torch.randn(shape, generator=key.generator(), dtype=torch.float64)}
        )


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
            g=lambda theta, x, batch: (
                error(x, batch) + theta["penalty"].exp().sum() * x["x"].square().sum()
            ),
            f=lambda theta, x, batch: error(x, batch),
            lower_data=Data.of(self.table(seed, "train", dtype)),
            upper_data={
                role: Data.of(self.table(seed, role, dtype))
                for role in ("differentiate", "select", "stop")
            },
            evaluate=lambda theta, x: {"test_error": float(error(x, test))},
        )


def task(**changes: Any) -> Any:
    """The task with a problem that is changed on its way out."""

    class Changed(Line):
        __doc__ = DOC

        def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
            problem = super().problem(seed, device, dtype)
            return evolve(problem, **{name: change(problem) for name, change in changes.items()})

    return Changed()


class Online(Line):
    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        with socket.socket() as connection:
            connection.connect(("127.0.0.1", 9))
        return super().problem(seed, device, dtype)


class Seedless(Line):
    calls: ClassVar[list[int]] = []

    def table(self, seed: int, role: str, dtype: torch.dtype) -> Tree:
        self.calls.append(1)
        return super().table(len(self.calls), role, dtype)


class IgnoresSeed(Line):
    def table(self, seed: int, role: str, dtype: torch.dtype) -> Tree:
        return super().table(0, role, dtype)


@frozen(kw_only=True)
class Drawn(Line):
    """A line without noise through points on a grid: the same for every seed, because nothing is
    drawn.
    """

    __doc__ = DOC

    def table(self, seed: int, role: str, dtype: torch.dtype) -> Tree:
        shift = 0.1 * ["train", "differentiate", "select", "stop", "test"].index(role)
        a = torch.linspace(-1, 1, 3 * self.rows, dtype=torch.float64).reshape(self.rows, 3) + shift
        return {"a": a.to(dtype), "y": a.sum(1).to(dtype)}


class ReadsFile(Line):
    """Its rows depend on a file, of which no fingerprint is made."""

    def table(self, seed: int, role: str, dtype: torch.dtype) -> Tree:
        size = len((Path(__file__).parents[3] / "pyproject.toml").read_bytes())
        return {
            "a": super().table(seed, role, dtype)["a"],
            "y": torch.full((self.rows,), 1.0 * size, dtype=dtype),
        }


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
        theta = state["theta"]
        x = dict(state["x"])
        below = problem.lower_data.whole
        above = problem.upper_data["differentiate"].whole
        for _ in range(5):
            grads, _ = gradient(problem.g, theta, x, below)
            x = {
                name: leaf - 0.5 * grad for (name, leaf), grad in zip(x.items(), grads, strict=True)
            }
        estimate = hypergradient(
            lambda t, x: problem.f(t, x, above),
            lambda t, x: problem.g(t, x, below),
            theta,
            x,
            solver=lambda matvec, b: b,
        )
        theta = problem.project(
            {name: leaf - self.lr * estimate.value[name] for name, leaf in theta.items()}
        )
        calls = state["calls"] + 5 + estimate.cost.calls
        return {"theta": theta, "x": x, "calls": calls}, {
            "upper_loss": estimate.upper_loss,
            "oracle_calls": calls,
        }

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


class KeepsGraph(Walk):
    def result(self, state: State) -> tuple[Tree, Tree]:
        theta, x = super().result(state)
        return theta, {name: leaf.clone().requires_grad_() for name, leaf in x.items()}


class TrainsOnStop(Walk):
    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        seen = evolve(
            problem, upper_data={**problem.upper_data, "differentiate": problem.upper_data["stop"]}
        )
        return super().step(seen, state, progress)


class LooksAtStop(Walk):
    """Chooses its rate by rows that it does not say it needs."""

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        loss = float(problem.f(state["theta"], state["x"], problem.upper_data["stop"].whole))
        following, record = Walk.step(Walk(lr=0.2 + 0.01 * loss), problem, state, progress)
        calls = following["calls"] + 1
        return {**following, "calls": calls}, {**record, "oracle_calls": calls}


class Unprojected(Walk):
    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        return super().step(evolve(problem, project=lambda theta: theta), state, progress)


class Threefold(Walk):
    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        following, record = super().step(problem, state, progress)
        return following, {**record, "oracle_calls": 3 * record["oracle_calls"]}


class OwnBatch(Walk):
    """Best of 4 branches of one step, and the hypergradient of that step on the winner's own batch:
    of two equal sources the heavier one decides which branch wins, so its rows there look better
    than they are.
    """

    fresh: ClassVar[bool] = False

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        sources, data, (theta, x) = (
            problem.sources,
            problem.lower_data,
            (state["theta"], state["x"]),
        )
        if sources is None:
            return super().step(problem, state, progress)
        draws = data.draw(Key(state.get("seed", 0)).fold(state["calls"]), 16, 5)
        assert draws is not None
        weights = sources.weights(theta)
        above = problem.upper_data["differentiate"].whole
        gradients = []  # of each source on each batch
        for row in draws:
            leaf = x["x"].detach().requires_grad_()
            losses = sources.losses({"x": leaf}, data.batch(row))
            gradients.append(
                torch.stack(
                    [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in losses]
                )
            )
        ends = [{"x": x["x"] - 0.01 * weights @ slopes} for slopes in gradients[:4]]
        best = min(range(4), key=lambda i: float(problem.f(theta, ends[i], above)))
        (slope,), _ = gradient(problem.f, theta, ends[best], above)
        along = weights * (gradients[4 if self.fresh else best] @ slope)
        h = -(along - weights * along.sum())  # of F in the logits, up to a factor
        theta = {"logits": theta["logits"] - 0.1 * h.sign()}
        calls = state["calls"] + 15
        return {**state, "theta": theta, "x": ends[best], "calls": calls}, {"oracle_calls": calls}

    def init(self, problem: Problem, seed: int) -> State:
        return {**super().init(problem, seed), "seed": seed}


class FreshBatch(OwnBatch):
    __doc__ = DOC
    fresh: ClassVar[bool] = True


class FirstGains(OwnBatch):
    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        if problem.sources is None:
            return super().step(problem, state, progress)
        logits = state["theta"]["logits"] + torch.tensor([0.05, 0.0], dtype=torch.float64)
        return {**state, "theta": {"logits": logits}}, {"oracle_calls": 0}


class Heavier(Walk):
    """Pushes each weight away from the mean of all."""

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        following, record = super().step(problem, state, progress)
        theta = {
            name: leaf + 0.1 * (leaf - leaf.mean()) for name, leaf in following["theta"].items()
        }
        return {**following, "theta": theta}, record


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
        if not all(
            bool(leaf.isfinite().all()) for tree in self.result(following) for leaf in tree.values()
        ):
            raise ZeroDivisionError("the loss is gone")
        return following, record


MUTANTS: list[tuple[str, str, Any, str]] = [
    (
        "generator",
        "candidates",
        WrongAxis(count=2),
        "x has the shapes {'w': [3, 2], 'b': [2]}; they are",
    ),
    ("generator", "descends", Ascends(), "g began at"),
    ("generator", "parts", DrawsByRow(), "candidate 1 of propose_some(…, [1, 2]): "),
    ("generator", "parts", CostsAllOfThem(), "and all of them together"),
    (
        "generator",
        "parts",
        CountsFromItsPart(),
        "candidate 1 of propose_some(…, [1, 2]), replayed by its number: ",
    ),
    ("generator", "replay", OtherDraws(), "candidate 1 replayed: "),
    ("generator", "replay-gradient", HalfTheDerivative(), "differences give"),
    ("generator", "replay", StaysAtTheta(), "candidate 0 replayed at another θ: "),
    ("generator", "replay", SkipsSteps(), "candidate 2 replayed (last = 0): "),
    (
        "generator",
        "replay-gradient",
        StaysAtTheta(),
        "at another θ the derivative along a direction is",
    ),
    ("generator", "losses", NoLosses(), "losses are [0, 0, 0], and g had values from"),
    (
        "generator",
        "oracle-counts",
        counted(0.0),
        "g was called 15 times, with 15 backward passes; 0 calls are declared",
    ),
    (
        "generator",
        "oracle-counts",
        counted(0.25),
        "g was called 15 times, with 15 backward passes; 3 calls are declared",
    ),
    (
        "generator",
        "oracle-counts",
        counted(3.0),
        "g was called 15 times, with 15 backward passes; 45 calls are declared",
    ),
    ("generator", "key", OneKey(), "with two keys it draws the same"),
    (
        "generator",
        "carry",
        FirstForAny(),
        "candidate 1 was selected, and the next start holds 'w' of [0]",
    ),
    (
        "generator",
        "carry-rule",
        FirstForSelected(),
        "the rule is 'selected', and the next start does not hold that state",
    ),
    ("generator", "state", CarriesGenerator(), "(state.generator)"),
    ("generator", "chunks", OneForAllStacked(), "with {'mode': 'stacked'} instead of a loop"),
    ("generator", "wells", Alike(), "all went to one side"),
    ("generator", "moments", Cold(), "the variance is"),
    ("task", "smoke", Online(), "no network while a task is checked"),
    ("task", "seed", Seedless(), "built again, data."),
    ("task", "other-seed", IgnoresSeed(), "with two seeds it draws the same"),
    (
        "task",
        "coupling",
        task(g=lambda p: lambda theta, x, batch: p.f(theta, x, batch) + theta["penalty"].sum()),
        "∇_x g is the same at four different θ",
    ),
    (
        "task",
        "losses",
        task(f=lambda p: lambda theta, x, batch: p.f(theta, x, batch)[None]),
        "is no scalar",
    ),
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
    (
        "task",
        "metrics",
        task(evaluate=lambda p: lambda theta, x: {"test_error": math.nan}),
        "no finite numbers",
    ),
    (
        "every",
        "inputs",
        task(evaluate=lambda p: lambda theta, x: p.evaluate(theta, {"x": x["x"].add_(1.0)})),
        "after the call its input x.x is [1, 1, 1] instead of [0, 0, 0]",
    ),
    (
        "every",
        "inputs",
        task(evaluate=lambda p: lambda theta, x: {"test_error": float(theta["penalty"].exp_())}),
        "after the call its input theta.penalty is [1] instead of [0]",
    ),
    ("task", "files", ReadsFile(), "but made_of is missing or empty"),
    ("task", "splits", Leaks(), "12 of the 12 rows of 'lower' are among the 12 of 'select'"),
    (
        "task",
        "twice-differentiable",
        task(g=lambda p: lambda t, x, b: p.g(t, x, b) + x["x"].detach() @ x["x"]),
        "is off by",
    ),
    (
        "task",
        "stacked",
        task(g=lambda p: lambda t, x, b: p.g(t, x, b) * (1.0 + 0.0 * float(x["x"].sum()))),
        "it raised ConfigError",
    ),
    (
        "task",
        "projection",
        task(project=lambda p: lambda theta: {"penalty": theta["penalty"].clamp_min(0.5)}),
        "project moves θ0",
    ),
    (
        "task",
        "projection",
        task(project=lambda p: lambda theta: {"penalty": 0.5 * theta["penalty"]}),
        "projected twice",
    ),
    ("method", "result", Swapped(), "(θ, x) is"),
    ("method", "records", NoCalls(), "the record's oracle_calls are None"),
    (
        "method",
        "records",
        Nested(),
        "these entries of the record cannot be one column of a table: {'theta': 'dict'}",
    ),
    ("method", "records", CountsAnew(), "oracle_calls fell from"),
    ("method", "records", Threefold(), "times, with 27 backward passes; 81 calls are declared"),
    (
        "method",
        "roles",
        TrainsOnStop(),
        "3 backward passes went through f on rows of the role `stop`",
    ),
    ("method", "roles", LooksAtStop(), "with other rows of the role `stop` "),
    (
        "method",
        "projection",
        Unprojected(),
        "after step 1, where problem.project gives another, t is",
    ),
    (
        "method",
        "equal-sources",
        OwnBatch(),
        "the source that is heavier gets heavier, though both hold the same rows",
    ),
    ("method", "equal-sources", FirstGains(), "the source that comes first gains"),
    ("method", "equal-rows", Heavier(), "the copy that is heavier gets heavier"),
    ("method", "optimum", Away(), "the distance was"),
    ("method", "result", KeepsGraph(), "has a graph; write `.detach()`"),
    ("method", "resume", KeepsObjects(), "(state.history.0)"),
    ("method", "budget", OwnBudget(), "it raised RuntimeError: no more steps"),
    ("method", "failure", Swallows(), "it raised ZeroDivisionError: the loss is gone"),
]


@pytest.mark.parametrize(
    "sound",
    [
        Runs(),
        Runs(carry_rule="per-branch"),
        Runs(carry_rule="restart"),
        NoRule(),
        Line(),
        Drawn(),
        Walk(),
        FreshBatch(),
    ],
    ids=str,
)
def test_a_sound_component(sound: Any) -> None:
    assert check_component(sound) == {}


def test_a_task_that_takes_too_long_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "SECONDS", 0.0)
    (check,) = (item for item in checks_of(Line()) if item.name == "smoke")
    assert "make the settings that are checked smaller" in check.fault(Line())


def test_a_generator_that_cannot_be_replayed_may_say_so() -> None:
    class Refuses(Runs):
        __doc__ = DOC

        def propose(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
            return evolve(super().propose(problem, theta, start, key), replay=None)

    for check in checks_of(Refuses()):
        if check.name.startswith("replay"):
            check(Refuses())
    assert (
        proposed(Refuses(), Line().problem(0, torch.device("cpu"), torch.float64)).candidates.count
        == 3
    )


OWN_PARTS = '''
import attrs
from hgms_core import Composition, hookimpl

@attrs.frozen(kw_only=True)
class Signs:
    """Steps of one length."""
    name = "signs-of-mine"
    lr: float = 0.1
    def init(self, theta):
        return {}
    def step(self, theta, gradient, state, progress):
        return {name: leaf - self.lr * gradient[name].sign() for name, leaf in theta.items()}, state

class Unfinished:
    name = "unfinished"

MINE = Composition(name="mine-by-signs", summary="Mine.", source="mine", parts={
    "generator": {"name": "branches"}, "selector": {"name": "first"},
    "hypergradient": {"name": "unrolled"},
    "outer": {"name": "signs-of-mine", "lr": 0.2}})

@hookimpl
def hgms_register_outer_optimizers():
    return [Signs, Unfinished]

@hookimpl
def hgms_register_methods():
    return [MINE]
'''


@pytest.mark.parametrize("name", ["MINE", "mine-by-signs"])
def test_a_composition_of_a_file_has_that_files_parts(tmp_path: Path, name: str) -> None:
    """Whatever else is wrong in the file."""
    file = tmp_path / "mine.py"
    file.write_text(OWN_PARTS)
    installed = Registry.load()
    kind, target, registry = target_of(f"{file}:{name}", installed)
    assert kind.name == "method"
    assert instance_of(target, registry=registry).outer.lr == 0.2
    assert installed.find("outer", "signs-of-mine") is None
    named = Registry.load([str(write_whole(tmp_path))])
    assert target_of(f"{tmp_path / 'whole.py'}:{name}", named)[2] is named, "it is there already"


def write_whole(folder: Path) -> Path:
    file = folder / "whole.py"
    file.write_text(OWN_PARTS.replace("[Signs, Unfinished]", "[Signs]"))
    return file
