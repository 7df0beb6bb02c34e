"""Search without derivatives: what is proposed, what is kept, and how near it comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from support.field_problems import run, tuned_penalty
from support.helpers import F64, assert_same, counted, network_problem

import hgms.runs
from hgms.config import Budget
from hgms.generators.branches import Branches
from hgms.generators.search import Search
from hgms.optim import SGD
from hgms.selectors import BestOfN, First
from hgms_core import Problem, State, Tree

PROBLEM = network_problem()
every_sampler = pytest.mark.parametrize("sampler", ["random", "tpe"])


def search(sampler: str, **options: Any) -> Search:
    generator = Branches(count=2, steps=3, optimizer=SGD(lr=0.3), batch_size=6)
    return Search(**{"generator": generator, "selector": BestOfN(), "sampler": sampler, **options})


def steps(
    method: Search, state: State, count: int, problem: Problem = PROBLEM
) -> tuple[State, list[dict[str, Any]]]:
    rows = []
    for _ in range(count):
        state, row = method.step(problem, state)
        rows.append(row)
    return state, rows


def test_three_steps_by_hand() -> None:
    # x ← x/2 + θ/2 from x0 = 4, f = (x − 3)². θ0 = 0 gives x = 2 and f = 1; a further θ gives x = 2
    # + θ/2, f = (θ/2 − 1)².
    one = torch.ones(1, dtype=F64)
    problem = Problem(
        theta0={"t": 0 * one},
        x0={"x": 4 * one},
        g=lambda t, x, _: 0.5 * (x["x"] - t["t"]).square().sum(),
        f=lambda t, x, _: (x["x"] - 3).square().sum(),
        project=lambda theta: {"t": theta["t"].clamp(max=0.5)},
    )
    method = Search(
        generator=Branches(count=1, steps=1, optimizer=SGD(lr=0.5)),
        selector=First(),
        low=1.0,
        high=1.5,
    )
    # The box [1, 1.5] lies beyond the projection: θ = 0.5, x = 2.25, f = 9/16. The third one is
    # equal, not better; the lower run began at x0 again.
    state = method.init(problem, 0)
    for theta, loss, better in ((0.0, 1.0, True), (0.5, 0.5625, True), (0.5, 0.5625, False)):
        state, [row] = steps(method, state, 1, problem)
        assert (row["upper_loss"], row["stop_loss"], row["improved"]) == (loss, loss, better)
        assert_same(method.result(state), ({"t": theta * one}, {"x": (2 + theta / 2) * one}))
    assert row["oracle_calls"] == 3 * 2


@every_sampler
def test_proposals_fill_the_box(sampler: str) -> None:
    problem, _, _ = tuned_penalty()
    seen: list[float] = []

    def project(theta: Tree) -> Tree:
        seen.append(float(theta["log_penalty"]))
        return theta

    spied = evolve(problem, project=project)
    generator = Branches(count=1, steps=1)
    method = search(sampler, generator=generator, selector=First(), low=-1.0, high=2.0, startup=200)
    steps(method, method.init(spied, 0), 40, spied)
    assert seen[0] == 0.0
    assert -1 <= min(seen) < -0.5
    assert 1.5 < max(seen) <= 2
    assert len(set(seen)) == 40


@every_sampler
@pytest.mark.parametrize("role", ["stop", "select"])
def test_what_is_kept_is_the_lowest(sampler: str, role: str) -> None:
    """On the rows to stop on, or without them on those to select on."""
    data = {name: rows for name, rows in PROBLEM.upper_data.items() if name in (role, "select")}
    problem = evolve(PROBLEM, upper_data=data)
    method = search(sampler, startup=2)
    state, rows = steps(method, method.init(problem, 0), 5, problem)
    losses = [row["upper_loss"] for row in rows]
    assert [row["stop_loss"] for row in rows] == [min(losses[: end + 1]) for end in range(5)]
    assert float(PROBLEM.f(*method.result(state), data[role].whole)) == min(losses)
    assert state["values"].numel() == (5 if sampler == "tpe" else 0)


@every_sampler
def test_a_training_run_that_breaks_down_is_only_a_bad_trial(sampler: str) -> None:
    def g(theta: Any, x: Any, batch: Any) -> torch.Tensor:
        broken = torch.where(theta["scale"] > 0.2, torch.nan, 0.0) * x["b"].sum()
        return PROBLEM.g(theta, x, batch) + broken

    result = hgms.runs.run(search(sampler, startup=2), evolve(PROBLEM, g=g), Budget(outer_steps=8))
    losses = [row["upper_loss"] for row in result.records if row["step"]]
    assert None in losses  # what is not finite is written as nothing
    assert result.records[-1]["stop_loss"] == min(loss for loss in losses if loss is not None)
    assert float(result.theta["scale"]) <= 0.2


def test_the_counts_are_the_calls_that_happened() -> None:
    problem, calls = counted(PROBLEM)
    generator = Branches(count=2, steps=3, batch_size=6, mode="loop")
    method = search("random", generator=generator, selector=BestOfN(mode="loop"))
    _, rows = steps(method, method.init(problem, 0), 3, problem)
    assert calls["g"] == rows[-1]["cost_lower_gradients"] == 18
    assert calls["f"] == rows[-1]["cost_upper_values"] == 9
    assert calls["g_rows"] + calls["f_rows"] == rows[-1]["cost_rows"]


@pytest.mark.extended
@every_sampler
def test_it_comes_near_the_closed_form_optimum(sampler: str) -> None:
    problem, _, best = tuned_penalty()
    generator = Branches(count=1, steps=12, optimizer=SGD(lr=0.8))
    method = Search(generator=generator, selector=First(), sampler=sampler)
    theta, _, _ = run(method, problem, 60 if sampler == "random" else 40)
    near = {"random": 0.3, "tpe": 0.2}[sampler]
    assert float(theta["log_penalty"]) == pytest.approx(best, abs=near)
