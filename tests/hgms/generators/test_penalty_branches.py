"""Penalty methods with several branches: what is evaluated, carried, saved and refused, and
blocks of layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from support.field_problems import pipeline, run
from support.helpers import F64, assert_same, counted, network_problem, rejects

from hgms.adapters import from_losses
from hgms.config.tables import overridden
from hgms.generators.penalty import (
    DynamicBarrier,
    FullyFirstOrder,
    GradientNorm,
    Minimax,
    MoreauEnvelope,
    PairOptimizer,
    Ramp,
    ValueFree,
    ValueGap,
)
from hgms.generators.penalty.minimax import SCALEBIO
from hgms.hypergradients import Carried, Implicit, Unrolled
from hgms.outer import AdamW, Sgd
from hgms.selectors import BestOfN, First
from hgms.solvers import Identity
from hgms.testing.methods import check_resume
from hgms_core import Key, Pipeline, Problem

PROBLEM = network_problem()
SCALAR = Problem(
    theta0={"t": torch.ones(1, dtype=F64)},
    x0={"x": torch.zeros(1, dtype=F64)},
    g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    f=lambda t, x, _: ((x["x"] - 3) ** 2).sum(),
)
BATCHES: dict[str, Any] = {"batch_size": 5, "upper_batch_size": 4}
GENERATORS: dict[str, Any] = {
    "value-gap": ValueGap(count=3, momentum=0.5, ramp=Ramp(steps=0), **BATCHES),
    "gradient-norm": GradientNorm(count=3, momentum=0.5, ramp=Ramp(steps=0), **BATCHES),
    "minimax": Minimax(count=3, optimizer=PairOptimizer(kind="adamw"), **BATCHES),
    "dynamic-barrier": DynamicBarrier(count=3, eta=20.0, **BATCHES),
    "fully-first-order": FullyFirstOrder(count=3, lr=0.1, **BATCHES),
    "moreau-envelope": MoreauEnvelope(count=3, lr=0.1, **BATCHES),
    "value-free": ValueFree(count=3, lr=0.1, **BATCHES),
}
every_generator = pytest.mark.parametrize("name", GENERATORS)


def method(generator: Any, outer: Any = None, selector: Any = None, **parts: Any) -> Pipeline:
    hypergradient = parts.get("hypergradient", Carried())
    return pipeline(generator, selector or First(), hypergradient, outer or Sgd(lr=0.1))


def advance(method: Pipeline, problem: Problem, steps: int, state: Any = None) -> Any:
    state = state or method.init(problem, 0)
    for _ in range(steps):
        state, _ = method.step(problem, state)
    return state


COUNTS: dict[str, tuple[dict[str, int], int, dict[str, int]]] = {
    # (steps, calls of g, what the cost counts besides)
    "value-gap": ({"steps": 3}, 5, {"lower_gradients": 5}),
    "gradient-norm": ({}, 2, {"lower_gradients": 2, "products": 2, "cross_products": 2}),
    "minimax": ({}, 2, {"lower_gradients": 2}),
    "dynamic-barrier": ({"steps": 3}, 4, {"lower_gradients": 4}),
    "fully-first-order": ({"steps": 2}, 6, {"lower_gradients": 6, "upper_gradients": 3}),
    "moreau-envelope": ({}, 3, {"lower_gradients": 3}),
    "value-free": ({"steps": 2}, 2, {"lower_gradients": 2, "upper_gradients": 3}),
}


@every_generator
def test_nothing_is_evaluated_twice_and_all_is_counted(name: str) -> None:
    steps, calls_of_g, cost = COUNTS[name]
    problem, calls = counted(PROBLEM)
    *_, record = run(method(evolve(GENERATORS[name], **steps)), problem, 2)
    cost = {"upper_gradients": 1, **cost}
    above = cost["upper_gradients"]
    assert calls["g"] == 6 * calls_of_g
    assert (calls["f"], calls["g_rows"]) == (6 * above, 5 * calls["g"])
    rows = 5 * (sum(cost.values()) - above) + 4 * above
    found = {key.removeprefix("cost_"): n for key, n in record.items() if key.startswith("cost_")}
    assert {key: n for key, n in found.items() if n} == {
        key: 6 * n for key, n in {**cost, "rows": rows}.items()
    }


@every_generator
def test_branches_are_single_runs_of_their_own_and_bring_their_own_gradient(name: str) -> None:
    generator = evolve(GENERATORS[name], noise=0.1, upper_batch_size=None)
    start = generator.init(PROBLEM, Key(0))
    found, again = (generator.propose(PROBLEM, PROBLEM.theta0, start, Key(3)) for _ in range(2))
    assert_same(again.x, found.x)
    one = evolve(generator, count=1, noise=0.0)
    alone = one.propose(PROBLEM, PROBLEM.theta0, start, Key(3))
    for tree, single in ((found.x, alone.x), (found.aux, alone.aux)):
        assert_same({k: v[:1] for k, v in tree.items()}, single)  # branch 0 is free of noise
    assert len(torch.unique(found.x["w"], dim=0)) == 3
    gradients = len(torch.unique(found.aux["theta.weights"], dim=0))
    assert gradients == (1 if name == "value-free" else 3)  # its h is ∇_θ f, without x in it here


@every_generator
def test_the_selected_branch_moves_theta_and_is_carried_with_all_it_kept(name: str) -> None:
    generator = GENERATORS[name]
    whole = method(generator, Sgd(lr=1.0), BestOfN())
    before = whole.init(PROBLEM, 0)
    state, record = whole.step(PROBLEM, before)
    key = Key(0).fold("step", 0).fold("propose")
    found = generator.propose(PROBLEM, PROBLEM.theta0, before["start"], key)
    index = int(record["selected"])
    moved = {k: PROBLEM.theta0[k] - state["theta"][k] for k in PROBLEM.theta0}
    assert_same(moved, {k: found.aux[f"theta.{k}"][index] for k in moved}, atol=1e-14)
    kept = state["start"]["aux"]
    assert not any(k.startswith("theta.") or "." not in k for k in kept)
    assert_same(kept, {k: found.aux[k][index : index + 1] for k in kept})


@every_generator
def test_noise_sets_branches_apart_once_or_at_every_step(name: str) -> None:
    noisy = evolve(GENERATORS[name], noise=0.1, batch_size=None, upper_batch_size=None)
    own = evolve(noisy, carry_rule="per-branch")
    apart, common = own.init(PROBLEM, Key(0)), noisy.init(PROBLEM, Key(0))
    for start in (apart, common):
        assert_same({k: v[0] for k, v in start["x"].items()}, PROBLEM.x0)
    spread = torch.cat([(apart["x"][k][1:] - PROBLEM.x0[k]).reshape(-1) for k in PROBLEM.x0])
    assert 0.06 < float(spread.std()) < 0.14
    twins = {k: k.split(".", 1)[1] for k in apart["aux"] if k.split(".")[0] in ("omega", "u", "z")}
    assert_same({k: apart["aux"][k] for k in twins}, {k: apart["x"][twins[k]] for k in twins})
    ends, (one, other) = (
        [generator.propose(PROBLEM, PROBLEM.theta0, start, Key(seed)).x["w"] for seed in (1, 2)]
        for generator, start in ((own, apart), (noisy, common))
    )
    assert torch.equal(*ends)  # nothing is added to branches of their own
    assert torch.equal(one[0], other[0])
    assert not torch.equal(one[1], other[1])


def test_a_run_that_draws_blocks_goes_on_the_same() -> None:
    check_resume(method(evolve(GENERATORS["minimax"], blocks=1, block_every=2), AdamW(lr=0.1)))


@every_generator
def test_what_does_not_fit_is_refused(name: str) -> None:
    generator = evolve(GENERATORS[name], batch_size=None, upper_batch_size=None)
    with rejects("conflicting-options", "generator", "noise"):  # all candidates would be equal
        method(generator).init(PROBLEM, 0)
    for apart in ({"upper_batch_size": 4}, {"noise": 0.1}):
        method(evolve(generator, **apart)).init(PROBLEM, 0)
    own = evolve(GENERATORS[name], carry_rule="per-branch")
    start = own.init(PROBLEM, Key(0))
    with rejects("wrong-length", "generator", "count"):
        evolve(own, count=2).propose(PROBLEM, PROBLEM.theta0, start, Key(0))
    with rejects("not-supported", "hypergradient"):  # a penalty step is not replayed
        run(method(GENERATORS[name], hypergradient=Unrolled()), PROBLEM, 1)
    run(method(GENERATORS[name], hypergradient=Implicit(solver=Identity())), PROBLEM, 1)


@every_generator
def test_a_loss_that_lacks_a_variable_gives_zeros(name: str) -> None:
    flat = evolve(SCALAR, f=lambda t, x, _: 0 * t["t"].sum(), g=lambda t, x, _: x["x"].sum())
    state = advance(method(evolve(GENERATORS[name], count=1)), flat, 1)
    assert_same(state["theta"], flat.theta0)
    assert bool(state["x"]["x"].isfinite().all())


# --- minimax: blocks, registration


def test_all_blocks_are_all_leaves_and_leaves_of_one_module_move_together() -> None:
    blocks = Minimax(blocks=3, batch_size=5)
    ends = [
        advance(method(each), PROBLEM, 3)["x"] for each in (blocks, evolve(blocks, blocks=None))
    ]
    assert_same(*ends)
    with rejects("out-of-range", "generator", "blocks"):
        method(evolve(blocks, blocks=4)).init(PROBLEM, 0)
    leaves = [f"{layer}.{part}" for layer in "ab" for part in ("bias", "weight")]
    layers = from_losses(
        theta0={"t": torch.ones(1, dtype=F64)},
        x0={name: torch.zeros(2, dtype=F64) for name in leaves},
        g=lambda t, x, _: sum(((leaf - t["t"]) ** 2).sum() for leaf in x.values()),
        f=lambda t, x, _: sum(leaf.sum() for leaf in x.values()),
    )
    x = advance(method(evolve(blocks, blocks=1)), layers, 1)["x"]
    assert sorted(name for name, leaf in x.items() if leaf.any()) in (leaves[:2], leaves[2:])


def test_scalebio_on_sources_is_as_its_authors_run_it() -> None:
    parts = overridden(SCALEBIO, {}, ["sources"])
    wanted = {"kind": "adamw", "weight_decay": 5e-4, "schedule": "cosine"}
    assert parts["generator"]["optimizer"].items() >= wanted.items()
    outer = {"name": "adamw", "lr": 1e-2, "weight_decay": 1e-2}
    assert parts["outer"] == {**outer, "schedule": {"kind": "cosine", "final": 0.0}}
