"""Hypergradients averaged over the candidates, against single ones and finite differences of
what they belong to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from support.field_problems import pipeline
from support.helpers import F64, KEY, assert_same, finite_differences, network_problem
from torch import Tensor

from hgms.generators.branches import Branches, Diversity
from hgms.hypergradients import Averaged, Implicit, OneStep, Unrolled
from hgms.optim import SGD
from hgms.outer import Sgd
from hgms.selectors import BestOfN, Worst
from hgms.solvers import CG
from hgms_core import Candidates, Problem, Selection, Tree

SMALL = network_problem(rows=12)
SELECT = SMALL.upper_data["select"]
PROBLEM = evolve(SMALL, upper_data={"differentiate": SELECT, "select": SELECT})
"""Scores and hypergradients are of the same rows, so that there is one function whose gradient
is looked for.
"""
THETA = PROBLEM.theta0
BRANCHES = Branches(
    count=5,
    steps=3,
    optimizer=SGD(lr=0.5),
    batch_size=5,
    diversity=Diversity(noise=0.5, noise_scale="relative"),
)


def candidates_at(theta: Tree) -> Candidates:
    return BRANCHES.propose(PROBLEM, theta, BRANCHES.init(PROBLEM, KEY), KEY)


def estimated(estimator: Averaged, selector: Any = None) -> Any:
    candidates = candidates_at(THETA)
    selection = (selector or BestOfN()).select(PROBLEM, THETA, candidates, KEY)
    state = estimator.init(PROBLEM)
    return estimator.estimate(PROBLEM, THETA, candidates, selection, KEY, state)[0]


def soft_minimum(scores: Tensor, temperature: float) -> Tensor:
    return -temperature * torch.logsumexp(-scores / temperature, 0)


FUNCTIONS: dict[str, tuple[dict[str, float], Callable[[Tensor], Tensor]]] = {
    "mean": ({}, lambda scores: scores.mean()),
    "superquantile": (
        {"level": 0.5},
        lambda s: (s.sort().values[:2].sum() + s.sort().values[2] / 2) / 2.5,
    ),
    "best": ({"level": 0.1}, lambda scores: scores.min()),
    "softmin": ({"temperature": 0.02}, lambda scores: soft_minimum(scores, 0.02)),
    "both": (
        {"level": 0.4, "temperature": 0.02},
        lambda scores: soft_minimum(scores.sort().values[:2], 0.02),
    ),
}


@pytest.mark.parametrize("of", FUNCTIONS)
def test_it_is_the_gradient_of_a_function_of_all_scores(of: str) -> None:
    """Whichever candidate the selector takes."""
    settings, function = FUNCTIONS[of]

    def value(theta: Tree) -> Tensor:
        return function(BestOfN().select(PROBLEM, theta, candidates_at(theta), KEY).scores)

    estimator = Averaged(estimator=Unrolled(), **settings)
    found = estimated(estimator).value
    assert_same(found, finite_differences(value, THETA), rtol=1e-5, atol=1e-9)
    assert_same(estimated(estimator, Worst()).value, found, rtol=1e-12, atol=1e-15)


def test_candidates_draw_batches_of_their_own_and_their_costs_add_up() -> None:
    """Of five equal candidates the mean of five draws, not five times the same."""
    single = Implicit(solver=CG(ridge=0.1), batch_size=4, upper_batch_size=3)
    equal = Candidates(x={name: leaf.expand(5, *leaf.shape) for name, leaf in PROBLEM.x0.items()})
    scores = Selection.of(torch.zeros(5, dtype=F64))
    mean: Any = Averaged(estimator=single).estimate(
        PROBLEM, THETA, equal, scores, KEY, {"v": None}
    )[0]
    draws = [
        single.estimate(
            PROBLEM, THETA, *equal.branch(torch.tensor(0)).as_candidates(), key, {"v": None}
        )[0]
        for key in (KEY, *(KEY.fold("candidate", rank) for rank in range(1, 5)))
    ]
    for name in THETA:
        expected = torch.stack([draw.value[name] for draw in draws]).mean(0)
        assert_same(mean.value[name], expected, rtol=1e-12, atol=1e-15)
    losses = torch.stack([draw.upper_loss for draw in draws])
    assert_same(mean.upper_loss, losses.mean(), rtol=1e-12)
    assert len(losses.unique()) == 5
    products = sum(draw.cost.products for draw in draws)
    assert mean.cost.products == mean.solution.products == products
    assert float(mean.solution.residual) == max(float(draw.solution.residual) for draw in draws)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "level"), [(1, 1.0), (4, 0.25)], ids=["one candidate", "only the best"]
)
def test_where_one_candidate_enters_a_run_is_that_of_the_estimator_alone(
    count: int, level: float
) -> None:
    alone = Implicit(solver=CG(ridge=0.1), batch_size=4, upper_batch_size=3, warm_start=True)
    ends = []
    for estimator in (alone, Averaged(estimator=alone, level=level)):
        method = pipeline(evolve(BRANCHES, count=count), BestOfN(), estimator, Sgd(lr=0.1))
        state = method.init(SMALL, seed=3)
        for _ in range(3):
            state, _ = method.step(SMALL, state)
        ends.append(state)
    assert_same(ends[1], ends[0])


def test_the_pipeline_hands_over_all_candidates() -> None:
    records = []
    for estimator in (Averaged(estimator=Unrolled()), Unrolled()):
        method = pipeline(BRANCHES, BestOfN(), estimator, Sgd(lr=0.1))
        records.append(method.step(PROBLEM, method.init(PROBLEM, seed=0))[1])
    mean, single = records
    assert mean["cost_upper_gradients"] == 5 * single["cost_upper_gradients"]
    assert mean["selected"] == single["selected"]
    assert not torch.equal(mean["hypergradient_norm"], single["hypergradient_norm"])


@pytest.mark.parametrize("settings", [{}, {"level": 0.5}, {"temperature": 0.1}], ids=str)
def test_a_candidate_that_is_not_finite_has_no_weight(settings: dict[str, float]) -> None:
    problem = Problem(
        theta0={"t": torch.zeros(1)},
        x0={"x": torch.zeros(1)},
        g=lambda t, x, _: 0.5 * ((x["x"] - t["t"]) ** 2).sum(),
        f=lambda t, x, _: x["x"].sum() * t["t"].sum(),
    )
    candidates = Candidates(x={"x": torch.tensor([[torch.nan], [2.0], [torch.inf], [2.0]])})
    scores = Selection.of(torch.tensor([torch.nan, 2.0, torch.nan, 2.0]))
    averaged = Averaged(estimator=OneStep(lr=0.5), **settings)
    found, _ = averaged.estimate(problem, problem.theta0, candidates, scores, KEY, {})
    assert found.value["t"].tolist() == [1.0]  # x⁺ = x/2, h = x⁺ at θ = 0
