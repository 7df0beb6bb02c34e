"""Branches by optimisers and schedules of torch, and batches in parts: against the same written
by hand, and differences.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from attrs import evolve
from support.branch_steps import PROBLEM, THETA, Build, ByHand, drawn, propose
from support.helpers import F64, KEY, assert_same, finite_differences, normal, rejects
from torch import Tensor
from torch.optim import LBFGS, SGD, Adam, AdamW, NAdam, RMSprop, lr_scheduler

from hgms.compiled import Programs
from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit, Unrolled
from hgms.outer import Adam as OuterAdam
from hgms.runs import pack, unpack
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms.testing import Check, parametrize_with_checks
from hgms_core import Pipeline, Problem, Tree

CLOSE = {"rtol": 1e-11, "atol": 1e-13}
EVERY: dict[str, Build] = {
    "RMSprop": lambda p: RMSprop(p, lr=0.01, momentum=0.5, centered=True, weight_decay=0.1),
    "NAdam": lambda p: NAdam(p, lr=0.05, weight_decay=0.1, decoupled_weight_decay=True),
    "Adagrad": lambda p: torch.optim.Adagrad(
        p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.01
    ),
    "SGD": lambda p: SGD(p, lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "damped": lambda p: SGD(p, lr=0.2, momentum=0.8, dampening=0.3, maximize=True),
    "Adam": lambda p: Adam(p, lr=0.05, amsgrad=True),
    "AdamW": lambda p: AdamW(p, lr=0.05, weight_decay=0.2),
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
    "class": RMSprop,
}
SCHEDULES: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.MultiStepLR(o, [2, 3])], [2]
    ),
}


@pytest.mark.nightly
@parametrize_with_checks(
    [Branches(optimizer=EVERY["RMSprop"])], {"toml": "a function cannot be written into a file"}
)
def test_conformance(component: Any, check: Check) -> None:
    check(component)


def written(state: Any) -> Any:
    """A state as it comes back from disk."""
    structure, tensors = pack(state)
    return unpack(json.loads(json.dumps(structure)), tensors)


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "stacked") for name in (*EVERY, *OTHERS)), *((name, "loop") for name in OTHERS)],
)
def test_each_branch_is_the_optimiser_by_hand_over_outer_steps(name: str, mode: Any) -> None:
    build = {**EVERY, **OTHERS}[name]
    branches = Branches(
        count=2, steps=3, optimizer=build, batch_size=5, mode=mode, carry_rule="per-branch"
    )
    hands = [ByHand(build), ByHand(build)]
    start = branches.init(PROBLEM, KEY)
    for step in range(2):
        key = KEY.fold(step)
        candidates = propose(branches, start=start, key=key)
        for i, hand in enumerate(hands):
            assert_same(candidates.at(i), hand.run(drawn(branches, i, key)), **CLOSE)
        start = written(branches.carry(start, candidates, torch.tensor(1), KEY, PROBLEM))
    assert candidates.cost.lower_gradients == 6


def test_spreads_clipping_and_the_winners_memory() -> None:
    def build(rate: float, decay: float) -> Build:
        return lambda p: RMSprop(p, lr=0.02 * rate, weight_decay=0.1 * decay)

    branches = Branches(
        count=3,
        steps=3,
        optimizer=build(1.0, 1.0),
        batch_size=5,
        lr_spread=(0.25, 4.0),
        decay_spread=(0.5, 2.0),
        clip=0.2,
        moments="carry",
    )
    candidates = propose(branches)
    hands = [ByHand(build(*f), clip=0.2) for f in ((0.25, 0.5), (1.0, 1.0), (4.0, 2.0))]
    for i, hand in enumerate(hands):
        assert_same(candidates.at(i), hand.run(drawn(branches, i)), **CLOSE)
    carried, fresh = (
        each.carry(each.init(PROBLEM, KEY), candidates, torch.tensor(2), KEY, PROBLEM)
        for each in (branches, evolve(branches, moments="fresh"))
    )
    for name, memory in carried["moments"].items():
        leaf, entry, _ = name.split("|")
        expected = hands[2].optimizer.state[hands[2].leaves[leaf]][entry]
        assert_same(memory[0], expected.to(F64), **CLOSE)
    assert (fresh["moments"], fresh["optimizer_steps"]) == ({}, 0)


@pytest.mark.parametrize(
    ("name", "ours"), [*((name, False) for name in SCHEDULES), ("StepLR", True), ("warm-up", True)]
)
def test_schedules_of_torch_go_on_over_outer_steps(name: str, ours: bool) -> None:
    """Of an optimiser of torch, and of our own rules."""
    build: Build = lambda p: SGD(p, lr=0.1, momentum=0.5)  # noqa: E731
    rule: dict[str, Any] = {"lr": 0.1, "momentum": 0.5} if ours else {"optimizer": build}
    branches = Branches(count=1, steps=3, schedule=SCHEDULES[name], batch_size=5, **rule)
    hand = ByHand(build, SCHEDULES[name])
    start = branches.init(PROBLEM, KEY)
    for step in range(2):
        candidates = propose(branches, start=start, key=KEY.fold(step))
        assert_same(candidates.at(0), hand.run(drawn(branches, 0, KEY.fold(step))), **CLOSE)
        replayed, _ = candidates.replay(torch.tensor(0), THETA, None)  # type: ignore[misc]
        assert_same(replayed, candidates.at(0), **CLOSE)
        start = branches.carry(start, candidates, torch.tensor(0), KEY, PROBLEM)


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


@pytest.mark.parametrize(
    ("name", "last"), [*((name, None) for name in EVERY), ("NAdam", 2), ("RMSprop", 2)]
)
def test_the_way_back_against_differences(name: str, last: int | None) -> None:
    """Also where a coordinate never had a gradient, so that a root has no slope there; and through
    the last steps alone, whose start then stands still."""
    branches = Branches(count=1, steps=4, optimizer=EVERY[name])
    candidates = propose(branches, BENT)

    def value(end: Tree) -> Tensor:
        return (end["x"] * torch.tensor([1.0, 2.0, 3.0], dtype=F64)).sum() + end["x"].pow(2).sum()

    theta = {"t": BENT.theta0["t"].clone().requires_grad_()}
    end, cost = candidates.replay(torch.tensor(0), theta, last)  # type: ignore[misc]
    assert_same({name: leaf.detach() for name, leaf in end.items()}, candidates.at(0))
    assert (cost.lower_gradients, cost.products) == (4, last or 4)
    tail, start = evolve(branches, steps=last or 4), branches.init(BENT, KEY)
    if last is not None:
        first = evolve(branches, steps=2)
        start = first.carry(start, propose(first, BENT), torch.tensor(0), KEY, BENT)
    differences = finite_differences(
        lambda at: value(tail.propose(BENT, at, start, KEY).at(0)), BENT.theta0
    )
    gradient = torch.autograd.grad(value(end), theta["t"])[0]
    torch.testing.assert_close(gradient, differences["t"], rtol=2e-6, atol=1e-7)


def test_lbfgs_solves_each_branch_and_counts_its_gradients() -> None:
    def build(parameters: Any) -> torch.optim.Optimizer:
        return LBFGS(parameters, max_iter=5, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        calls.append(1)
        hand.optimizer.zero_grad()
        loss = PROBLEM.g(THETA, hand.leaves, PROBLEM.lower_data.whole)
        loss.backward()
        return loss

    def two_steps() -> Tree:
        for _ in range(2):
            hand.optimizer.step(closure)  # type: ignore[arg-type]
        return {name: leaf.detach().clone() for name, leaf in hand.leaves.items()}

    calls: list[int] = []
    hand = ByHand(build)
    branches = Branches(
        count=2, steps=2, optimizer=build, moments="fresh", noise=0.1, noise_scale="absolute"
    )
    candidates = propose(branches)
    assert_same(candidates.at(0), two_steps(), **CLOSE)
    one = evolve(branches, count=1, moments="carry")
    single = propose(one)
    assert candidates.cost.lower_gradients > single.cost.lower_gradients == len(calls)
    assert_same(single.replay(torch.tensor(0), THETA, None)[0], single.at(0))  # type: ignore[misc]
    start = one.carry(one.init(PROBLEM, KEY), single, torch.tensor(0), KEY, PROBLEM)
    assert_same(propose(one, start=start).at(0), two_steps(), **CLOSE)


@pytest.mark.parametrize(
    "options", [{"momentum": 0.5}, {"optimizer": EVERY["RMSprop"]}, {"clip": 0.1}]
)
@pytest.mark.parametrize(("batch_size", "mode"), [(7, "stacked"), (None, "loop")])
def test_batches_in_parts_are_the_whole_batch(options: Any, batch_size: Any, mode: Any) -> None:
    whole = Branches(
        count=2, steps=3, batch_size=batch_size, mode=mode, whole_batch_noise=0.1, **options
    )
    plain, parted = propose(whole), propose(evolve(whole, accumulate=3))
    assert_same((parted.x, parted.losses), (plain.x, plain.losses), **CLOSE)
    assert parted.cost.lower_gradients == 3 * plain.cost.lower_gradients
    assert parted.cost.rows == plain.cost.rows
    gradients = []
    for candidates in (plain, parted):
        theta = {name: leaf.clone().requires_grad_() for name, leaf in THETA.items()}
        end, cost = candidates.replay(torch.tensor(1), theta, None)  # type: ignore[misc]
        value = torch.stack([leaf.pow(2).sum() for leaf in end.values()]).sum()
        gradients.append(list(torch.autograd.grad(value, list(theta.values()))))
    assert cost.lower_gradients == 9
    assert_same(*gradients, rtol=1e-9, atol=1e-12)


def test_there_are_no_more_parts_than_rows() -> None:
    branches = Branches(count=1, steps=2, lr=0.1, accumulate=4)
    candidates = propose(branches, BENT)  # which has none
    assert_same(candidates.x, propose(evolve(branches, accumulate=1), BENT).x)
    few = propose(Branches(count=1, steps=2, batch_size=3, accumulate=10))
    assert (candidates.cost.lower_gradients, few.cost.lower_gradients) == (2, 6)


@pytest.mark.parametrize("options", [{"optimizer": EVERY["RMSprop"]}, {"accumulate": 2, "lr": 0.1}])
def test_what_is_not_compiled_has_the_numbers_of_a_plain_run(options: Any) -> None:
    branches = Branches(count=2, steps=3, batch_size=5, **options)
    assert_same(propose(branches, evolve(PROBLEM, compiler=Programs())).x, propose(branches).x)


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        ({"optimizer": lambda p: RMSprop(p), "lr": 0.5}, "conflicting-options", "lr"),
        ({"optimizer": lambda p: None}, "wrong-result", "optimizer"),
        ({"optimizer": lambda p: SGD([torch.zeros(1)])}, "wrong-result", "optimizer"),
        ({"optimizer": lambda p: SGD(p, rate=1)}, "wrong-value", "optimizer"),
        ({"schedule": lambda o: 3}, "wrong-result", "schedule"),
        ({"schedule": lambda o: lr_scheduler.ReduceLROnPlateau(o)}, "not-supported", "schedule"),
        ({"schedule": lambda: 3}, "wrong-value", "schedule"),
        ({"optimizer": SGD([torch.zeros(1)], lr=0.1)}, "wrong-type", "optimizer"),
        ({"schedule": lr_scheduler.StepLR(SGD([torch.zeros(1)]), 3)}, "wrong-type", "schedule"),
        ({"optimizer": "RMSprop"}, "unknown-choice", "optimizer"),
    ],
)
def test_what_is_refused(options: Any, code: str, field: str) -> None:
    with rejects(code, field):
        propose(Branches(count=1, steps=2, **options))


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS"])
def test_the_way_back_is_refused_where_torch_has_none(name: str) -> None:
    method = Pipeline(
        generator=Branches(count=1, steps=2, optimizer=getattr(torch.optim, name)),
        selector=BestOfN(),
        hypergradient=Unrolled(),
        outer=OuterAdam(),
    )
    with rejects("not-supported", "generator", "optimizer"):
        method.step(PROBLEM, method.init(PROBLEM, seed=0))
    other = evolve(method, hypergradient=Implicit(solver=CG(ridge=1.0)))
    other.step(PROBLEM, other.init(PROBLEM, seed=0))


def test_memories_of_other_sizes_cannot_be_selected() -> None:
    rough = evolve(
        BENT, g=lambda theta, x, _: (x["x"] - normal(3)).abs().clamp_min(1e-3).sqrt().sum()
    )
    with rejects("not-supported", "generator", "moments"):
        propose(
            Branches(count=2, steps=1, optimizer=lambda p: LBFGS(p, max_iter=3), noise=0.5), rough
        )
