"""Hypergradients averaged over the candidates, against single ones and finite differences of
what they belong to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, KEY, assert_same, finite_differences, network_problem, rejects
from torch import Tensor

from hgms.generators.branches import Branches
from hgms.hypergradients import Averaged, Implicit, OneStep, Unrolled
from hgms.outer import Sgd
from hgms.selectors import BestOfN, First, Worst
from hgms.solvers import CG
from hgms_core import Candidates, Key, Pipeline, Problem, Selection, Tree

SMALL = network_problem(rows=12)
PROBLEM = evolve(
    SMALL,
    upper_data={"differentiate": SMALL.upper_data["select"], "select": SMALL.upper_data["select"]},
)
"""Scores and hypergradients are of the same rows, so that there is one function whose gradient
is looked for.
"""
THETA = PROBLEM.theta0
BRANCHES = Branches(count=5, steps=3, lr=0.5, batch_size=5, noise=0.5, noise_scale="relative")


def candidates_at(theta: Tree) -> Candidates:
    return BRANCHES.propose(PROBLEM, theta, BRANCHES.init(PROBLEM, KEY), KEY)


def scores_at(theta: Tree) -> Tensor:
    return BestOfN().select(PROBLEM, theta, candidates_at(theta), KEY).scores


def estimated(estimator: Averaged, key: Key = KEY) -> Any:
    candidates = candidates_at(THETA)
    selection = BestOfN().select(PROBLEM, THETA, candidates, KEY)
    return estimator.estimate_all(
        PROBLEM, THETA, candidates, selection, key, estimator.init(PROBLEM)
    )[0]


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
    settings, function = FUNCTIONS[of]
    expected = finite_differences(lambda theta: function(scores_at(theta)), THETA)
    assert_same(
        estimated(Averaged(estimator=Unrolled(), **settings)).value, expected, rtol=1e-5, atol=1e-9
    )


def test_it_is_the_mean_of_single_hypergradients() -> None:
    candidates = candidates_at(THETA)
    estimator = Implicit(solver=CG(ridge=0.1))
    single = [
        estimator.estimate(PROBLEM, THETA, candidates.branch(torch.tensor(i)), KEY, {"v": None})[0]
        for i in range(5)
    ]
    mean = estimated(Averaged(estimator=estimator))
    expected = {
        name: torch.stack([estimate.value[name] for estimate in single]).mean(0) for name in THETA
    }
    assert_same(mean.value, expected, rtol=1e-12, atol=1e-15)
    assert_same(
        mean.upper_loss,
        torch.stack([estimate.upper_loss for estimate in single]).mean(),
        rtol=1e-12,
    )
    assert (
        mean.cost.products
        == mean.solution.products
        == sum(estimate.cost.products for estimate in single)
    )
    assert float(mean.residual) == max(float(estimate.residual) for estimate in single)


def test_candidates_draw_batches_of_their_own() -> None:
    # Of five equal candidates the mean of five draws, not five times the same.
    batches = Implicit(solver=CG(ridge=0.1), batch_size=4, upper_batch_size=3)
    candidates = Candidates(
        x={name: leaf.expand(5, *leaf.shape) for name, leaf in PROBLEM.x0.items()}
    )
    selection = Selection.of(torch.zeros(5, dtype=F64))
    mean, _ = Averaged(estimator=batches).estimate_all(
        PROBLEM, THETA, candidates, selection, KEY, {"v": None}
    )
    branch = candidates.branch(torch.tensor(0))
    keys = [KEY, *(KEY.fold("candidate", rank) for rank in range(1, 5))]
    draws = [
        batches.estimate(PROBLEM, THETA, branch, key, {"v": None})[0].value["weights"]
        for key in keys
    ]
    assert_same(mean.value["weights"], torch.stack(draws).mean(0), rtol=1e-12)
    assert not torch.allclose(draws[0], draws[1])


@pytest.mark.parametrize(
    ("count", "level"), [(1, 1.0), (4, 0.25)], ids=["one candidate", "only the best"]
)
def test_where_one_candidate_enters_a_run_is_that_of_the_estimator_alone(
    count: int, level: float
) -> None:
    alone = Implicit(solver=CG(ridge=0.1), batch_size=4, upper_batch_size=3, warm_start=True)
    ends = []
    for estimator in (alone, Averaged(estimator=alone, level=level)):
        generator = evolve(BRANCHES, count=count)
        method = Pipeline(
            generator=generator, selector=BestOfN(), hypergradient=estimator, outer=Sgd(lr=0.1)
        )
        state = method.init(SMALL, seed=3)
        for _ in range(3):
            state, _ = method.step(SMALL, state)
        ends.append(state)
    assert_same(ends[1], ends[0])


def test_the_pipeline_hands_over_all_candidates() -> None:
    method = Pipeline(
        generator=BRANCHES,
        selector=BestOfN(),
        hypergradient=Averaged(estimator=Unrolled()),
        outer=Sgd(lr=0.1),
    )
    _, record = method.step(PROBLEM, method.init(PROBLEM, seed=0))
    alone = evolve(method, hypergradient=Unrolled())
    _, single = alone.step(PROBLEM, alone.init(PROBLEM, seed=0))
    assert record["cost_upper_gradients"] == 5 * single["cost_upper_gradients"]
    assert record["selected"] == single["selected"]
    assert not torch.equal(record["hypergradient_norm"], single["hypergradient_norm"])


@pytest.mark.parametrize(
    "settings", [{}, {"level": 0.5}, {"temperature": 0.1}], ids=["mean", "level", "temperature"]
)
def test_a_candidate_that_is_not_finite_has_no_weight(settings: dict[str, float]) -> None:
    problem = Problem(
        theta0={"t": torch.zeros(1)},
        x0={"x": torch.zeros(1)},
        g=lambda t, x, _: 0.5 * ((x["x"] - t["t"]) ** 2).sum(),
        f=lambda t, x, _: x["x"].sum() * t["t"].sum(),
    )
    candidates = Candidates(x={"x": torch.tensor([[torch.nan], [2.0], [torch.inf], [2.0]])})
    scores = torch.tensor([torch.nan, 2.0, torch.nan, 2.0])
    value, _ = Averaged(estimator=OneStep(lr=0.5), **settings).estimate_all(
        problem, problem.theta0, candidates, Selection.of(scores), KEY, {}
    )
    assert value.value["t"].tolist() == [1.0]  # x⁺ = x/2, h = x⁺ at θ = 0


@pytest.mark.parametrize(
    "settings", [{"level": 0.5}, {"temperature": 0.1}], ids=["level", "temperature"]
)
def test_weights_from_scores_need_a_selector_with_scores(settings: dict[str, float]) -> None:
    candidates = candidates_at(THETA)
    selection = First().select(PROBLEM, THETA, candidates, KEY)
    with rejects("not-supported", "selector"):
        Averaged(estimator=OneStep(), **settings).estimate_all(
            PROBLEM, THETA, candidates, selection, KEY, {}
        )
    mean = Averaged(estimator=Unrolled()).estimate_all(
        PROBLEM, THETA, candidates, selection, KEY, {}
    )[0]
    assert_same(mean.value, estimated(Averaged(estimator=Unrolled())).value, rtol=1e-12, atol=1e-15)


def test_weights_look_at_scores_whatever_the_selector_takes() -> None:
    candidates = candidates_at(THETA)
    best = Averaged(estimator=Unrolled(), level=0.2)
    selection = Worst().select(PROBLEM, THETA, candidates, KEY)
    at_worst = best.estimate_all(PROBLEM, THETA, candidates, selection, KEY, {})[0]
    assert_same(at_worst.value, estimated(best).value)


@pytest.mark.parametrize("level", [0.0, 1.1, -1.0])
def test_a_level_is_a_share(level: float) -> None:
    with rejects("out-of-range", "level"):
        Averaged(estimator=OneStep(), level=level)
