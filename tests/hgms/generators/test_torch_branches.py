"""Branches by optimisers of torch, and batches in parts: against the same written by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from attrs import evolve
from support.branch_steps import PROBLEM, THETA, Build, ByHand, drawn, propose
from support.helpers import F64, KEY, assert_same
from torch import Tensor
from torch.optim import LBFGS, SGD, Adam, AdamW, NAdam, RMSprop

from hgms.generators.branches import Branches, Diversity
from hgms.hypergradients import Unrolled
from hgms.optim import Clip, Torch
from hgms.runs import pack, unpack
from hgms.testing import Check, parametrize_with_checks
from hgms_core import ConfigError, Selection

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


@pytest.mark.nightly
@parametrize_with_checks(
    [Branches(optimizer=Torch(build=EVERY["RMSprop"]))],
    {
        "toml": "a function cannot be written into a file",
        "pickle": "a function without a name cannot be pickled",
    },
)
def test_conformance(component: Any, check: Check) -> None:
    check(component)


def written(state: Any) -> Any:
    """A state as it comes back from disk."""
    structure, tensors = pack(state)
    return unpack(json.loads(json.dumps(structure)), tensors)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "stacked") for name in (*EVERY, *OTHERS)), *((name, "loop") for name in OTHERS)],
)
def test_each_branch_is_the_optimiser_by_hand_over_outer_steps(name: str, mode: Any) -> None:
    build = {**EVERY, **OTHERS}[name]
    branches = Branches(
        count=2,
        steps=3,
        optimizer=Torch(build=build),
        batch_size=5,
        mode=mode,
        carry_rule="per-branch",
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
        optimizer=Clip(optimizer=Torch(build=build(1.0, 1.0), moments="carry"), clip=0.2),
        batch_size=5,
        diversity=Diversity(lr_spread=(0.25, 4.0), decay_spread=(0.5, 2.0)),
    )
    reset = Torch(build=build(1.0, 1.0), moments="fresh")
    candidates = propose(branches)
    hands = [ByHand(build(*f), clip=0.2) for f in ((0.25, 0.5), (1.0, 1.0), (4.0, 2.0))]
    for i, hand in enumerate(hands):
        assert_same(candidates.at(i), hand.run(drawn(branches, i)), **CLOSE)
    carried, fresh = (
        each.carry(each.init(PROBLEM, KEY), candidates, torch.tensor(2), KEY, PROBLEM)
        for each in (branches, evolve(branches, optimizer=reset))
    )
    for name, memory in carried["moments"].items():
        leaf, entry, _ = name.split("|")
        expected = hands[2].optimizer.state[hands[2].leaves[leaf]][entry]
        assert_same(memory[0], expected.to(F64), **CLOSE)
    assert (fresh["moments"], fresh["optimizer_steps"]) == ({}, 0)


def test_unrolled_rejects_torch_optimisers() -> None:
    candidates = propose(Branches(count=1, optimizer=Torch(build=EVERY["Adam"])))
    selection = Selection.of(torch.zeros(1))
    with pytest.raises(ConfigError) as error:
        Unrolled().estimate(PROBLEM, THETA, candidates, selection, KEY, {})
    assert (error.value.code, error.value.place) == ("not-supported", ("hypergradient",))


def test_an_optimiser_that_evaluates_the_loss_is_rejected() -> None:
    with pytest.raises(ConfigError) as error:
        propose(Branches(optimizer=Torch(build=LBFGS)))
    assert (error.value.code, error.value.place[-1]) == ("not-supported", "optimizer")
