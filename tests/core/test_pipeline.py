"""The outer loop: Algorithm 1 step by step, what it counts, what it keeps, and that it repeats
itself exactly.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, counted, network_problem

from hgms.adapters import hypergradient
from hgms.generators.branches import Branches, Diversity
from hgms.generators.ula import Ula
from hgms.hypergradients import Fixed, Implicit, OneStep, Unrolled
from hgms.methods import KeepBest
from hgms.optim import SGD, AdamW
from hgms.outer import Adam, ProjectedGradient, Sgd
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms_core import Key, Pipeline, Problem, Record, State
from hgms_core.records import Outcome

pytestmark = pytest.mark.plugins

PROBLEM = network_problem()
GENERATORS = {
    "branches": Branches(
        count=3, steps=4, optimizer=SGD(lr=0.2), batch_size=6, diversity=Diversity(noise=0.05)
    ),
    "adamw": Branches(
        count=2, steps=3, optimizer=AdamW(lr=0.05), batch_size=6, carry_rule="per-branch"
    ),
    "ula": Ula(count=3, steps=5, lr=0.05, temperature=1e-3, carry_rule="selected"),
}
ESTIMATORS = {
    "implicit": Implicit(
        solver=CG(ridge=0.1, rtol=1e-8), batch_size=10, upper_batch_size=5, warm_start=True
    ),
    "one-step": OneStep(lr=0.3, batch_size=9, upper_batch_size=5),
    "unrolled": Unrolled(last=2, upper_batch_size=5),
    "fixed": Fixed(upper_batch_size=5),
}


def pipeline(**parts: Any) -> Pipeline:
    defaults: dict[str, Any] = {
        "generator": GENERATORS["branches"],
        "selector": BestOfN(batch_size=7),
        "hypergradient": ESTIMATORS["implicit"],
        "outer": Adam(lr=0.05),
    }
    return Pipeline(**{**defaults, **parts})


def run(
    method: Pipeline, problem: Problem, steps: int, state: State | None = None
) -> tuple[State, list[Record]]:
    state = state or method.init(problem, seed=11)
    records = []
    for _ in range(steps):
        state, record = method.step(problem, state)
        records.append(
            {
                name: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf
                for name, leaf in record.items()
            }
        )
    return state, records


def test_one_step_is_algorithm_one() -> None:
    # The quadratic lower level g = ½‖x − θ‖² + ½x₁² is solved by 200 steps; f = ½‖x − c‖².
    # Everything is known by hand.
    c = torch.tensor([1.0, -2.0], dtype=F64)
    scale = torch.tensor([2.0, 1.0], dtype=F64)  # x* = θ / scale
    problem = Problem(
        theta0={"t": torch.tensor([3.0, 0.5], dtype=F64)},
        x0={"x": torch.zeros(2, dtype=F64)},
        g=lambda t, x, _: 0.5 * (x["x"] - t["t"]).square().sum() + 0.5 * x["x"][0] ** 2,
        f=lambda t, x, _: 0.5 * (x["x"] - c).square().sum(),
        project=lambda t: {"t": t["t"].clamp(max=2.0)},
    )
    method = pipeline(
        generator=Branches(
            count=3, steps=200, optimizer=SGD(lr=0.3), diversity=Diversity(noise=0.1)
        ),
        selector=BestOfN(),
        hypergradient=Implicit(solver=CG(rtol=1e-12)),
        outer=ProjectedGradient(lr=0.1),
    )
    state, (record,) = run(method, problem, 1)
    theta = problem.theta0["t"]
    x = theta / scale
    slope = (x - c) / scale
    assert_same(state["x"]["x"], x, rtol=1e-12)
    assert_same(state["theta"]["t"], (theta - 0.1 * slope).clamp(max=2.0), rtol=1e-11)
    assert (record["outcome"], record["finite_candidates"]) == (Outcome.CONVERGED.code, 3)
    expected = {
        "hypergradient_norm": float(slope.norm()),
        "upper_loss": float(0.5 * (x - c).square().sum()),
        "update_norm": float((state["theta"]["t"] - theta).norm()),
    }
    assert {name: record[name] for name in expected} == pytest.approx(expected, rel=1e-11)


def test_a_step_is_its_parts_one_after_the_other() -> None:
    method = pipeline()
    state = method.init(PROBLEM, seed=11)
    after, record = method.step(PROBLEM, state)
    key = Key(11).fold("step", 0)
    candidates = method.generator.propose(
        PROBLEM, PROBLEM.theta0, state["start"], key.fold("propose")
    )
    selection = method.selector.select(PROBLEM, PROBLEM.theta0, candidates, key.fold("select"))
    assert_same(record["scores"], selection.scores)
    assert_same(after["x"], candidates.at(selection.index))
    data = PROBLEM.lower_data
    above = PROBLEM.upper_data["differentiate"]
    below = data.batch(data.draw(key.fold("differentiate", "lower"), 10, 1)[0])
    batch = above.batch(above.draw(key.fold("differentiate", "upper"), 5, 1)[0])
    found = hypergradient(
        lambda t, x: PROBLEM.f(t, x, batch),
        lambda t, x: PROBLEM.g(t, x, below),
        PROBLEM.theta0,
        after["x"],
        solver=CG(ridge=0.1, rtol=1e-8),
    )
    theta, moments = method.outer.step(
        PROBLEM.theta0, found.value, method.outer.init(PROBLEM.theta0), 0.0
    )
    assert_same(after["theta"], theta)
    # what the parts remember goes into the next step
    assert_same(after["hypergradient"]["v"], found.solution.value)
    assert_same(after["outer"], moments)
    carried = method.generator.carry(
        state["start"], candidates, selection.index, key.fold("carry"), PROBLEM
    )
    assert_same(after["start"], carried)
    assert_same(record["lower_loss"], candidates.losses[int(selection.index)])


@pytest.mark.parametrize(
    ("generator", "estimator"), [("branches", "implicit"), ("ula", "one-step"), ("ula", "fixed")]
)
def test_the_counts_are_the_calls_that_happened(generator: str, estimator: str) -> None:
    problem, calls = counted(PROBLEM)
    inner = pipeline(
        generator=evolve(GENERATORS[generator], mode="loop"),
        selector=BestOfN(batch_size=7, mode="loop"),
        hypergradient=ESTIMATORS[estimator],
    )
    method = KeepBest(method=inner)
    _, records = run(method, problem, 2)
    cost = {
        name.removeprefix("cost_"): value
        for name, value in records[-1].items()
        if name.startswith("cost_")
    }
    # A product with the retained graph does not call g again; everything else is one call each.
    assert calls["g"] == cost["lower_gradients"] + cost["cross_products"]
    assert calls["f"] == cost["upper_values"] + cost["upper_gradients"]
    product_rows = cost["products"] * 10 if estimator == "implicit" else 0
    assert calls["g_rows"] + calls["f_rows"] == cost["rows"] - product_rows
    assert records[-1]["oracle_calls"] == sum(cost.values()) - cost["rows"]
    assert (cost["products"] > 0) == (estimator == "implicit")


def tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in tensors(value)]
    assert isinstance(state, torch.Tensor | int | float | str | None), (
        "a state is dictionaries of tensors, numbers and strings"
    )
    return [state] if isinstance(state, torch.Tensor) else []


@pytest.mark.parametrize(
    ("generator", "estimator"),
    [("branches", "implicit"), ("adamw", "unrolled"), ("ula", "one-step"), ("ula", "fixed")],
)
def test_a_state_is_a_plain_value_that_continues_its_run_and_is_not_changed(
    generator: str, estimator: str
) -> None:
    inner = pipeline(
        generator=GENERATORS[generator],
        hypergradient=ESTIMATORS[estimator],
        outer=Sgd(momentum=0.9) if estimator == "one-step" else Adam(lr=0.05),
    )
    method = KeepBest(method=inner)
    whole, records = run(method, PROBLEM, 4)
    half, first = run(method, PROBLEM, 2)
    assert not any(leaf.requires_grad for leaf in tensors(half))
    before = copy.deepcopy((half, PROBLEM.theta0, PROBLEM.x0, torch.get_rng_state()))
    resumed, second = run(method, PROBLEM, 2, half)
    assert_same((half, PROBLEM.theta0, PROBLEM.x0, torch.get_rng_state()), before)
    assert_same(resumed, whole)
    assert str(first + second) == str(records)
    other, _ = method.step(PROBLEM, method.init(PROBLEM, 12))
    assert str(other["x"]) != str(method.step(PROBLEM, method.init(PROBLEM, 11))[0]["x"])


def test_keep_best_returns_the_state_with_the_lowest_stop_loss() -> None:
    # A step size that overshoots: the best state is not the last one.
    inner = pipeline(
        outer=Sgd(lr=1.0), generator=Branches(count=2, steps=8, optimizer=SGD(lr=0.5), batch_size=6)
    )
    method = KeepBest(method=inner)
    state = method.init(PROBLEM, seed=3)
    assert_same(method.result(state), (PROBLEM.theta0, PROBLEM.x0))
    losses = []
    pairs = []
    for _ in range(6):
        theta = state["theta"]
        state, record = method.step(PROBLEM, state)
        losses.append(float(record["stop_loss"]))
        pairs.append((theta, state["x"]))
    data = PROBLEM.upper_data["stop"].whole
    expected = [float(PROBLEM.f(theta, x, data)) for theta, x in pairs]
    assert losses == pytest.approx(expected, rel=1e-14)
    best = min(range(6), key=losses.__getitem__)
    assert best != 5
    assert_same(method.result(state), pairs[best])
    assert_same(inner.result(state), (state["theta"], state["x"]))


def test_keep_best_survives_a_non_finite_step() -> None:
    method = KeepBest(method=pipeline())
    state, _ = run(method, PROBLEM, 1)
    state["best"]["loss"] = torch.tensor(torch.nan, dtype=F64)
    after, record = method.step(PROBLEM, state)
    assert_same(after["best"]["loss"], record["stop_loss"])
    poisoned = evolve(
        PROBLEM,
        f=lambda t, x, b: PROBLEM.f(t, x, b) * (torch.nan if b["index"].shape[0] == 13 else 1.0),
    )
    kept, _ = method.step(poisoned, after)
    assert_same(kept["best"], after["best"])
