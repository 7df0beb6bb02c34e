"""Branches by optimisers and schedules of torch, and batches in parts: against the same written
by hand, and differences.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import (
    F64,
    KEY,
    assert_same,
    finite_differences,
    network_problem,
    normal,
    rejects,
)
from torch import Tensor
from torch.optim import SGD, lr_scheduler

from hgms.generators.branches import Branches, Trajectory
from hgms.hypergradients import Implicit, Unrolled
from hgms.outer import Adam
from hgms.runs import pack, unpack
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms.testing import Check, parametrize_with_checks
from hgms_core import Candidates, Data, Key, Pipeline, Problem, Tree

PROBLEM = network_problem()
THETA = PROBLEM.theta0
DATA = PROBLEM.lower_data
Build = Callable[[list[Tensor]], torch.optim.Optimizer]

EVERY: dict[str, Build] = {
    "RMSprop": lambda p: torch.optim.RMSprop(
        p, lr=0.01, momentum=0.5, centered=True, weight_decay=0.1
    ),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.05, weight_decay=0.1, decoupled_weight_decay=True),
    "Adagrad": lambda p: torch.optim.Adagrad(
        p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.01
    ),
    "SGD": lambda p: SGD(p, lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "damped": lambda p: SGD(p, lr=0.2, momentum=0.8, dampening=0.3, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.05, betas=(0.5, 0.8)),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=2.0),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.05),
}


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, params: list[Tensor]) -> torch.optim.Optimizer:
        return SGD(params, lr=0.1)


OTHERS: dict[str, Build] = {
    "unhashable": Unhashable(),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "groups": lambda p: SGD(
        [{"params": p[1:], "lr": 0.1}, {"params": p[:1]}], lr=0.3, momentum=0.5
    ),
    "class": torch.optim.RMSprop,
}


def rmsprop(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=0.05)


@pytest.mark.nightly
@parametrize_with_checks(
    [Branches(optimizer=rmsprop)], {"toml": "a function cannot be written into a file"}
)
def test_conformance(component: Any, check: Check) -> None:
    check(component)


def propose(
    branches: Branches, problem: Problem = PROBLEM, start: Any = None, key: Key = KEY
) -> Candidates:
    return branches.propose(problem, THETA, start or branches.init(problem, KEY), key)


def drawn(branches: Branches, member: int, key: Key = KEY) -> list[Tree]:
    index = DATA.draw(key.fold("batches", member), branches.batch_size, branches.steps)
    return [DATA.batch(None if index is None else index[step]) for step in range(branches.steps)]


class ByHand:
    """The branch as anybody would write it."""

    def __init__(
        self,
        build: Build,
        schedule: Any = None,
        start: Tree = PROBLEM.x0,
        clip: float | None = None,
    ) -> None:
        self.leaves = {name: leaf.clone().requires_grad_() for name, leaf in start.items()}
        self.optimizer = build(list(self.leaves.values()))
        self.clip = clip
        self.schedule = schedule and schedule(self.optimizer)

    def run(self, batches: list[Tree]) -> Tree:
        for batch in batches:
            self.optimizer.zero_grad()
            PROBLEM.g(THETA, self.leaves, batch).backward()
            if self.clip is not None:
                grads = [leaf.grad for leaf in self.leaves.values() if leaf.grad is not None]
                scale = self.clip / torch.cat(
                    [grad.reshape(-1) for grad in grads]
                ).norm().clamp_min(self.clip)
                torch._foreach_mul_(grads, float(scale))
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
        return {name: leaf.detach().clone() for name, leaf in self.leaves.items()}


@pytest.mark.parametrize("name", [*EVERY, *OTHERS])
@pytest.mark.parametrize("mode", ["stacked", "loop"])
def test_each_branch_is_the_optimiser_by_hand_over_outer_steps(name: str, mode: Any) -> None:
    build = {**EVERY, **OTHERS}[name]
    branches = Branches(
        count=2, steps=3, optimizer=build, batch_size=5, mode=mode, carry_rule="per-branch"
    )
    hands = [ByHand(build), ByHand(build)]
    start = None
    for step in range(2):
        candidates = propose(branches, start=start, key=KEY.fold(step))
        for i, hand in enumerate(hands):
            assert_same(
                candidates.at(i),
                hand.run(drawn(branches, i, KEY.fold(step))),
                rtol=1e-11,
                atol=1e-13,
            )
        state = start or branches.init(PROBLEM, KEY)
        start = branches.carry(state, candidates, torch.tensor(1), KEY, PROBLEM)
        structure, tensors = pack(start)
        start = unpack(json.loads(json.dumps(structure)), tensors)
    assert candidates.cost.lower_gradients == 6


def test_spreads_clipping_and_the_winners_memory() -> None:
    build: Build = lambda p: torch.optim.RMSprop(p, lr=0.02, weight_decay=0.1)  # noqa: E731
    branches = Branches(
        count=3,
        steps=3,
        optimizer=build,
        batch_size=5,
        lr_spread=(0.25, 4.0),
        decay_spread=(0.5, 2.0),
        clip=0.2,
        moments="carry",
    )
    candidates = propose(branches)
    hands = [
        ByHand(
            lambda p, r=rate, d=decay: torch.optim.RMSprop(p, lr=0.02 * r, weight_decay=0.1 * d),
            clip=0.2,
        )  # type: ignore[misc]
        for rate, decay in ((0.25, 0.5), (1.0, 1.0), (4.0, 2.0))
    ]
    for i, hand in enumerate(hands):
        assert_same(candidates.at(i), hand.run(drawn(branches, i)), rtol=1e-11, atol=1e-13)
    start = branches.carry(branches.init(PROBLEM, KEY), candidates, torch.tensor(2), KEY, PROBLEM)
    for name, memory in start["moments"].items():
        leaf, entry, _ = name.split("|")
        expected = hands[2].optimizer.state[hands[2].leaves[leaf]][entry]
        assert_same(memory[0], expected.to(F64), rtol=1e-11, atol=1e-13)
    fresh = evolve(branches, moments="fresh").carry(
        branches.init(PROBLEM, KEY), candidates, torch.tensor(2), KEY, PROBLEM
    )
    assert (fresh["moments"], fresh["optimizer_steps"]) == ({}, 0)


SCHEDULES: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.MultiStepLR(o, [2, 3])], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_torch_go_on_over_outer_steps(name: str) -> None:
    build: Build = lambda p: SGD(p, lr=0.1, momentum=0.5)  # noqa: E731
    branches = Branches(count=1, steps=3, optimizer=build, schedule=SCHEDULES[name], batch_size=5)
    hand = ByHand(build, SCHEDULES[name])
    start = branches.init(PROBLEM, KEY)
    for step in range(2):
        candidates = branches.propose(PROBLEM, THETA, start, KEY.fold(step))
        assert_same(
            candidates.at(0), hand.run(drawn(branches, 0, KEY.fold(step))), rtol=1e-11, atol=1e-13
        )
        replayed, _ = (
            candidates.replay(torch.tensor(0), THETA, None) if candidates.replay else ({}, None)
        )
        assert_same(replayed, candidates.at(0))
        start = branches.carry(start, candidates, torch.tensor(0), KEY, PROBLEM)


def test_a_schedule_of_torch_for_our_own_rules() -> None:
    schedule = SCHEDULES["StepLR"]
    ours = Branches(count=1, steps=5, lr=0.3, momentum=0.5, batch_size=5, schedule=schedule)
    hand = ByHand(lambda p: SGD(p, lr=0.3, momentum=0.5), schedule)
    assert_same(propose(ours).at(0), hand.run(drawn(ours, 0)), rtol=1e-11, atol=1e-13)


def bent(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    """Its third entry of x has no gradient at all."""
    inner = (x["x"][:2] - theta["t"] ** 2).pow(2).sum() + 0.1 * x["x"][:2].pow(4).sum()
    return inner + 0.3 * theta["t"][0] * x["x"][0] * x["x"][1]


BENT = Problem(
    theta0={"t": torch.tensor([0.7, -0.4], dtype=F64)},
    x0={"x": torch.tensor([0.5, 0.2, 1.0], dtype=F64)},
    g=bent,
    f=lambda theta, x, _: (x["x"] - 1).pow(2).sum(),
)


@pytest.mark.parametrize("last", [None, 2])
@pytest.mark.parametrize("name", EVERY)
def test_the_way_back_against_differences(name: str, last: int | None) -> None:
    """Also where a coordinate never had a gradient, so that a root has no slope there; and through
    the last steps alone, whose start then stands still."""
    branches = Branches(count=1, steps=4, optimizer=EVERY[name])
    candidates = branches.propose(BENT, BENT.theta0, branches.init(BENT, KEY), KEY)
    assert candidates.replay is not None

    def value(end: Tree) -> Tensor:
        return (end["x"] * torch.tensor([1.0, 2.0, 3.0], dtype=F64)).sum() + end["x"].pow(2).sum()

    theta = {"t": BENT.theta0["t"].clone().requires_grad_()}
    end, cost = candidates.replay(torch.tensor(0), theta, last)
    assert_same({name: leaf.detach() for name, leaf in end.items()}, candidates.at(0))
    gradient = torch.autograd.grad(value(end), theta["t"])[0]
    assert (cost.lower_gradients, cost.products) == (4, 4 if last is None else 2)

    def differences(begin: Any, steps: int) -> Tensor:
        def run(at: Tree) -> Tensor:
            tail = evolve(branches, steps=steps)
            return value(tail.propose(BENT, at, begin, KEY).at(0))

        return finite_differences(run, BENT.theta0)["t"]

    start = branches.init(BENT, KEY)
    if last is not None:
        first = evolve(branches, steps=2)
        start = first.carry(
            start, first.propose(BENT, BENT.theta0, start, KEY), torch.tensor(0), KEY, BENT
        )
    torch.testing.assert_close(
        gradient, differences(start, 4 if last is None else 2), rtol=2e-6, atol=1e-7
    )


@pytest.mark.parametrize("keep_graph", [False, True])
def test_the_iterates_of_a_trajectory(keep_graph: bool) -> None:
    trajectory = Trajectory(
        steps=5, every=2, optimizer=EVERY["NAdam"], batch_size=5, keep_graph=keep_graph
    )
    start = trajectory.init(PROBLEM, KEY)
    before = {name: leaf.clone() for name, leaf in start["x"].items()}
    candidates = trajectory.propose(PROBLEM, THETA, start, KEY)
    hand = ByHand(EVERY["NAdam"])
    rows = DATA.draw(KEY.fold("batches"), 5, 5)
    assert rows is not None
    assert candidates.replay is not None
    for row, steps in enumerate(([0, 1], [2, 3], [4])):
        assert_same(
            candidates.at(row),
            hand.run([DATA.batch(rows[step]) for step in steps]),
            rtol=1e-11,
            atol=1e-13,
        )
        assert_same(
            candidates.replay(torch.tensor(row), THETA, None)[0],
            candidates.at(row),
            rtol=1e-11,
            atol=1e-13,
        )
    assert (candidates.cost.lower_gradients, start["x"].keys()) == (5, before.keys())
    assert_same(start["x"], before)

    def value(theta: Tree) -> Tensor:
        assert candidates.replay is not None
        return torch.stack(
            [
                leaf.pow(2).sum()
                for leaf in candidates.replay(torch.tensor(1), theta, None)[0].values()
            ]
        ).sum()

    theta = {name: leaf.clone().requires_grad_() for name, leaf in THETA.items()}
    gradient = dict(
        zip(theta, torch.autograd.grad(value(theta), list(theta.values())), strict=True)
    )
    assert_same(
        gradient, finite_differences(lambda at: value(at).detach(), THETA), rtol=1e-6, atol=1e-8
    )


def test_an_unrolled_pipeline_with_and_without_the_kept_graph_and_resumed() -> None:
    def method(keep_graph: bool) -> Pipeline:
        return Pipeline(
            generator=Branches(
                count=1,
                steps=3,
                optimizer=EVERY["RMSprop"],
                schedule=SCHEDULES["StepLR"],
                batch_size=5,
                keep_graph=keep_graph,
            ),
            selector=BestOfN(),
            hypergradient=Unrolled(),
            outer=Adam(lr=0.1),
        )

    states = []
    for keep_graph in (False, True, False):
        pipeline = method(keep_graph)
        state = method(keep_graph).init(PROBLEM, seed=0)
        for _ in range(3):
            state, _ = pipeline.step(PROBLEM, state)
            # the third one goes on from what was written, on a problem that is made again
            if len(states) == 2:
                structure, tensors = pack(state)
                state = unpack(json.loads(json.dumps(structure)), tensors)
                pipeline = method(keep_graph)
        states.append(state)
    assert_same(states[0]["theta"], states[1]["theta"], rtol=1e-10, atol=1e-12)
    assert_same(
        [states[0][key] for key in ("theta", "x")], [states[2][key] for key in ("theta", "x")]
    )
    assert_same(states[0]["start"]["moments"], states[2]["start"]["moments"])


def test_lbfgs_solves_each_branch_and_counts_its_gradients() -> None:
    def build(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, max_iter=5, line_search_fn="strong_wolfe")

    branches = Branches(
        count=2, steps=2, optimizer=build, moments="fresh", noise=0.1, noise_scale="absolute"
    )
    candidates = propose(branches)
    calls = 0
    hand = ByHand(build)
    for _ in range(2):

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            hand.optimizer.zero_grad()
            loss = PROBLEM.g(THETA, hand.leaves, DATA.whole)
            loss.backward()
            return loss

        hand.optimizer.step(closure)  # type: ignore[arg-type]
    assert_same(
        candidates.at(0),
        {name: leaf.detach() for name, leaf in hand.leaves.items()},
        rtol=1e-11,
        atol=1e-13,
    )
    single = propose(evolve(branches, count=1, moments="carry"))
    assert single.cost.lower_gradients == calls
    assert candidates.cost.lower_gradients > calls
    state = evolve(branches, count=1).carry(
        branches.init(PROBLEM, KEY), single, torch.tensor(0), KEY, PROBLEM
    )
    again = evolve(branches, count=1, moments="carry").propose(
        PROBLEM, THETA, {**state, "moments": single.aux}, KEY
    )
    hand.optimizer.step(closure)  # type: ignore[arg-type]
    hand.optimizer.step(closure)  # type: ignore[arg-type]
    assert_same(
        again.at(0),
        {name: leaf.detach() for name, leaf in hand.leaves.items()},
        rtol=1e-11,
        atol=1e-13,
    )
    assert single.replay is not None
    assert_same(single.replay(torch.tensor(0), THETA, None)[0], single.at(0))


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.5}, {"optimizer": EVERY["RMSprop"]}, {"clip": 0.1}]
)
@pytest.mark.parametrize("batch_size", [7, None])
@pytest.mark.parametrize("mode", ["stacked", "loop"])
def test_batches_in_parts_are_the_whole_batch(
    options: Any, batch_size: int | None, mode: Any
) -> None:
    whole = Branches(
        count=2, steps=3, batch_size=batch_size, mode=mode, whole_batch_noise=0.1, **options
    )
    parts = evolve(whole, accumulate=3)
    plain = propose(whole)
    parted = propose(parts)
    assert_same(parted.x, plain.x, rtol=1e-11, atol=1e-13)
    assert_same(parted.losses, plain.losses, rtol=1e-11)
    assert parted.cost.lower_gradients == 3 * plain.cost.lower_gradients
    assert parted.cost.rows == plain.cost.rows
    gradients = []
    for candidates in (plain, parted):
        theta = {name: leaf.clone().requires_grad_() for name, leaf in THETA.items()}
        assert candidates.replay is not None
        end, cost = candidates.replay(torch.tensor(1), theta, None)
        gradients.append(
            torch.autograd.grad(
                sum(leaf.pow(2).sum() for leaf in end.values()), list(theta.values())
            )
        )
    assert cost.lower_gradients == 9
    assert_same(list(gradients[1]), list(gradients[0]), rtol=1e-9, atol=1e-12)


def test_a_loss_without_data_and_parts_that_are_more_than_the_rows() -> None:
    branches = Branches(count=1, steps=2, lr=0.1, accumulate=4)
    candidates = branches.propose(BENT, BENT.theta0, branches.init(BENT, KEY), KEY)
    plain = evolve(branches, accumulate=1).propose(BENT, BENT.theta0, branches.init(BENT, KEY), KEY)
    assert_same(candidates.x, plain.x)
    assert candidates.cost.lower_gradients == 2
    assert (
        propose(Branches(count=1, steps=2, batch_size=3, accumulate=10)).cost.lower_gradients == 6
    )


def test_what_is_not_compiled_has_the_numbers_of_a_plain_run() -> None:
    from hgms.compiled import Programs

    for options in ({"optimizer": EVERY["RMSprop"]}, {"accumulate": 2, "lr": 0.1}):
        branches = Branches(count=2, steps=3, batch_size=5, **options)
        assert_same(propose(branches, evolve(PROBLEM, compiler=Programs())).x, propose(branches).x)


@pytest.mark.parametrize(
    ("options", "code", "field", "shown"),
    [
        (
            {"optimizer": lambda p: torch.optim.RMSprop(p), "lr": 0.5},
            "conflicting-options",
            "lr",
            "(params, lr=…)",
        ),
        ({"optimizer": lambda p: None}, "wrong-result", "optimizer", "NoneType"),
        (
            {"optimizer": lambda p: SGD([torch.zeros(1)])},
            "wrong-result",
            "optimizer",
            "other parameters",
        ),
        ({"optimizer": lambda p: SGD(p, rate=1)}, "wrong-value", "optimizer", "'rate'"),
        ({"schedule": lambda o: 3}, "wrong-result", "schedule", "int"),
        (
            {"schedule": lambda o: lr_scheduler.ReduceLROnPlateau(o)},
            "not-supported",
            "schedule",
            "StepLR",
        ),
        ({"schedule": lambda: 3}, "wrong-value", "schedule", "TypeError"),
        (
            {"optimizer": SGD([torch.zeros(1)], lr=0.1)},
            "wrong-type",
            "optimizer",
            "lambda params: SGD(params",
        ),
        (
            {"schedule": lr_scheduler.StepLR(SGD([torch.zeros(1)]), 3)},
            "wrong-type",
            "schedule",
            "lambda optimizer: StepLR(optimizer, …)",
        ),
        ({"optimizer": "RMSprop"}, "unknown-choice", "optimizer", "adamw, sgd"),
    ],
)
def test_what_is_refused(options: Any, code: str, field: str, shown: str) -> None:
    with rejects(code, field) as caught:
        propose(Branches(count=1, steps=2, **options))
    assert shown in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS"])
def test_the_way_back_is_refused_where_torch_has_none(name: str) -> None:
    branches = Branches(count=1, steps=2, optimizer=getattr(torch.optim, name))
    pipeline = Pipeline(
        generator=branches, selector=BestOfN(), hypergradient=Unrolled(), outer=Adam()
    )
    with rejects("not-supported", "generator", "optimizer") as caught:
        pipeline.step(PROBLEM, pipeline.init(PROBLEM, seed=0))
    assert name in caught.value.message
    other = evolve(pipeline, hypergradient=Implicit(solver=CG(ridge=1.0)))
    other.step(PROBLEM, other.init(PROBLEM, seed=0))


def test_memories_of_other_sizes_cannot_be_selected() -> None:
    branches = Branches(
        count=2, steps=1, optimizer=lambda p: torch.optim.LBFGS(p, max_iter=3), noise=0.5
    )
    data = Data.none()
    problem = Problem(
        theta0=BENT.theta0,
        x0=BENT.x0,
        f=BENT.f,
        lower_data=data,
        g=lambda theta, x, _: (x["x"] - normal(3)).abs().clamp_min(1e-3).sqrt().sum(),
    )
    with rejects("not-supported", "generator", "moments"):
        branches.propose(problem, problem.theta0, branches.init(problem, KEY), KEY)
