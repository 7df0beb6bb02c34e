"""Parts for the weights of data sources: `aligned` and `dual-averaging`, against loops and closed forms of their own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import scipy.optimize
import torch
from attrs import evolve
from helpers import F64, assert_same, normal
from source_problems import convex_sources, network_sources

from hgms_core import Branch, ConfigError, Data, Key, Pipeline, Problem, Tree
from hgms_hypergradients import Aligned
from hgms_outer import Adam, DualAveraging
from hgms_run import run

pytestmark = pytest.mark.plugins

THETA = {"logits": torch.tensor([0.3, -0.2, 0.1], dtype=F64)}


def flat(tree: Tree, like: Tree) -> torch.Tensor:
    return torch.cat([tree[name].reshape(-1) for name in like])


def mean_gradients(problem: Problem, batch: Tree) -> list[Tree]:
    """∇ of each source's mean loss on the batch, row by row by the problem's own losses of examples."""
    assert problem.sources is not None
    results = []
    for source in range(len(problem.sources.names)):
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in problem.x0.items()}
        rows = problem.sources.examples(leaves, batch)[batch["source"] == source]
        results.append(dict(zip(leaves, torch.autograd.grad(rows.mean(), list(leaves.values())), strict=True)))
    return results


def directions(problem: Problem, batch: Tree, v: Tree | None, beta: float = 0.9, eps: float = 1e-3) -> list[torch.Tensor]:
    units = []
    for grads in mean_gradients(problem, batch):
        g = flat(grads, problem.x0)
        u = g if v is None else g / ((beta * flat(v, problem.x0) + (1 - beta) * g * g).sqrt() + eps)
        units.append(u / u.norm())
    return units


def upper_slope(problem: Problem) -> torch.Tensor:
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in problem.x0.items()}
    loss = problem.f({}, leaves, problem.upper_data["differentiate"].batch(None))
    return torch.cat([grad.reshape(-1) for grad in torch.autograd.grad(loss, list(leaves.values()))])


def moments(problem: Problem) -> Tree:
    return {name: normal(*leaf.shape, seed=9).square() for name, leaf in problem.x0.items()}


@pytest.mark.parametrize("with_moments", [False, True])
def test_aligned_is_the_cosine_of_each_source_in_adams_metric(with_moments: bool) -> None:
    problem = network_sources()
    v = moments(problem) if with_moments else None
    aux = {} if v is None else {f"v.{name}": leaf for name, leaf in v.items()}
    estimator = Aligned(beta=0.9, eps=1e-3)
    estimate, _ = estimator.estimate(problem, THETA, Branch(x=problem.x0, aux=aux), Key(0), {})
    slope = upper_slope(problem)
    cosines = torch.stack([slope @ unit / slope.norm() for unit in directions(problem, problem.lower_data.batch(None), v)])
    omega = THETA["logits"].softmax(0)
    assert_same(estimate.value["logits"], -omega * (cosines - omega @ cosines), rtol=1e-10, atol=1e-12)
    assert (cosines.abs() > 0.01).all()
    assert (estimate.cost.lower_gradients, estimate.cost.upper_gradients) == (3, 1)


def test_it_is_the_derivative_along_a_step_of_equal_lengths() -> None:
    problem = network_sources()
    h = Aligned().estimate(problem, THETA, Branch(x=problem.x0), Key(0), {})[0].value["logits"]
    units, slope = directions(problem, problem.lower_data.batch(None), None), upper_slope(problem)
    start, rate = flat(problem.x0, problem.x0), 1e-6

    def after(logits: torch.Tensor) -> float:
        moved = start - rate * sum(w * u for w, u in zip(logits.softmax(0), units, strict=True))
        leaves, first = {}, 0
        for name, leaf in problem.x0.items():
            leaves[name] = moved[first : first + leaf.numel()].reshape(leaf.shape)
            first += leaf.numel()
        return float(problem.f({}, leaves, problem.upper_data["differentiate"].batch(None)))

    for number in range(3):
        step = 0.05 * torch.eye(3, dtype=F64)[number]
        quotient = (after(THETA["logits"] + step) - after(THETA["logits"] - step)) / (0.1 * rate * float(slope.norm()))
        assert abs(quotient - float(h[number])) < 1e-3


def test_a_sources_length_does_not_matter() -> None:
    problem = network_sources()
    assert problem.sources is not None
    scale, losses = torch.tensor([1.0, 1.0, 100.0], dtype=F64), problem.sources.losses
    longer = evolve(problem, sources=evolve(problem.sources, losses=lambda x, batch: scale * losses(x, batch)))
    before, after = (
        Aligned().estimate(p, THETA, Branch(x=p.x0), Key(0), {})[0].value["logits"] for p in (problem, longer)
    )  # fmt: skip
    assert_same(before, after, rtol=1e-10, atol=1e-12)


def test_sources_missing_from_a_batch_are_told_nothing_of() -> None:
    problem = network_sources()
    everything = problem.lower_data.batch(None)
    index = torch.tensor([0, 3, 5, 33, 36])  # rows of `near` and `noise`
    some = {name: leaf[index] for name, leaf in everything.items()}
    small = evolve(problem, lower_data=Data(5, some, lambda rows: {name: leaf[rows] for name, leaf in some.items()}))
    estimate, _ = Aligned().estimate(small, THETA, Branch(x=problem.x0), Key(0), {})
    slope = upper_slope(problem)
    near, _, noise = mean_gradients(problem, some)[0], None, mean_gradients_of(problem, some, 2)
    a = torch.stack([slope @ (g := flat(tree, problem.x0)) / (slope.norm() * g.norm()) for tree in (near, noise)])
    omega = THETA["logits"].softmax(0)
    held = omega[[0, 2]]
    departures = torch.zeros(3, dtype=F64)
    departures[[0, 2]] = 1.5 * (a - held @ a / held.sum())
    assert_same(estimate.value["logits"], -omega * (departures - omega @ departures), rtol=1e-9, atol=1e-12)
    assert estimate.cost.lower_gradients == 2


def mean_gradients_of(problem: Problem, batch: Tree, source: int) -> Tree:
    assert problem.sources is not None
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in problem.x0.items()}
    rows = problem.sources.examples(leaves, batch)[batch["source"] == source]
    return dict(zip(leaves, torch.autograd.grad(rows.mean(), list(leaves.values())), strict=True))


def test_aligned_needs_sources() -> None:
    problem = evolve(network_sources(), sources=None)
    with pytest.raises(ConfigError, match="mixes named sources"):
        Aligned().estimate(problem, THETA, Branch(x=problem.x0), Key(0), {})


def of_theta(theta: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    omega = theta.softmax(0)
    return omega * (c - omega @ c)


def test_dual_averaging_is_least_loss_with_a_divergence_from_the_start() -> None:
    outer, start = DualAveraging(strength=3.0, prior_steps=2.0), {"t": normal(4, seed=3)}
    theta, state, rows = start, outer.init(start), [normal(4, seed=10 + number) for number in range(5)]
    for c in rows:
        theta, state = outer.step(theta, {"t": of_theta(theta["t"], c)}, state, 0.0)
    mean, prior = torch.stack(rows).sum(0) / (5 + 2), start["t"].softmax(0)

    def objective(logits: Any) -> float:
        omega = torch.tensor(logits, dtype=F64).softmax(0)
        return float(omega @ mean + (omega * (omega / prior).log()).sum() / 3.0)

    best = scipy.optimize.minimize(objective, [0.0] * 4, method="BFGS", options={"gtol": 1e-10}).x
    assert_same(theta["t"].softmax(0), torch.tensor(best, dtype=F64).softmax(0), rtol=1e-5, atol=1e-6)


def walked(outer: Any, steps: int) -> float:
    """How far the weights of equal sources end from equality, on average over eight runs, when c is noise."""
    total = 0.0
    for seed in range(8):
        theta = {"t": torch.zeros(2, dtype=F64)}
        state, noise = outer.init(theta), normal(steps, 2, seed=seed)
        for step in range(steps):
            theta, state = outer.step(theta, {"t": of_theta(theta["t"], noise[step])}, state, step / steps)
        total += abs(float(theta["t"][0] - theta["t"][1])) / 8
    return total


def test_of_equal_sources_the_budget_makes_no_corner() -> None:
    short, long = (walked(DualAveraging(strength=20.0), steps) for steps in (20, 2000))
    assert long < short / 3
    assert walked(Adam(lr=0.05), 2000) > 2 * walked(Adam(lr=0.05), 20)


def test_a_weight_too_small_to_tell_moves_nothing() -> None:
    outer, theta = DualAveraging(), {"t": torch.tensor([0.0, -800.0], dtype=F64)}
    moved, _ = outer.step(theta, {"t": torch.tensor([0.0, 0.0], dtype=F64)}, outer.init(theta), 0.0)
    assert_same(moved["t"], theta["t"])


def pipeline(**parts: Any) -> Pipeline:
    from hgms_branches import Branches
    from hgms_selectors import BestOfN

    made = Branches(count=2, steps=3, optimizer="adamw", lr=0.02, batch_size=6)
    parts = {"hypergradient": Aligned(batch_size=12), "outer": DualAveraging(strength=10.0), **parts}
    return Pipeline(generator=made, selector=BestOfN(), **parts)


def test_the_source_that_validation_is_made_of_gains_and_a_long_junk_gradient_does_not() -> None:
    problem = convex_sources({"good": 1.0, "junk": 0.0})
    assert problem.sources is not None
    result = run(pipeline(), problem, "40 steps", seed=0)
    omega = dict(zip(problem.sources.names, problem.sources.weights(result.theta).tolist(), strict=True))
    assert omega["good"] > 0.9


def test_a_broken_off_run_goes_on_bit_for_bit() -> None:
    problem, method = network_sources(), pipeline()
    state = method.init(problem, 3)
    for _ in range(4):
        state, _ = method.step(problem, state, 0.0)
    halfway = method.init(problem, 3)
    for _ in range(2):
        halfway, _ = method.step(problem, halfway, 0.0)
    copy = torch.utils._pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, halfway)
    for _ in range(2):
        copy, _ = method.step(problem, copy, 0.0)
    for name, leaf in method.result(state)[0].items():
        assert torch.equal(leaf, method.result(copy)[0][name])
    assert math.isfinite(float(method.result(state)[0]["logits"].sum()))
