"""Parts for the weights of data sources: `aligned` and `dual-averaging`, against loops and
closed forms of their own.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import scipy.optimize
import torch
from attrs import evolve
from support.helpers import F64, assert_same, normal, rejects
from support.source_problems import assert_goes_on, convex_sources, network_sources, weights

from hgms.hypergradients import Aligned
from hgms.outer import Adam, DualAveraging
from hgms.rows import mixture_slope
from hgms.runs import run
from hgms_core import Branch, Data, Estimate, Key, Pipeline, Problem, Tree

THETA = {"logits": torch.tensor([0.3, -0.2, 0.1], dtype=F64)}


def flat(tree: Tree, like: Tree) -> torch.Tensor:
    return torch.cat([tree[name].reshape(-1) for name in like])


def mean_gradient(problem: Problem, batch: Tree, source: int) -> torch.Tensor:
    """∇ of a source's mean loss on the batch, by the problem's own losses of examples."""
    assert problem.sources is not None
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in problem.x0.items()}
    rows = problem.sources.examples(leaves, batch)[batch["source"] == source]
    return flat(
        dict(zip(leaves, torch.autograd.grad(rows.mean(), list(leaves.values())), strict=True)),
        problem.x0,
    )


def directions(
    problem: Problem, batch: Tree, v: Tree | None, beta: float = 0.9, eps: float = 1e-3
) -> list[torch.Tensor]:
    units = []
    for source in range(3):
        g = mean_gradient(problem, batch, source)
        u = g if v is None else g / ((beta * flat(v, problem.x0) + (1 - beta) * g * g).sqrt() + eps)
        units.append(u / u.norm())
    return units


def upper_slope(problem: Problem) -> torch.Tensor:
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in problem.x0.items()}
    loss = problem.f({}, leaves, problem.upper_data["differentiate"].batch(None))
    return torch.cat(
        [grad.reshape(-1) for grad in torch.autograd.grad(loss, list(leaves.values()))]
    )


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
    cosines = torch.stack(
        [
            slope @ unit / slope.norm()
            for unit in directions(problem, problem.lower_data.batch(None), v)
        ]
    )
    omega = THETA["logits"].softmax(0)
    assert_same(
        estimate.value["logits"], -omega * (cosines - omega @ cosines), rtol=1e-10, atol=1e-12
    )
    assert (cosines.abs() > 0.01).all()
    assert (estimate.cost.lower_gradients, estimate.cost.upper_gradients) == (3, 1)


def test_it_is_the_derivative_along_a_step_of_equal_lengths() -> None:
    problem = network_sources()
    h = Aligned().estimate(problem, THETA, Branch(x=problem.x0), Key(0), {})[0].value["logits"]
    units = directions(problem, problem.lower_data.batch(None), None)
    slope = upper_slope(problem)
    start = flat(problem.x0, problem.x0)
    rate = 1e-6

    def after(logits: torch.Tensor) -> float:
        moved = start - rate * sum(w * u for w, u in zip(logits.softmax(0), units, strict=True))
        leaves = {}
        first = 0
        for name, leaf in problem.x0.items():
            leaves[name] = moved[first : first + leaf.numel()].reshape(leaf.shape)
            first += leaf.numel()
        return float(problem.f({}, leaves, problem.upper_data["differentiate"].batch(None)))

    for number in range(3):
        step = 0.05 * torch.eye(3, dtype=F64)[number]
        quotient = (after(THETA["logits"] + step) - after(THETA["logits"] - step)) / (
            0.1 * rate * float(slope.norm())
        )
        assert abs(quotient - float(h[number])) < 1e-3


def test_a_sources_length_does_not_matter() -> None:
    problem = network_sources()
    assert problem.sources is not None
    scale = torch.tensor([1.0, 1.0, 100.0], dtype=F64)
    losses = problem.sources.losses
    longer = evolve(
        problem, sources=evolve(problem.sources, losses=lambda x, batch: scale * losses(x, batch))
    )
    before, after = (
        Aligned().estimate(p, THETA, Branch(x=p.x0), Key(0), {})[0].value["logits"]
        for p in (problem, longer)
    )
    assert_same(before, after, rtol=1e-10, atol=1e-12)


def estimate_on(problem: Problem, sources: tuple[int, ...]) -> Estimate:
    """The estimate on a batch of all rows of these sources and no others."""
    everything = problem.lower_data.batch(None)
    member = torch.isin(everything["source"], torch.tensor(sources))
    some = Data.of({name: leaf[member] for name, leaf in everything.items() if name != "index"})
    return Aligned().estimate(
        evolve(problem, lower_data=some), THETA, Branch(x=problem.x0), Key(0), {}
    )[0]


def test_a_source_missing_from_a_batch_does_not_move() -> None:
    estimate = estimate_on(network_sources(), (0, 2))
    near, turned, noise = estimate.value["logits"].tolist()
    assert near == pytest.approx(-noise, rel=1e-12)
    assert abs(near) > 1e-3
    assert abs(turned) < 1e-15
    assert estimate.cost.lower_gradients == 2
    # there is nothing to compare
    assert float(estimate_on(network_sources(), (1,)).value["logits"].abs().max()) < 1e-15


@pytest.mark.parametrize("count", [2, 3])
def test_batches_without_some_sources_are_right_in_the_mean(count: int) -> None:
    """A batch of fewer rows than sources holds k of them, all such choices equally often."""
    problem = network_sources()
    parts = [
        estimate_on(problem, sources).value["logits"]
        for sources in itertools.combinations(range(3), count)
    ]
    whole = Aligned().estimate(problem, THETA, Branch(x=problem.x0), Key(0), {})[0].value["logits"]
    assert_same(torch.stack(parts).mean(0), whole, rtol=1e-10, atol=1e-12)


def test_a_gradient_that_is_not_finite_is_no_cosine_of_zero() -> None:
    problem = network_sources()
    assert problem.sources is not None
    infinite = torch.tensor([1.0, torch.inf, 1.0], dtype=F64)
    losses = problem.sources.losses
    broken = evolve(
        problem,
        sources=evolve(problem.sources, losses=lambda x, batch: infinite * losses(x, batch)),
    )
    value = Aligned().estimate(broken, THETA, Branch(x=problem.x0), Key(0), {})[0].value["logits"]
    assert bool(value.isnan().any())


def test_aligned_needs_sources() -> None:
    problem = evolve(network_sources(), sources=None)
    with rejects("not-supported", "hypergradient"):
        Aligned().estimate(problem, THETA, Branch(x=problem.x0), Key(0), {})
    with rejects("out-of-range", "batch_size"):
        Aligned(batch_size=1)  # of one source, with nothing to compare it with


def squares(theta: Tree) -> torch.Tensor:
    """Weights that are no softmax, of two leaves."""
    parts = torch.cat([theta["a"], theta["b"]]).square()
    return parts / parts.sum()


SQUARES = {
    "a": torch.tensor([0.9, -0.4], dtype=F64),
    "b": torch.tensor([0.3, 1.1, -0.7], dtype=F64),
}
VALUES = torch.tensor([0.8, -0.3, 0.1, 0.5, -0.6], dtype=F64)


def slope_of(present: list[int], *, redrawn: bool, theta: Tree = SQUARES) -> torch.Tensor:
    sources = network_sources().sources
    assert sources is not None
    member = torch.isin(torch.arange(5), torch.tensor(present))
    values = torch.where(member, VALUES, torch.nan)  # of a source that is missing nothing is known
    own = evolve(sources, names=tuple("vwxyz"), weights=squares)
    return flat(mixture_slope(own, theta, values, member, redrawn=redrawn), theta)


def quotients(values: torch.Tensor, theta: Tree = SQUARES) -> torch.Tensor:
    """−∂_θ Σ_s ω_s(θ) a_s by central differences, a held fixed."""
    rows = []
    h = 1e-6
    for name, leaf in theta.items():
        for number in range(len(leaf)):
            step = h * torch.eye(len(leaf), dtype=F64)[number]
            up, down = (squares({**theta, name: leaf + sign * step}) @ values for sign in (1, -1))
            rows.append((down - up) / (2 * h))
    return torch.stack(rows)


@pytest.mark.parametrize("redrawn", [False, True])
def test_a_mixtures_slope_is_that_of_finite_differences(redrawn: bool) -> None:
    assert_same(slope_of([0, 1, 2, 3, 4], redrawn=redrawn), quotients(VALUES), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_mixtures_slope_is_right_in_the_mean_over_batches(count: int) -> None:
    parts = [slope_of(list(some), redrawn=True) for some in itertools.combinations(range(5), count)]
    assert_same(torch.stack(parts).mean(0), quotients(VALUES), rtol=1e-7, atol=1e-9)


def test_a_source_without_rows_so_far_is_as_good_as_the_mean_of_the_others() -> None:
    omega = squares(SQUARES)
    there = torch.tensor([0, 1, 3])
    mean = omega[there] @ VALUES[there] / omega[there].sum()
    guessed = torch.full((5,), float(mean), dtype=F64).index_put((there,), VALUES[there])
    assert_same(slope_of([0, 1, 3], redrawn=False), quotients(guessed), rtol=1e-7, atol=1e-9)


def test_a_source_too_rare_for_a_row_changes_nothing_for_the_others() -> None:
    rare = {**SQUARES, "b": torch.tensor([0.3, 1.1, 1e-6], dtype=F64)}
    assert_same(
        slope_of([0, 1, 2, 3], redrawn=False, theta=rare),
        quotients(VALUES, rare),
        rtol=1e-5,
        atol=1e-5,
    )


def test_nothing_is_learned_from_no_source_or_one() -> None:
    for present in ([], [3]):
        for redrawn in (False, True):
            assert float(slope_of(present, redrawn=redrawn).abs().max()) < 1e-15


def of_theta(theta: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    omega = theta.softmax(0)
    return omega * (c - omega @ c)


def test_dual_averaging_is_least_loss_with_a_divergence_from_the_start() -> None:
    outer = DualAveraging(strength=3.0, prior_steps=2.0)
    start = {"t": normal(4, seed=3)}
    theta = start
    state = outer.init(start)
    rows = [normal(4, seed=10 + number) for number in range(5)]
    for c in rows:
        theta, state = outer.step(theta, {"t": of_theta(theta["t"], c)}, state, 0.0)
    mean = torch.stack(rows).sum(0) / (5 + 2)
    prior = start["t"].softmax(0)

    def objective(logits: Any) -> float:
        omega = torch.tensor(logits, dtype=F64).softmax(0)
        return float(omega @ mean + (omega * (omega / prior).log()).sum() / 3.0)

    best = scipy.optimize.minimize(objective, [0.0] * 4, method="BFGS", options={"gtol": 1e-10}).x
    assert_same(
        theta["t"].softmax(0), torch.tensor(best, dtype=F64).softmax(0), rtol=1e-5, atol=1e-6
    )


def walked(outer: Any, steps: int) -> float:
    """How far the weights of equal sources end from equality, on average over eight runs, when c
    is noise.
    """
    total = 0.0
    for seed in range(8):
        theta = {"t": torch.zeros(2, dtype=F64)}
        state = outer.init(theta)
        noise = normal(steps, 2, seed=seed)
        for step in range(steps):
            theta, state = outer.step(
                theta, {"t": of_theta(theta["t"], noise[step])}, state, step / steps
            )
        total += abs(float(theta["t"][0] - theta["t"][1])) / 8
    return total


def test_of_equal_sources_the_budget_makes_no_corner() -> None:
    short, long = (walked(DualAveraging(strength=20.0), steps) for steps in (20, 2000))
    assert long < short / 3
    assert walked(Adam(lr=0.05), 2000) > 2 * walked(Adam(lr=0.05), 20)


def test_a_weight_too_small_to_tell_moves_nothing() -> None:
    outer = DualAveraging()
    theta = {"t": torch.tensor([0.0, -800.0], dtype=F64)}
    moved, _ = outer.step(theta, {"t": torch.tensor([0.0, 0.0], dtype=F64)}, outer.init(theta), 0.0)
    assert_same(moved["t"], theta["t"])


def pipeline(**parts: Any) -> Pipeline:
    from hgms.generators.branches import Branches
    from hgms.selectors import BestOfN

    generator = Branches(count=2, steps=3, optimizer="adamw", lr=0.02, batch_size=6)
    parts = {
        "hypergradient": Aligned(batch_size=12),
        "outer": DualAveraging(strength=10.0),
        **parts,
    }
    return Pipeline(generator=generator, selector=BestOfN(), **parts)


def test_the_source_that_validation_is_made_of_gains_and_a_long_junk_gradient_does_not() -> None:
    problem = convex_sources({"good": 1.0, "junk": 0.0})
    assert problem.sources is not None
    result = run(pipeline(), problem, "40 steps", seed=0)
    assert float(weights(problem, result.theta)[0]) > 0.9


def test_a_broken_off_run_goes_on_bit_for_bit() -> None:
    problem = network_sources()
    method = pipeline()
    state = assert_goes_on(method, problem, most=4)
    assert float((weights(problem, method.result(state)[0]) - 1 / 3).abs().max()) > 1e-3
