"""Search without derivatives: what is proposed, what is kept, that it resumes, and how near it
comes.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from attrs import evolve
from support.field_problems import pipeline, run, tuned_penalty
from support.helpers import F64, assert_same, counted, network_problem, rejects

import hgms.runs
from hgms.generators.branches import Branches
from hgms.generators.search import Search
from hgms.hypergradients import Implicit
from hgms.outer import Sgd
from hgms.runs import RunConfig
from hgms.runs import traits as compat
from hgms.selectors import BestOfN, First
from hgms.solvers import CG
from hgms.tasks.sphere import Sphere
from hgms_core import Budget, MissingExtra, Problem, State, Tree

PROBLEM = network_problem()
SAMPLERS = ["random", "tpe"]
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS)


def search(sampler: str, **options: Any) -> Search:
    parts = {
        "generator": Branches(count=2, steps=3, lr=0.3, batch_size=6),
        "selector": BestOfN(),
        **options,
    }
    return Search(sampler=sampler, **parts)


def steps(
    method: Search, state: State, count: int, problem: Problem = PROBLEM
) -> tuple[State, list[dict[str, Any]]]:
    rows = []
    for _ in range(count):
        state, row = method.step(problem, state)
        rows.append(row)
    return state, rows


def test_two_steps_by_hand() -> None:
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
        generator=Branches(count=1, steps=1, lr=0.5), selector=First(), low=1.0, high=1.5
    )
    state, (first,) = steps(method, method.init(problem, 0), 1, problem)
    assert first["upper_loss"] == first["stop_loss"] == 1.0
    assert first["improved"]
    assert_same(method.result(state), ({"t": 0 * one}, {"x": 2 * one}))
    # The box [1, 1.5] lies beyond the projection: θ = 0.5, x = 2.25, f = 9/16.
    state, (second,) = steps(method, state, 1, problem)
    assert second["upper_loss"] == 0.5625
    assert_same(method.result(state), ({"t": 0.5 * one}, {"x": 2.25 * one}))
    # The next one is equal, not better; the lower run began at x0 again.
    state, (third,) = steps(method, state, 1, problem)
    assert third["upper_loss"] == 0.5625
    assert not third["improved"]
    assert third["oracle_calls"] == 3 * 2


@every_sampler
def test_proposals_fill_the_box(sampler: str) -> None:
    problem, _, _ = tuned_penalty()
    method = Search(
        generator=Branches(count=1, steps=1),
        selector=First(),
        sampler=sampler,
        low=-1.0,
        high=2.0,
        startup=200,
    )
    seen: list[float] = []

    def project(theta: Tree) -> Tree:
        seen.append(float(theta["log_penalty"]))
        return theta

    spied = evolve(problem, project=project)
    steps(method, method.init(spied, 0), 60, spied)
    assert seen[0] == 0.0
    assert -1 <= min(seen) < -0.5
    assert 1.5 < max(seen) <= 2
    assert len(set(seen)) == 60


@every_sampler
def test_two_runs_are_equal_and_a_saved_state_continues(sampler: str) -> None:
    method = search(sampler, startup=3)
    before = torch.random.get_rng_state()
    whole, rows = steps(method, method.init(PROBLEM, 4), 6)
    half, _ = steps(method, method.init(PROBLEM, 4), 4)
    again, tail = steps(method, copy.deepcopy(half), 2)
    assert_same(again, whole)
    assert [row["upper_loss"] for row in rows[4:]] == [row["upper_loss"] for row in tail]
    assert torch.equal(before, torch.random.get_rng_state())
    _, other = steps(method, method.init(PROBLEM, 5), 6)
    assert [row["upper_loss"] for row in other] != [row["upper_loss"] for row in rows]


@every_sampler
def test_what_is_kept_is_the_lowest(sampler: str) -> None:
    method = search(sampler, startup=2)
    state, rows = steps(method, method.init(PROBLEM, 0), 5)
    losses = [row["upper_loss"] for row in rows]
    assert [row["stop_loss"] for row in rows] == [min(losses[: end + 1]) for end in range(5)]
    theta, x = method.result(state)
    assert float(PROBLEM.f(theta, x, PROBLEM.upper_data["stop"].whole)) == min(losses)
    assert state["values"].numel() == (5 if sampler == "tpe" else 0)


@every_sampler
def test_a_training_run_that_breaks_down_is_only_a_bad_trial(sampler: str) -> None:
    def g(theta: Any, x: Any, batch: Any) -> torch.Tensor:
        return (
            PROBLEM.g(theta, x, batch)
            + torch.where(theta["scale"] > 0.2, torch.nan, 0.0) * x["b"].sum()
        )

    broken = evolve(PROBLEM, g=g)
    result = hgms.runs.run(search(sampler, startup=2), broken, Budget(outer_steps=8))
    losses = [row["upper_loss"] for row in result.records if row["step"]]
    assert None in losses  # what is not finite is written as nothing
    assert result.records[-1]["stop_loss"] == min(loss for loss in losses if loss is not None)
    assert float(result.theta["scale"]) <= 0.2


def test_the_counts_are_the_calls_that_happened() -> None:
    problem, calls = counted(PROBLEM)
    method = search(
        "random",
        generator=Branches(count=2, steps=3, batch_size=6, mode="loop"),
        selector=BestOfN(mode="loop"),
    )
    _, rows = steps(method, method.init(problem, 0), 3, problem)
    assert calls["g"] == rows[-1]["cost_lower_gradients"] == 18
    assert calls["f"] == rows[-1]["cost_upper_values"] == 9
    assert calls["g_rows"] + calls["f_rows"] == rows[-1]["cost_rows"]


def test_without_rows_to_stop_on_it_compares_on_those_to_select_on() -> None:
    data = {role: rows for role, rows in PROBLEM.upper_data.items() if role != "stop"}
    problem = evolve(PROBLEM, upper_data=data)
    method = search("random")
    state, (row,) = steps(method, method.init(problem, 0), 1, problem)
    assert row["upper_loss"] == float(PROBLEM.f(*method.result(state), data["select"].whole))


def test_tpe_is_refused_where_it_cannot_work() -> None:
    many = evolve(PROBLEM, theta0={"weights": torch.zeros(1001, dtype=F64)})
    with rejects("too-large", "method"):
        search("tpe").init(many, 0)
    search("random").init(many, 0)
    assert compat.needs(search("tpe")) == {"few-upper": "search"}
    assert "few-upper" in compat.TRAITS
    assert compat.needs(search("random")) == {}


def test_tpe_without_optuna_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with rejects("missing-package", of=MissingExtra) as caught:
        search("tpe").init(PROBLEM, 0)
    assert caught.value.install == "pip install 'hgms[optuna]'"


def test_optuna_is_left_as_talkative_as_it_was() -> None:
    import optuna

    before = optuna.logging.get_verbosity()
    method = search("tpe")
    steps(method, method.init(PROBLEM, 0), 3)
    assert optuna.logging.get_verbosity() == before


def test_a_box_has_an_inside() -> None:
    with rejects("out-of-range", "high"):
        search("random", low=1.0, high=1.0)


@pytest.mark.parametrize("name", ["random-search", "tpe"])
def test_the_compositions_are_searches(name: str) -> None:
    table = {
        "task": "quadratic",
        "method": {"name": name, "generator": {"steps": 5}, "low": -1.0},
        "budget": "3 steps",
    }
    config = RunConfig.from_dict(table)
    assert isinstance(config.method, Search)
    assert config.method.generator == Branches(
        count=2, steps=5, optimizer="adamw", lr=2e-2, batch_size=256, schedule="cosine"
    )
    assert RunConfig.from_toml(config.to_toml()) == config
    assert config.method_name == name


NEAR = {"random": 0.3, "tpe": 0.2}


@every_sampler
def test_it_comes_near_the_closed_form_optimum(sampler: str) -> None:
    problem, _, best = tuned_penalty()
    method = Search(
        generator=Branches(count=1, steps=30, lr=0.8), selector=First(), sampler=sampler
    )
    theta, _, _ = run(method, problem, 60)
    assert float(theta["log_penalty"]) == pytest.approx(best, abs=NEAR[sampler])


def test_a_hypergradient_beats_it_at_equal_calls() -> None:
    # 4 upper variables and a sphere of minimisers; both select among 8 branches, one follows a
    # hypergradient.
    problem = Sphere(k=3, d=6).problem(0, torch.device("cpu"), F64)
    branches = Branches(count=8, steps=20, lr=0.1, noise=0.3)
    guided = pipeline(
        branches, BestOfN(), Implicit(solver=CG(ridge=1e-2, max_steps=6)), Sgd(lr=0.2)
    )
    theta, x, record = run(guided, problem, 40)
    method = Search(generator=branches, selector=BestOfN(), low=-1.0, high=1.0)
    state = method.init(problem, 0)
    spent = 0
    while spent < record["oracle_calls"]:
        state, row = method.step(problem, state)
        spent = row["oracle_calls"]
    found = problem.evaluate(*method.result(state))["upper_gap"]
    assert problem.evaluate(theta, x)["upper_gap"] < 0.5 * found
