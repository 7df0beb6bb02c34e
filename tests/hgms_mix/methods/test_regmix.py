"""RegMix: the mixtures drawn, the proxy runs, the regression, and the best mixture of a problem
where it is known.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, counted, network_problem, rejects
from support.source_problems import (
    assert_goes_on,
    convex_sources,
    language_sources,
    network_sources,
    through,
    token_losses,
    weights,
)
from torch import Tensor

from hgms_core import ConfigError, Data, Key, MissingExtra, NumericalError, Tree
from hgms_mix.methods.regmix import RegMix
from hgms_mix.methods.regmix.regression import Mixtures, best, fit

PROBLEM = network_sources()
BEST = {"first": 0.6, "second": 0.3, "third": 0.1}
CONVEX = convex_sources(BEST)


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
    method = RegMix(
        runs=40,
        steps=60,
        updates=60,
        lr=0.05,
        batch_size=None,
        regressor=regressor,
        simulated=20_000,
        top=20,
    )
    *_, (state, row) = through(method, CONVEX)
    results = weights(CONVEX, method.result(state)[0])
    assert float((results - torch.tensor(list(BEST.values()), dtype=F64)).abs().sum()) < within
    if regressor == "quadratic":
        assert row["regression_error"] < 1e-2
        # The constant is half the spread of the validation rows; no mixture can do better.
        data = CONVEX.upper_data["select"].whole["a"]
        floor = 0.5 * (data - data.mean(0)).square().sum(1).mean()
        assert row["predicted_loss"] == pytest.approx(float(floor), abs=5e-3)


def test_a_line_has_its_minimum_in_a_corner() -> None:
    mixtures = Mixtures(prior=(1 / 3,) * 3, low=0.1, high=5.0).draw(Key(0), 50)
    losses = mixtures @ torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    results = fit(mixtures, losses, "linear", 0)
    assert results.error < 1e-5
    omega, predicted = best(results, mixtures, top=3)
    assert_same(omega, mixtures[losses.argsort()[:3]].mean(0))
    assert predicted == pytest.approx(float(losses.sort().values[:3].mean()), abs=1e-4)


def test_quadratic_features_fit_a_quadratic() -> None:
    draw = Mixtures(prior=(0.25,) * 4, low=0.5, high=5.0).draw
    matrix = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
    train = draw(Key(0), 60)
    test = draw(Key(1), 60)
    loss = lambda omega: ((omega @ matrix) * omega).sum(1)  # noqa: E731
    results = fit(train, loss(train), "quadratic", 0)
    assert_same(results.predict(test), loss(test), atol=1e-3)
    assert (fit(train, loss(train), "linear", 0).predict(test) - loss(test)).abs().max() > 0.05


def test_mixtures_are_dirichlet_draws() -> None:
    draw = Mixtures(prior=(0.7, 0.2, 0.1), low=0.1, high=5.0).draw(Key(1), 4000)
    assert_same(draw.sum(1), torch.ones(4000, dtype=F64), rtol=1e-12)
    assert_same(draw.mean(0), torch.tensor([0.7, 0.2, 0.1], dtype=F64), atol=0.02)
    assert float((draw[:, 0] > 0.99).double().mean()) > 0.1  # some hold one source only
    assert_same(Mixtures(prior=(0.7, 0.2, 0.1), low=0.1, high=5.0).draw(Key(1), 4000), draw)
    # Var ω_s = p(1 − p)/(1 + c·S) at one c.
    item = Mixtures(prior=(0.5, 0.5), low=3.0, high=3.0).draw(Key(2), 4000)
    assert float(item[:, 0].var()) == pytest.approx(0.25 / 7, rel=0.1)


def test_mixtures_too_small_for_numbers() -> None:
    draw = Mixtures(prior=(0.5, 0.5), low=1e-5, high=1e-5).draw(Key(0), 100)
    assert bool(torch.isfinite(draw).all())
    assert_same(draw.sum(1), torch.ones(100, dtype=F64))


def test_the_prior_is_of_sources_or_of_rows() -> None:
    for prior, expected in (("uniform", [1 / 3] * 3), ("rows", [0.5, 0.3, 0.2])):
        mixtures = regmix(runs=3000, prior=prior).init(PROBLEM, 0)["mixtures"]
        assert_same(mixtures.mean(0), torch.tensor(expected, dtype=F64), atol=0.03)


def test_the_prior_of_rows_is_that_of_the_files_where_the_task_keeps_fewer() -> None:
    examples = lambda x, batch: PROBLEM.sources.examples(x, batch)  # noqa: E731
    sizes = dict(zip(PROBLEM.sources.names, (10.0, 890.0, 100.0), strict=True))
    examples.sizes = sizes  # type: ignore[attr-defined]
    problem = evolve(PROBLEM, sources=evolve(PROBLEM.sources, examples=examples))
    mixtures = regmix(runs=3000, prior="rows").init(problem, 0)["mixtures"]
    assert_same(mixtures.mean(0), torch.tensor([0.01, 0.89, 0.1], dtype=F64), atol=0.03)


def test_proxy_runs_are_adamw_at_their_mixtures() -> None:
    seen: list[Tensor] = []

    def rows(index: Tensor) -> Tree:
        seen.append(index)
        return PROBLEM.lower_data.rows(index)

    problem = evolve(PROBLEM, lower_data=evolve(PROBLEM.lower_data, rows=rows))
    method = regmix(weight_decay=0.1)
    steps = list(through(method, problem))
    ends = [row for _, row in steps if "upper_loss" in row]
    # 3 + 3 + 1 updates
    assert [row["run"] for _, row in steps] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert len(seen) == 4 * 7
    assert PROBLEM.sources is not None
    results = []
    for run in range(4):
        assert_same(seen[7 * run : 7 * run + 7], seen[:7])  # the same batches for all
        theta = PROBLEM.sources.theta(
            dict(zip(PROBLEM.sources.names, steps[0][0]["mixtures"][run].tolist(), strict=True))
        )
        x = {name: leaf.clone().requires_grad_() for name, leaf in PROBLEM.x0.items()}
        optimizer = torch.optim.AdamW(list(x.values()), lr=0.02, weight_decay=0.1)
        for index in seen[:7]:
            optimizer.zero_grad()
            PROBLEM.g(theta, x, PROBLEM.lower_data.rows(index)).backward()
            optimizer.step()
        results.append(
            ({name: leaf.detach() for name, leaf in x.items()}, PROBLEM.upper_data["select"].whole)
        )
        loss = PROBLEM.sources.examples(*results[-1]).mean()
        assert float(ends[run]["upper_loss"]) == pytest.approx(float(loss), rel=1e-9)
    state, row = steps[-1]
    lowest = int(state["losses"].argmin())
    assert_same(method.result(state)[1], results[lowest][0], rtol=1e-9, atol=1e-12)
    assert float(row["lowest_run_loss"]) == float(ends[lowest]["upper_loss"])
    assert all(len(index.unique()) == 6 for index in seen)


def test_runs_are_compared_by_the_mean_over_tokens_where_f_is_one() -> None:
    problem = language_sources(2)
    *_, (state, _) = through(regmix(runs=3, steps=1, batch_size=None, chunk=3), problem)
    data = problem.upper_data["select"]
    index = torch.arange(data.size)
    for run in range(3):
        theta = {"logits": state["mixtures"][run].clamp_min(1e-12).log()}
        x = {name: leaf.clone().requires_grad_() for name, leaf in problem.x0.items()}
        optimizer = torch.optim.AdamW(list(x.values()), lr=0.02, weight_decay=0.0)
        problem.g(theta, x, problem.lower_data.batch(None)).backward()
        optimizer.step()
        with torch.no_grad():
            expected = token_losses(problem, x, data, index).mean()
        assert float(state["losses"][run]) == pytest.approx(float(expected), rel=1e-7)


def test_before_the_mixture_is_known() -> None:
    method = regmix()
    states = [method.init(PROBLEM, 3), *(state for state, _ in through(method, PROBLEM))]
    for state in states[:-1]:
        assert_same(
            weights(PROBLEM, method.result(state)[0]),
            torch.full((3,), 1 / 3, dtype=F64),
            rtol=1e-12,
        )
    assert_same(method.result(states[0])[1], PROBLEM.x0)
    assert float((weights(PROBLEM, method.result(states[-1])[0]) - 1 / 3).abs().max()) > 1e-3


def test_training_at_the_mixture_found() -> None:
    method = regmix(train_steps=7)
    *_, (state, row) = through(method, PROBLEM)
    assert row["phase"] == "train"
    assert row["cost_lower_gradients"] == 4 * 7 + 7
    x = {name: leaf.clone().requires_grad_() for name, leaf in PROBLEM.x0.items()}
    optimizer = torch.optim.AdamW(list(x.values()), lr=0.02, weight_decay=0.0)
    for at, count in ((0, 3), (3, 3), (6, 1)):
        index = PROBLEM.lower_data.draw(Key(3).fold("train", at), 6, count)
        assert index is not None
        for batch in index:
            optimizer.zero_grad()
            PROBLEM.g(state["theta"], x, PROBLEM.lower_data.rows(batch)).backward()
            optimizer.step()
    assert_same(
        method.result(state)[1],
        {name: leaf.detach() for name, leaf in x.items()},
        rtol=1e-9,
        atol=1e-12,
    )


@pytest.mark.parametrize("options", [{}, {"regressor": "boosting", "train_steps": 4}])
def test_a_state_read_back_goes_on_bit_for_bit(options: dict[str, Any]) -> None:
    method = regmix(**options)
    assert method.finished(assert_goes_on(method, PROBLEM))


def test_costs_are_what_was_called() -> None:
    problem, calls = counted(PROBLEM)
    *_, (_, row) = through(regmix(), problem)
    assert row["cost_lower_gradients"] == calls["g"] == 28
    assert row["cost_upper_values"] == 4
    assert row["cost_rows"] == 28 * 6 + 4 * 8
    assert row["oracle_calls"] == 32


def test_losses_that_are_not_finite_stop_the_run() -> None:
    nan = Data.of(
        {"a": torch.full((2, 3), torch.nan, dtype=F64), "source": torch.zeros(2, dtype=torch.int64)}
    )
    with rejects("not-finite", "method", "lr", of=NumericalError) as caught:
        list(through(regmix(), evolve(CONVEX, upper_data={**CONVEX.upper_data, "select": nan})))
    assert "step 3" in caught.value.message
    with rejects("not-finite", of=NumericalError) as caught:
        list(through(regmix(), evolve(CONVEX, g=lambda theta, x, batch: x["x"].sum() * torch.nan)))
    assert "step 1" in caught.value.message


def test_bad_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with rejects("not-supported", "problem", "sources", of=ConfigError):
        regmix().init(network_problem(), 0)
    with rejects("no-rows-for-role", "problem", "upper_data", "select", of=ConfigError):
        regmix().init(evolve(PROBLEM, upper_data={**PROBLEM.upper_data, "select": Data.none()}), 0)
    for code, options in (
        ("out-of-range", {"runs": 2}),
        ("wrong-value", {"concentration": (2.0, 1.0)}),
        ("out-of-range", {"top": 201, "simulated": 200}),
        ("unknown-choice", {"regressor": "forest"}),
    ):
        with rejects(code, next(iter(options)), of=ConfigError):
            RegMix(**options)
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    with rejects("missing-package", of=MissingExtra) as missing:
        regmix().init(PROBLEM, 0)
    assert missing.value.install == "pip install 'hgms[sklearn]'"
