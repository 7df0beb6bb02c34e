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
from support.field_problems import pipeline
from support.helpers import F64, assert_same, finite_differences, normal
from support.source_problems import assert_goes_on, convex_sources, network_sources, weights

from hgms.generators.branches import Branches
from hgms.hypergradients import Aligned
from hgms.optim import AdamW
from hgms.outer import DualAveraging
from hgms.rows import mixture_slope
from hgms.runs import run
from hgms.selectors import BestOfN
from hgms_core import Branch, Data, Estimate, Key, Problem, Sources, Tree

THETA = {"logits": torch.tensor([0.3, -0.2, 0.1], dtype=F64)}
PROBLEM = network_sources()


def aligned(problem: Problem = PROBLEM, aux: Tree | None = None, **options: Any) -> Estimate:
    branch = Branch(x=problem.x0, aux=aux or {})
    return Aligned(**options).estimate(problem, THETA, *branch.as_candidates(), Key(0), {})[0]


def gradient(loss: Any) -> torch.Tensor:
    """∇ of a function of x at the start, in one vector."""
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in PROBLEM.x0.items()}
    grads = torch.autograd.grad(loss(leaves), list(leaves.values()))
    return torch.cat([grad.reshape(-1) for grad in grads])


@pytest.mark.parametrize("with_moments", [False, True])
def test_aligned_is_the_cosine_of_each_source_in_adams_metric(with_moments: bool) -> None:
    sources: Any = PROBLEM.find(Sources)
    v = {f"v.{n}": normal(*leaf.shape, seed=9).square() for n, leaf in PROBLEM.x0.items()}
    size = torch.cat([leaf.reshape(-1) for leaf in v.values()])
    below = PROBLEM.lower_data.batch(None)
    above = PROBLEM.upper_data["differentiate"].batch(None)
    slope = gradient(lambda x: PROBLEM.f({}, x, above))
    cosines = []
    for source in range(3):
        member = below["source"] == source
        g = gradient(lambda x, member=member: sources.examples(x, below)[member].mean())
        u = g / ((0.9 * size + 0.1 * g * g).sqrt() + 1e-3) if with_moments else g
        cosines.append(slope @ u / (slope.norm() * u.norm()))
    omega, cosine = THETA["logits"].softmax(0), torch.stack(cosines)
    estimate = aligned(aux=v if with_moments else None, beta=0.9, eps=1e-3)
    expected = -omega * (cosine - omega @ cosine)
    assert_same(estimate.value["logits"], expected, rtol=1e-10, atol=1e-12)
    assert (cosine.abs() > 0.01).all()
    assert (estimate.cost.lower_gradients, estimate.cost.upper_gradients) == (3, 1)


def estimate_on(*present: int) -> Estimate:
    """The estimate on a batch of all rows of these sources and no others."""
    rows = PROBLEM.lower_data.batch(None)
    member = torch.isin(rows["source"], torch.tensor(present))
    some = Data.of({name: leaf[member] for name, leaf in rows.items() if name != "index"})
    return aligned(evolve(PROBLEM, lower_data=some))


@pytest.mark.parametrize("count", [2, 3])
def test_batches_without_some_sources_are_right_in_the_mean(count: int) -> None:
    """A batch of fewer rows than sources holds k of them, all such choices equally often; a source
    that is missing does not move.
    """
    estimates = {some: estimate_on(*some) for some in itertools.combinations(range(3), count)}
    values = {some: estimate.value["logits"] for some, estimate in estimates.items()}
    mean = torch.stack(list(values.values())).mean(0)
    assert_same(mean, aligned().value["logits"], rtol=1e-10, atol=1e-12)
    for some, value in values.items():
        assert (value.abs() > 1e-15).nonzero()[:, 0].tolist() == list(some)
        assert estimates[some].cost.lower_gradients == count
    # of one there is nothing to compare
    assert float(estimate_on(1).value["logits"].abs().max()) < 1e-15


# --- the slope of a mixture with weights that are no softmax, of two leaves


def squares(theta: Tree) -> torch.Tensor:
    parts = torch.cat([theta["a"], theta["b"]]).square()
    return parts / parts.sum()


SQUARES = {
    "a": torch.tensor([0.9, -0.4], dtype=F64),
    "b": torch.tensor([0.3, 1.1, -0.7], dtype=F64),
}
VALUES = torch.tensor([0.8, -0.3, 0.1, 0.5, -0.6], dtype=F64)


def slope_of(present: Any, *, redrawn: bool, theta: Tree = SQUARES) -> torch.Tensor:
    member = torch.isin(torch.arange(5), torch.tensor(list(present)))
    values = torch.where(member, VALUES, torch.nan)  # of a source that is missing nothing is known
    own = evolve(PROBLEM.find(Sources), names=tuple("vwxyz"), weights=squares)  # type: ignore[type-var]
    found = mixture_slope(own, theta, values, member, redrawn=redrawn)
    return torch.cat([found[name] for name in theta])


def quotients(values: torch.Tensor, theta: Tree = SQUARES) -> torch.Tensor:
    """−∂_θ Σ_s ω_s(θ) a_s by central differences, a held fixed."""
    found = finite_differences(lambda at: -(squares(at) @ values), theta)
    return torch.cat([found[name] for name in theta])


CLOSE = {"rtol": 1e-7, "atol": 1e-9}


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_a_mixtures_slope_is_that_of_finite_differences_in_the_mean_over_batches(
    count: int,
) -> None:
    some = itertools.combinations(range(5), count)
    mean = torch.stack([slope_of(present, redrawn=True) for present in some]).mean(0)
    assert_same(mean, quotients(VALUES), **CLOSE)
    assert_same(slope_of(range(5), redrawn=False), quotients(VALUES), **CLOSE)


def test_a_source_without_rows_so_far_is_as_good_as_the_mean_of_the_others() -> None:
    omega = squares(SQUARES)
    there = torch.tensor([0, 1, 3])
    mean = omega[there] @ VALUES[there] / omega[there].sum()
    guessed = torch.full((5,), float(mean), dtype=F64).index_put((there,), VALUES[there])
    assert_same(slope_of([0, 1, 3], redrawn=False), quotients(guessed), **CLOSE)
    # and one too rare for a row changes nothing for the others
    rare = {**SQUARES, "b": torch.tensor([0.3, 1.1, 1e-6], dtype=F64)}
    found = slope_of(range(4), redrawn=False, theta=rare)
    assert_same(found, quotients(VALUES, rare), rtol=1e-5, atol=1e-5)


# --- dual averaging


def steps(outer: Any, start: torch.Tensor, rows: Any) -> torch.Tensor:
    """θ after a step for each row of c = −∂F/∂ω."""
    theta = {"t": start}
    state = outer.init(theta)
    for number, c in enumerate(rows):
        omega = theta["t"].softmax(0)
        slope = {"t": omega * (c - omega @ c)}
        theta, state = outer.step(theta, slope, state, number / len(rows))
    return theta["t"]


def test_dual_averaging_is_least_loss_with_a_divergence_from_the_start() -> None:
    rows = normal(5, 4, seed=10)
    start = normal(4, seed=3)
    theta = steps(DualAveraging(strength=3.0, prior_steps=2.0), start, rows)
    mean, prior = rows.sum(0) / (5 + 2), start.softmax(0)

    def objective(logits: Any) -> float:
        omega = torch.tensor(logits, dtype=F64).softmax(0)
        return float(omega @ mean + (omega * (omega / prior).log()).sum() / 3.0)

    best = scipy.optimize.minimize(objective, [0.0] * 4, method="BFGS", options={"gtol": 1e-10}).x
    expected = torch.tensor(best, dtype=F64).softmax(0)
    assert_same(theta.softmax(0), expected, rtol=1e-5, atol=1e-6)
    # a weight too small to tell moves nothing
    corner = torch.tensor([0.0, -800.0], dtype=F64)
    assert_same(steps(DualAveraging(), corner, torch.zeros(1, 2, dtype=F64)), corner)


BRANCHES = Branches(count=2, steps=3, optimizer=AdamW(lr=0.02), batch_size=6)
METHOD = pipeline(BRANCHES, BestOfN(), Aligned(batch_size=12), DualAveraging(strength=10.0))


def test_the_source_that_validation_is_made_of_gains_and_a_long_junk_gradient_does_not() -> None:
    problem = convex_sources({"good": 1.0, "junk": 0.0})
    result = run(METHOD, problem, "25 steps", seed=0)
    assert float(weights(problem, result.theta)[0]) > 0.9


def test_a_broken_off_run_goes_on_bit_for_bit() -> None:
    state = assert_goes_on(METHOD, PROBLEM, most=4)
    assert float((weights(PROBLEM, METHOD.result(state)[0]) - 1 / 3).abs().max()) > 1e-3
