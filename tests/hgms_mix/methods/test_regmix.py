"""RegMix: the mixtures drawn, the proxy runs, the regression, and the best mixture of a problem
where it is known.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.helpers import F64, assert_same, counted, normal
from support.source_problems import (
    assert_shares,
    at_mixture,
    by_torch,
    convex_sources,
    network_sources,
    through,
    watched,
    weights,
)

from hgms_core import Key, Sources
from hgms_mix.methods.regmix import RegMix
from hgms_mix.methods.regmix.regression import best, draw_mixtures, fit

PROBLEM = network_sources()


def regmix(**options: Any) -> RegMix:
    settings = {
        "runs": 4,
        "steps": 7,
        "updates": 3,
        "lr": 0.02,
        "batch_size": 6,
        "simulated": 200,
        "top": 10,
        "chunk": 5,
    }
    return RegMix(**(settings | options))


@pytest.mark.extended
@pytest.mark.parametrize(("regressor", "within"), [("quadratic", 0.05), ("boosting", 0.3)])
def test_the_best_mixture_is_found(regressor: str, within: float) -> None:
    # The lower solution at ω is ω itself and f = ½‖ω − best‖² up to a constant: a quadratic.
    known = {"first": 0.6, "second": 0.3, "third": 0.1}
    problem = convex_sources(known)
    sizes = {"runs": 40, "steps": 60, "updates": 60, "simulated": 20_000, "top": 20}
    method = regmix(**sizes, lr=0.05, batch_size=None, regressor=regressor)
    *_, (state, row) = through(method, problem)
    results = weights(problem, method.result(state)[0])
    assert float((results - torch.tensor(list(known.values()), dtype=F64)).abs().sum()) < within
    if regressor == "quadratic":
        assert row["regression_error"] < 1e-2


def test_a_line_has_its_minimum_in_a_corner() -> None:
    mixtures = draw_mixtures(Key(0), 50, (1 / 3,) * 3, (0.1, 5.0))
    losses = mixtures @ torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    line = fit(mixtures, losses, "linear", 0)
    assert_same(line(mixtures), losses, rtol=0, atol=1e-5)
    omega, predicted = best(line, mixtures, top=3)
    assert_same(omega, mixtures[losses.argsort()[:3]].mean(0))
    assert predicted == pytest.approx(float(losses.sort().values[:3].mean()), abs=1e-4)


def test_quadratic_features_fit_a_quadratic() -> None:
    train = draw_mixtures(Key(0), 60, (0.25,) * 4, (0.5, 5.0))
    test = draw_mixtures(Key(1), 60, (0.25,) * 4, (0.5, 5.0))
    losses, expected = (((omega @ normal(4, 4)) * omega).sum(1) for omega in (train, test))
    line, quadratic = (fit(train, losses, kind, 0)(test) for kind in ("linear", "quadratic"))
    assert_same(quadratic, expected, atol=1e-3)
    assert (line - expected).abs().max() > 0.05


def test_mixtures_are_dirichlet_draws() -> None:
    draw = draw_mixtures(Key(1), 4000, (0.7, 0.2, 0.1), (0.1, 5.0))
    assert_same(draw.mean(0), torch.tensor([0.7, 0.2, 0.1], dtype=F64), atol=0.02)
    assert float((draw[:, 0] > 0.99).double().mean()) > 0.1  # some hold one source only
    # Var ω_s = p(1 − p)/(1 + c·S) at one c.
    item = draw_mixtures(Key(2), 4000, (0.5, 0.5), (3.0, 3.0))
    assert float(item[:, 0].var()) == pytest.approx(0.25 / 7, rel=0.1)
    assert_same(draw.sum(1), torch.ones(4000, dtype=F64), rtol=1e-12)


@pytest.mark.parametrize(
    ("prior", "expected"), [("uniform", [1 / 3] * 3), ("rows", [0.5, 0.3, 0.2])]
)
def test_the_prior_is_of_sources_or_of_rows(prior: str, expected: list[float]) -> None:
    mixtures = regmix(runs=3000, prior=prior).init(PROBLEM, 0)["mixtures"]
    assert_same(mixtures.mean(0), torch.tensor(expected, dtype=F64), atol=0.03)


def test_proxy_runs_are_adamw_at_their_mixtures() -> None:
    """And the mixture is known, and x trained at it, only after the last run."""
    problem, seen = watched(PROBLEM)
    problem, calls = counted(problem)
    method = regmix(weight_decay=0.1, train_steps=7)
    steps = list(through(method, problem))
    ends = [(state, row) for state, row in steps if "upper_loss" in row and row["phase"] != "train"]
    # 3 + 3 + 1 updates
    assert [row["run"] for _, row in steps[:12]] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert all(len(index.unique()) == 6 for index in seen["pool"])
    results = []
    for run, (_, row) in enumerate(ends[:4]):
        own = seen["pool"][7 * run : 7 * run + 7]
        assert_same(own, seen["pool"][:7])  # the same batches for all
        theta = {"logits": ends[0][0]["mixtures"][run].clamp_min(1e-12).log()}
        losses = at_mixture(PROBLEM, theta, own)
        results.append(by_torch(PROBLEM.x0, losses, weight_decay=0.1)[-1])
        loss = (
            PROBLEM.find(Sources).examples(results[-1], PROBLEM.upper_data["select"].whole).mean()
        )
        assert float(row["upper_loss"]) == pytest.approx(float(loss), rel=1e-9)
    for state, _ in steps[:11]:
        assert_shares(PROBLEM, method, state, [1, 1, 1])
    state, row = steps[11]
    lowest = int(state["losses"].argmin())
    assert_same(regmix().result(state)[1], results[lowest], rtol=1e-9, atol=1e-12)
    assert float(row["lowest_run_loss"]) == float(ends[lowest][1]["upper_loss"])
    assert (row["cost_lower_gradients"], row["cost_upper_values"]) == (28, 4)
    assert row["cost_rows"] == 28 * 6 + 4 * 8
    state, row = steps[-1]
    assert row["cost_lower_gradients"] == calls["g"] == 4 * 7 + 7
    x = by_torch(
        PROBLEM.x0, at_mixture(PROBLEM, state["theta"], seen["pool"][28:]), weight_decay=0.1
    )
    assert_same(method.result(state)[1], x[-1], rtol=1e-9, atol=1e-12)
