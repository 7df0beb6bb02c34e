"""What holds for every method that chooses rows or mixtures, the contributed ones among them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import assert_same, counted, network_problem, rejects
from support.source_problems import (
    assert_goes_on,
    assert_shares,
    by_torch,
    language_sources,
    network_sources,
    on_rows,
    stepped,
    through,
    watched,
    with_looks,
    without_rows,
)

from hgms.outer import DualAveraging
from hgms.selectors import First
from hgms_core import ConfigError, Data, NumericalError, Pipeline, Problem, Sources, State
from hgms_core.capabilities import Finishes, find
from hgms_mix.contrib import Aioli, OpMix, SkillIt
from hgms_mix.methods.fastmix import FastMix
from hgms_mix.methods.less import GradientProjection, Less, Warmup
from hgms_mix.methods.online import AlignedMeans, DoGE, DoReMi, MixtureBranches
from hgms_mix.methods.random_rows import RandomRows
from hgms_mix.methods.rds import Rds
from hgms_mix.methods.regmix import RegMix
from hgms_mix.methods.rho_loss import Reference, RhoLoss

PROBLEM = with_looks(network_sources())
ADAMW: dict[str, Any] = {"lr": 0.02, "batch_size": 7}
WARMUP = Warmup(share=0.5, epochs=2)
LESS = Less(**ADAMW, warmup=WARMUP, chunk=7, projection=None, keep=0.2)
REFERENCE = Reference(epochs=2, lr=0.02)
RHO = RhoLoss(**ADAMW, reference=REFERENCE, chunk=9, keep=0.2)
REGMIX = RegMix(**ADAMW, runs=4, steps=7, updates=3, simulated=200, top=10, chunk=5)
RDS = Rds(**ADAMW, chunk=7, keep=0.2, train_steps=3)
DOREMI = DoReMi(**ADAMW, steps=7, updates=3, eta=3.0, smoothing=0.05, prior="rows")
DOGE = DoGE(**ADAMW, steps=7, updates=3, rate=0.7, validation_batch_size=4, max_norm=0.8)
ROUNDS: dict[str, Any] = {**ADAMW, "updates": 3, "chunk": 4}
AIOLI = Aioli(**ROUNDS, rounds=2, round_steps=4, sweeps=2, sweep_steps=3, focus=0.6, eta=2.0)
FASTMIX = FastMix(**ADAMW, updates=2, outer_lr=0.1, upper_batch_size=5)
METHODS: dict[str, Any] = {
    "less": LESS,
    "less-projected": evolve(LESS, projection=GradientProjection(dims=16), train_steps=4),
    "rho-loss": evolve(RHO, target_steps=3, train_steps=3),
    "rho-loss-online": evolve(RHO, mode="online", train_steps=4, big_batch=9),
    "regmix": REGMIX,
    "regmix-boosting": evolve(REGMIX, regressor="boosting", train_steps=4),
    "rds": RDS,
    "rds-sets": evolve(RDS, turns="sets", chunk=100, train_steps=0),
    "fastmix": FASTMIX,
    "random-rows": RandomRows(**ADAMW, updates=2, train_steps=6),
    "doremi": DOREMI,
    "doremi-to-the-end": DoReMi(**ADAMW, steps=4, updates=3, train_steps=5),
    "doge": DOGE,
    "doge-sources": evolve(DOGE, target="sources", bounds=(-1.0, 0.4), train_steps=4),
    "hg-ms-online": Pipeline(
        generator=MixtureBranches(lr=0.05, batch_size=9, steps=2, tilt=0.5, upper_batch_size=4),
        selector=First(),
        hypergradient=AlignedMeans(),
        outer=DualAveraging(strength=30.0, prior_steps=2.0, decay=0.7),
    ),
    "op-mix": OpMix(**ROUNDS, steps=5, candidates=5, train_steps=4, own=1.0),
    "skill-it": SkillIt(**ROUNDS, graph_steps=5, round_steps=7, rounds=3, window=2, eta=0.8),
    "aioli": AIOLI,
    "aioli-average": evolve(AIOLI, sweeps=1, average=0.3),
}
SLOW = {"regmix-boosting"}
every_method = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extended] * (name in SLOW)) for name in METHODS]
)
CONTRIBUTED = ["op-mix", "skill-it", "aioli", "aioli-average"]


def ended(method: Any, problem: Problem) -> tuple[State, dict[str, Any]]:
    """After the last step, or after four of a method that does not end."""
    ends = find(method, Finishes) is not None
    return list(through(method, problem) if ends else stepped(method, problem, 4))[-1]


@every_method
def test_a_state_read_back_goes_on_bit_for_bit(name: str) -> None:
    method = METHODS[name]
    if find(method, Finishes) is None:
        assert_goes_on(method, PROBLEM, most=5)
        return
    state = assert_goes_on(method, PROBLEM)
    assert method.is_finished(state)
    after, _ = method.step(PROBLEM, state)
    assert_same(after["theta"], state["theta"])  # nothing is left to do


@every_method
def test_it_begins_at_the_prior_and_needs_sources(name: str) -> None:
    method = METHODS[name]
    state = method.init(PROBLEM, 3)
    if name != "hg-ms-online":
        assert_shares(PROBLEM, method, state, [5, 3, 2] if name == "random-rows" else [1, 1, 1])
        assert_same(method.result(state)[1], PROBLEM.x0)
    with rejects("not-supported", "problem", "sources", of=ConfigError):
        method.init(network_problem(), 0)


@pytest.mark.parametrize("name", ["less", "rho-loss", "rds", "random-rows", "doremi", "doge"])
def test_x_is_trained_on_the_rows_that_were_chosen_by_adamw(name: str) -> None:
    """A fresh x: on the kept rows, epoch by epoch, or on rows drawn by the mixture."""
    method = evolve(METHODS[name], train_steps=5, weight_decay=0.1)
    problem, seen = watched(PROBLEM)
    *_, (state, _) = through(method, problem)
    batches = seen["pool"][-5:]
    x = by_torch(PROBLEM.x0, on_rows(PROBLEM, batches), weight_decay=0.1)[-1]
    assert_same(method.result(state)[1], x, rtol=1e-9, atol=1e-11)
    assert (method.is_finished(state), method.placeholder_reason) == (True, "")
    if "kept" in state:
        assert sorted(torch.cat(batches[:2]).tolist()) == sorted(state["kept"].tolist())


@pytest.mark.parametrize("name", ["less", "rho-loss", "rds"])
@pytest.mark.parametrize(
    ("options", "count"), [({"keep": 0.2}, 8), ({"size": 11}, 11), ({"keep": 0.001}, 1)]
)
def test_the_highest_rows_are_kept_and_make_the_mixture(
    name: str, options: dict[str, Any], count: int
) -> None:
    method = evolve(METHODS[name], train_steps=0, **options)
    *_, (state, _) = through(method, PROBLEM)
    order = method.ranking(PROBLEM, state).argsort(descending=True)
    assert sorted(state["kept"].tolist()) == sorted(order[:count].tolist())
    sources = PROBLEM.lower_data.whole["source"][state["kept"]]
    assert_shares(PROBLEM, method, state, torch.bincount(sources, minlength=3))


SPEAKING = ["rho-loss", "rds", "random-rows", "doremi", "doge", "hg-ms-online", *CONTRIBUTED[:3]]


@pytest.mark.parametrize("name", SPEAKING)
def test_a_language_model(name: str) -> None:
    problem = language_sources(2)
    state, row = stepped(METHODS[name], problem, 3)[-1]
    assert row.get("lower_loss") is None or math.isfinite(row["lower_loss"])
    assert float(problem.find(Sources).weights(state["theta"]).sum()) == pytest.approx(1)


COSTS: list[tuple[Any, dict[str, int], dict[str, int]]] = [
    # Two epochs of three updates; each then scores 40 rows of the pool and 9 of validation. Passes
    # are updates and six chunks of the pool; two chunks of the validation rows.
    (
        LESS,
        {
            "cost_lower_gradients": 2 * 3 + 2 * 40,
            "cost_upper_gradients": 2 * 9,
            "oracle_calls": 2 * 3 + 2 * 49,
            "cost_rows": 2 * 20 + 2 * 49,
        },
        {"pooled": 2 * 3 + 2 * 6, "f": 2 * 2},
    ),
    # 9 and 40 rows, 7 at a time; then five updates on seven rows
    (
        evolve(RDS, train_steps=5, size=7, batch_size=3),
        {
            "cost_lower_gradients": 5,
            "cost_upper_values": 2 + 6,
            "cost_rows": 9 + 40 + 3 + 3 + 1 + 3 + 3,
        },
        {"pooled": 5},
    ),
    # held-out looks, and six chunks of the pool twice
    (
        evolve(
            RHO,
            reference=Reference(rows="validation", epochs=3, lr=0.02),
            train_steps=5,
            target_steps=2,
            batch_size=4,
            chunk=7,
        ),
        {
            "cost_upper_gradients": 9,
            "cost_lower_gradients": 2 + 5,
            "cost_upper_values": 4 + 2 * 6,
            "cost_rows": 3 * 9 + 4 * 7 + 2 * 40 + 7 * 4,
        },
        {"f": 9, "pooled": 2 + 5},
    ),
]


@pytest.mark.parametrize(("method", "costs", "calls"), COSTS, ids=["less", "rds", "rho-loss"])
def test_costs_are_what_was_called(
    method: Any, costs: dict[str, int], calls: dict[str, int]
) -> None:
    problem, called = counted(PROBLEM)
    _, row = ended(method, problem)
    assert {name: row[name] for name in costs} == costs
    assert {name: called[name] for name in calls} == calls


@every_method
def test_losses_that_are_not_finite_stop_the_first_step(name: str) -> None:
    x0 = {leaf: value * torch.nan for leaf, value in PROBLEM.x0.items()}
    problem = evolve(PROBLEM, x0=x0)
    with rejects("not-finite", of=NumericalError):
        METHODS[name].step(problem, METHODS[name].init(problem, 3))


@pytest.mark.parametrize("name", ["rho-loss", "regmix", "fastmix", "doge", *CONTRIBUTED])
def test_validation_rows_without_a_finite_loss_stop_the_run(name: str) -> None:
    upper = {
        role: Data.of({**data.whole, "y": data.whole["y"] * torch.nan})
        for role, data in PROBLEM.upper_data.items()
    }
    problem = evolve(PROBLEM, upper_data=upper)
    method = (
        evolve(RHO, reference=evolve(REFERENCE, rows="validation"))
        if name == "rho-loss"
        else METHODS[name]
    )
    with rejects("not-finite", of=NumericalError):
        ended(method, problem)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("rho-loss", "stop"),
        ("regmix", "select"),
        ("rds", "differentiate"),
        ("fastmix", "differentiate"),
        ("doge", "differentiate"),
        ("op-mix", "select"),
        *((name, "differentiate") for name in CONTRIBUTED[1:]),
    ],
)
def test_a_role_needs_rows(name: str, role: str) -> None:
    with rejects("no-rows-for-role", "problem", "upper_data", role, of=ConfigError):
        METHODS[name].init(without_rows(PROBLEM, role), 0)


@pytest.mark.parametrize(
    ("method", "code", "options"),
    [
        (Less, "out-of-range", {"keep": 0.0}),
        (Less, "out-of-range", {"keep": 1.5}),
        (Less, "out-of-range", {"betas": (0.9, 1.0)}),
        (Less, "out-of-range", {"train_steps": -1}),
        (RhoLoss, "conflicting-options", {"train_steps": 0, "mode": "online"}),
        (RhoLoss, "out-of-range", {"top": 1.5}),
        (RhoLoss, "unknown-choice", {"mode": "offline"}),
        (RegMix, "out-of-range", {"runs": 2}),
        (RegMix, "wrong-value", {"concentration": (2.0, 1.0)}),
        (RegMix, "out-of-range", {"top": 201, "simulated": 200}),
        (RegMix, "unknown-choice", {"regressor": "forest"}),
        (Rds, "unknown-choice", {"turns": "tasks"}),
        (Rds, "out-of-range", {"chunk": 0}),
        (FastMix, "wrong-value", {"leaves": "("}),
        (FastMix, "out-of-range", {"updates": 0}),
        (FastMix, "out-of-range", {"outer_betas": (0.5, 1.0)}),
        (FastMix, "out-of-range", {"outer_lr": 0.0}),
        (DoGE, "wrong-value", {"bounds": (1.0, 1.0)}),
        (DoReMi, "out-of-range", {"smoothing": 2.0}),
        (OpMix, "out-of-range", {"kl": 0.0}),
        (OpMix, "out-of-range", {"own": 1.5}),
        (OpMix, "out-of-range", {"steps": 0}),
        (OpMix, "out-of-range", {"candidates": 3}),
        (Aioli, "out-of-range", {"average": 1.0}),
    ],
)
def test_wrong_settings_are_refused(method: Any, code: str, options: dict[str, Any]) -> None:
    with rejects(code, of=ConfigError) as caught:
        method(**options)
    assert caught.value.place[0] == next(iter(options))
