"""Selectors: invariances, ties, and candidates that must never be chosen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import F64, KEY, assert_same, network_problem
from torch import Tensor

from hgms.selectors import BestOfN, First, Worst
from hgms_core import Candidates, Cost, Problem, Tree, stack

SCORED = {"best-of-n": (BestOfN(), 1.0), "worst": (Worst(), -1.0)}
both = pytest.mark.parametrize("name", SCORED)
IDENTITY = Problem(
    theta0={},
    x0={"x": torch.zeros((), dtype=F64)},
    g=lambda t, x, _: x["x"],
    f=lambda t, x, _: x["x"],
)
NETWORK = network_problem()
bad = st.sampled_from([float("nan"), float("inf"), float("-inf")])
number = st.integers(-4, 4).map(float)


@both
@given(scores=st.lists(number | bad, min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_the_choice_is_the_first_best_finite_score(name: str, scores: list[float]) -> None:
    selector, sign = SCORED[name]
    x = {"x": torch.tensor(scores, dtype=F64)}
    found = selector.select(IDENTITY, {}, Candidates(x=x), KEY)
    ranked = sorted((sign * score, i) for i, score in enumerate(scores) if math.isfinite(score))
    assert int(found.finite) == len(ranked)
    assert int(found.index) in ([ranked[0][1]] if ranked else range(len(scores)))
    gap = ranked[1][0] - ranked[0][0] if len(ranked) > 1 else math.inf
    assert float(found.gap) == gap


@both
@given(order=st.permutations(range(5)))
@settings(max_examples=10, deadline=None)
def test_the_choice_moves_with_the_candidates(name: str, order: list[int]) -> None:
    selector, _ = SCORED[name]
    x = stack([{key: leaf + 0.1 * i**2 for key, leaf in NETWORK.x0.items()} for i in range(5)])
    plain = selector.select(NETWORK, NETWORK.theta0, Candidates(x=x), KEY)
    moved = selector.select(
        NETWORK, NETWORK.theta0, Candidates(x={key: leaf[order] for key, leaf in x.items()}), KEY
    )
    assert order[int(moved.index)] == int(plain.index)
    assert_same(moved.scores, plain.scores[order], rtol=1e-13)
    assert_same(moved.gap, plain.gap, rtol=1e-11)


@both
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_state_with_a_bad_number_and_a_finite_loss_is_no_candidate(
    name: str, value: float
) -> None:
    selector, sign = SCORED[name]
    problem = evolve(
        IDENTITY, x0={"x": torch.zeros((), dtype=F64), "dead": torch.zeros(2, dtype=F64)}
    )
    dead = torch.zeros(3, 2, dtype=F64)
    dead[0, 1] = value
    scores = sign * torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    found = selector.select(problem, {}, Candidates(x={"x": scores, "dead": dead}), KEY)
    assert (int(found.index), int(found.finite)) == (1, 2)
    assert bool(found.scores[0].isnan())


def test_first_takes_the_first_finite_state_and_scores_nothing() -> None:
    x = {"x": torch.tensor([1.0, torch.nan, 3.0, 0.0], dtype=F64), "y": torch.ones(4, 2, dtype=F64)}
    x["y"][0, 1] = torch.inf
    found = First().select(IDENTITY, {}, Candidates(x=x), KEY)
    assert (int(found.index), int(found.finite), found.cost) == (2, 2, Cost())
    none = First().select(IDENTITY, {}, Candidates(x={"x": torch.full((3,), torch.nan)}), KEY)
    assert int(none.finite) == 0


@both
def test_all_scores_come_from_one_batch_that_changes_with_the_key(name: str) -> None:
    selector = evolve(SCORED[name][0], batch_size=4, mode="loop")
    seen: list[tuple[int, ...]] = []

    def f(theta: Any, x: Any, batch: Any) -> torch.Tensor:
        seen.append(tuple(batch["index"].tolist()))
        return NETWORK.f(theta, x, batch)

    candidates = Candidates(x=stack([NETWORK.x0] * 3))
    problem = evolve(NETWORK, f=f)
    found = selector.select(problem, NETWORK.theta0, candidates, KEY)
    assert seen == [seen[0]] * 3
    assert (int(found.index), float(found.gap)) == (0, 0.0)
    assert found.cost == Cost(upper_values=3, rows=12)
    selector.select(problem, NETWORK.theta0, candidates, KEY.fold("next"))
    assert len(set(seen)) == 2


@both
@pytest.mark.parametrize(("mode", "chunk"), [("loop", None), ("stacked", None), ("stacked", 2)])
def test_scores_are_the_losses_on_the_rows_set_apart_for_selecting(
    name: str, mode: str, chunk: int | None
) -> None:
    states = [{key: leaf + 0.1 * i for key, leaf in NETWORK.x0.items()} for i in range(5)]
    selector = evolve(SCORED[name][0], mode=mode, chunk=chunk)
    found = selector.select(NETWORK, NETWORK.theta0, Candidates(x=stack(states)), KEY)
    rows = NETWORK.upper_data["select"].whole
    expected = torch.stack([NETWORK.f(NETWORK.theta0, x, rows) for x in states])
    assert_same(found.scores, expected, rtol=1e-13)


@pytest.mark.parametrize("selector", [BestOfN(), Worst()])
def test_scores_of_a_loss_that_vmap_cannot_evaluate_are_those_of_the_loop(selector: Any) -> None:
    def f(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        wide = x["w"].abs().max().item() > 0.8
        return NETWORK.f(theta, x, batch) * (2 if wide else 1)

    p = evolve(NETWORK, f=f)
    states = stack([{name: (1 + i) * leaf for name, leaf in p.x0.items()} for i in range(3)])
    found = selector.select(p, p.theta0, Candidates(x=states), KEY)
    loop = evolve(selector, mode="loop").select(p, p.theta0, Candidates(x=states), KEY)
    assert torch.equal(found.scores, loop.scores)
    assert int(found.index) == int(loop.index)
