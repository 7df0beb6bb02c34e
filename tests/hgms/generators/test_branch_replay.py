"""Branches over outer steps: what is carried, and a branch run again as a function of θ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from support.branch_steps import (
    PROBLEM,
    THETA,
    ByHand,
    check_repeats,
    check_replays,
    drawn,
    propose,
)
from support.helpers import KEY, assert_same, counted
from torch import optim
from torch.optim import RMSprop, lr_scheduler

from hgms.generators.branches import Branches, Diversity, Restarts
from hgms.optim import SGD, AdamW, Clip, Cosine, LowerOptimizer, Torch
from hgms_core import Key, Tree

CLOSE = {"rtol": 1e-10, "atol": 1e-13}
RUN: dict[str, Any] = {"count": 3, "steps": 5, "batch_size": 5}
CASES = {
    "sgd": Branches(**RUN, optimizer=SGD(lr=0.3), diversity=Diversity(noise=0.05)),
    "momentum-clip": Branches(
        **RUN,
        optimizer=Clip(optimizer=SGD(lr=0.3, momentum=0.7), clip=0.05),
        diversity=Diversity(lr_spread=(0.5, 2.0)),
    ),
    "adamw": Branches(
        **RUN,
        optimizer=AdamW(lr=0.05, weight_decay=0.1),
        diversity=Diversity(decay_spread=(0.5, 2.0)),
    ),
    "adamw root": Branches(**RUN, optimizer=AdamW(lr=0.05, eps_root=1e-4, weight_decay=0.1)),
    "shared-cosine": Branches(
        **RUN,
        optimizer=SGD(lr=0.3, schedule=Cosine()),
        diversity=Diversity(batches="shared", noise=0.1),
    ),
    "full-period": Branches(
        **{**RUN, "batch_size": None},
        diversity=Diversity(noise=0.1),
        optimizer=SGD(lr=0.3, schedule=Cosine(period=3)),
    ),
    "per-branch": Branches(**RUN, optimizer=AdamW(lr=0.05), carry_rule="per-branch"),
    "torch": Branches(
        count=3,
        steps=5,
        batch_size=5,
        optimizer=Torch(
            build=lambda p: RMSprop(p, lr=0.01, momentum=0.5),
            schedule=lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
        ),
    ),
}
every_case = pytest.mark.parametrize("case", CASES)
every_replay = pytest.mark.parametrize("case", [case for case in CASES if case != "torch"])


@pytest.mark.extended
@every_case
def test_a_proposal_repeats_itself_and_stacked_looped_and_chunked_agree(case: str) -> None:
    check_repeats(CASES[case], **CLOSE)


@every_replay
def test_a_replayed_branch_is_the_proposed_one(case: str) -> None:
    check_replays(CASES[case], **CLOSE)


@pytest.mark.parametrize("last", [None, 2])
@every_replay
def test_a_replay_of_a_looped_branch_has_equal_bits(case: str, last: int | None) -> None:
    candidates = propose(evolve(CASES[case], mode="loop"))
    theta = {name: leaf.clone().requires_grad_() for name, leaf in THETA.items()}
    assert candidates.replay is not None
    for member in range(candidates.count):
        end, _ = candidates.replay(torch.tensor(member), theta, last)
        assert_same({name: leaf.detach() for name, leaf in end.items()}, candidates.at(member))


def test_a_kept_graph_is_used_at_its_own_theta_only() -> None:
    plain = Branches(**{**RUN, "count": 1, "steps": 4}, optimizer=AdamW(lr=0.05))
    problem, seen = counted(PROBLEM)
    index = torch.tensor(0)
    held = propose(evolve(plain, keep_path="graph"), problem)
    again = propose(plain)
    other = {name: leaf + 0.3 for name, leaf in THETA.items()}
    # the same numbers elsewhere
    own = {name: leaf.clone().requires_grad_() for name, leaf in THETA.items()}
    moving = {name: leaf.clone().requires_grad_() for name, leaf in other.items()}
    for theta, calls in ((own, 0), (other, 4), (moving, 4)):
        before = seen["g"]
        end, cost = held.replay(index, theta, None)  # type: ignore[misc]
        assert seen["g"] - before == cost.lower_gradients == calls
        expected, run_again = again.replay(index, theta, None)  # type: ignore[misc]
        assert_same(end, expected, rtol=1e-12)
        products = (run_again.products, run_again.cross_products)
        assert (cost.products, cost.cross_products) == products
    at = {name: leaf.clone() for name, leaf in THETA.items()}
    held = evolve(plain, keep_path="graph").propose(PROBLEM, at, plain.init(PROBLEM, KEY), KEY)
    at["scale"].add_(0.5)  # θ itself changed in place: its values are other ones now
    expected, _ = again.replay(index, at, None)  # type: ignore[misc]
    assert_same(held.replay(index, at, None)[0], expected)  # type: ignore[misc]


OPTIMIZERS: dict[str, tuple[LowerOptimizer, Any]] = {
    "sgd": (SGD(lr=0.3), lambda p: optim.SGD(p, lr=0.3)),
    "momentum": (SGD(lr=0.2, momentum=0.8), lambda p: optim.SGD(p, lr=0.2, momentum=0.8)),
    "adamw": (
        AdamW(lr=0.05, weight_decay=0.1),
        lambda p: optim.AdamW(p, lr=0.05, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rule", ["selected", "base", "per-branch"])
def test_continuing_with_carried_moments_is_one_long_run(name: str, rule: str) -> None:
    optimizer, build = OPTIMIZERS[name]
    branches = Branches(count=3, steps=4, batch_size=5, carry_rule=rule, optimizer=optimizer)
    state = branches.init(PROBLEM, KEY)
    histories: list[list[Tree]] = [[], [], []]
    for outer, choice in enumerate([2, 1, 2]):
        key = KEY.fold(outer)
        histories = [past + drawn(branches, i, key) for i, past in enumerate(histories)]
        found = propose(branches, start=state, key=key)
        for i, history in enumerate(histories):
            assert_same(found.at(i), ByHand(build).run(history), rtol=1e-9, atol=1e-12)
        state = branches.carry(state, found, torch.tensor(choice), key, PROBLEM)
        if rule != "per-branch":
            histories = [list(histories[choice if rule == "selected" else 0])] * 3


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("carry_rule", ["selected", "per-branch"])
def test_restarts_draw_a_lower_state_and_forget_moments(carry_rule: Any, every: int) -> None:
    """After each step, or each second one."""
    momentum: Any = {"count": 2, "steps": 3, "optimizer": SGD(momentum=0.5)}
    branches = Branches(**momentum, carry_rule=carry_rule)
    generator = Restarts(generator=branches, restart_every=every)
    start = generator.init(PROBLEM, Key(0))
    for outer in range(4):
        key = Key(0).fold(outer)
        found = propose(generator, start=start, key=key)
        assert_same(found.x, propose(branches, start=start, key=key).x)
        start = generator.carry(start, found, torch.tensor(1), key, PROBLEM)
        restarts = (outer + 1) % every == 0
        fresh = PROBLEM.fresh(key)["w"]  # type: ignore[misc]
        assert torch.equal(start["x"]["w"][0], fresh) is restarts
        assert bool((start["moments"]["m.w"] == 0).all()) is restarts
        assert start["optimizer_steps"] == (0 if restarts else 3 * (outer % every + 1))
        assert start["lower_steps"] == start["optimizer_steps"]
        assert start["outer_steps"] == outer + 1
