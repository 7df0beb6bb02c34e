"""OP-Mix: probes, interpolated adapters, the law and the mixture near the prior, each against
another way to it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, counted, network_problem, normal, rejects
from support.source_problems import (
    assert_goes_on,
    convex_sources,
    in_another_order,
    network_sources,
    through,
    watched,
    weights,
)
from torch import Tensor

from hgms_core import ConfigError, Data, Key, NumericalError
from hgms_mix.contrib.op_mix import OpMix
from hgms_mix.contrib.op_mix.law import Law, fit, propose
from hgms_mix.lm import interpolated

PROBLEM = network_sources()
NAMES = ("near", "turned", "noise")


def op_mix(**options: Any) -> OpMix:
    return OpMix(
        **(
            {"steps": 5, "updates": 3, "lr": 0.02, "batch_size": 6, "candidates": 7, "chunk": 5}
            | options
        )
    )


def on_the_simplex(count: int, sources: int, seed: int) -> Tensor:
    draw = (
        torch.rand(count, sources, generator=torch.Generator().manual_seed(seed), dtype=F64) + 0.01
    )
    return draw / draw.sum(1, keepdim=True)


def test_a_law_is_recovered() -> None:
    mixtures = on_the_simplex(12, 3, 0)
    slopes = torch.tensor([-0.8, 0.3, 0.6], dtype=F64)
    law = fit(mixtures, 2.0 + (mixtures @ slopes).exp())
    assert math.exp(law.floor) == pytest.approx(2.0, abs=1e-4)
    assert_same(law.slopes, slopes, atol=1e-4)
    other = on_the_simplex(9, 3, 1)
    assert_same(law(other), 2.0 + (other @ slopes).exp(), atol=1e-6)
    assert law.error < 1e-6
    # A far outlier counts linearly: it hardly moves the law.
    losses = 2.0 + (mixtures @ slopes).exp()
    losses[4] += 5
    assert_same(fit(mixtures, losses)(other), 2.0 + (other @ slopes).exp(), atol=0.04)


def test_the_proposal_meets_the_conditions_of_a_minimum() -> None:
    slopes = normal(4, 5, seed=3)
    prior = on_the_simplex(1, 5, 4)[0]
    laws = [Law(floor=0.0, slopes=row, error=0.0) for row in slopes]
    omega = propose(laws, prior, kl=0.05)
    assert float(omega.sum()) == pytest.approx(1.0)
    # On the simplex the derivative by every weight above 0 is the same.
    level = ((slopes @ omega).exp()[:, None] * slopes).mean(0) + 0.05 * ((omega / prior).log() + 1)
    assert_same(level, level.mean().expand(5), atol=1e-6)

    def value(at: torch.Tensor) -> torch.Tensor:
        return (slopes @ at).exp().mean() + 0.05 * (at * (at / prior).log()).sum()

    assert all(float(value(at)) > float(value(omega)) for at in on_the_simplex(50, 5, 5))
    assert_same(propose(laws, prior, kl=1e4), prior, atol=1e-3)


def test_the_proposal_is_the_minimum_where_the_softmax_saturates() -> None:
    """BFGS in logits ended at [1, 0, 0], a corner with the value 3.09; the minimum is 1.57."""
    slopes = torch.tensor([1.1, 0.4, 5.1], dtype=F64)
    prior = torch.tensor([0.177, 0.028, 0.795], dtype=F64)
    omega = propose([Law(floor=0.0, slopes=slopes, error=0.0)], prior, kl=0.05)
    low, high = 0.4, 5.1
    for _ in range(200):
        # the value v = t·ω is the root of a decreasing function
        middle = (low + high) / 2
        exact = (prior.log() - math.exp(middle) / 0.05 * slopes).softmax(0)
        low, high = (middle, high) if float(slopes @ exact) > middle else (low, middle)
    assert_same(omega, exact, atol=1e-9)
    assert float(omega[1]) > 0.99


def far(omega: Tensor, slopes: Tensor, prior: Tensor, kl: float) -> float:
    """A bound on the distance to the minimum in the 1-norm, by the spread of the derivative."""
    level = ((slopes @ omega).exp()[:, None] * slopes).mean(0) + kl * (omega / prior).log()
    return float(level.max() - level.min()) / (2 * kl)


@pytest.mark.parametrize("kl", [0.05, 0.01])
@pytest.mark.parametrize("sets", [1, 3])
def test_proposals_are_minima_for_uneven_priors(kl: float, sets: int) -> None:
    for seed in range(150):
        slopes = 2 * normal(sets, 6, seed=seed)
        prior = (2 * normal(6, seed=1000 + seed)).softmax(0)
        laws = [Law(floor=0.0, slopes=row, error=0.0) for row in slopes]
        omega = propose(laws, prior, kl)
        # weights below float64's smallest number have no logarithm
        some = omega > 0
        assert float(omega.sum()) == pytest.approx(1.0)
        assert far(omega[some], slopes[:, some], prior[some], kl) < 1e-8


def test_a_proposal_without_a_solution_is_an_error() -> None:
    law = Law(floor=0.0, slopes=torch.tensor([800.0, 900.0], dtype=F64), error=0.0)
    even = torch.tensor([0.5, 0.5], dtype=F64)
    with rejects("not-converged", "method", "kl", of=NumericalError):
        propose([law], even, kl=0.05)
    flat = Law(floor=0.0, slopes=torch.tensor([1.0, -9.0, 0.5], dtype=F64), error=0.0)
    excluded = propose([flat], torch.tensor([0.5, 0.0, 0.5], dtype=F64), kl=0.05)
    assert float(excluded[1]) == 0.0
    assert float(excluded[2]) > 0.99


def test_adapters_are_added_as_what_they_add() -> None:
    transformers = pytest.importorskip("transformers")
    from hgms_mix.lm import LanguageModel, Lora

    torch.manual_seed(0)
    base = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=16, vocab_size=20)
    )
    base = base.double().eval()
    model = LanguageModel.of(base, Lora(rank=2, alpha=4, targets=("c_attn",)), length=16)
    probes = [
        {name: normal(*leaf.shape, seed=seed) for name, leaf in model.start(Key(0), F64).items()}
        for seed in (1, 2, 3)
    ]
    tokens = torch.randint(0, 20, (4, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    share = [0.5, 0.2, 0.3]
    with torch.no_grad():
        loss, _ = model.nll(interpolated(probes, share), tokens, mask)
        name = "transformer.h.0.attn.c_attn"
        weight = base.get_submodule(name).weight
        # the merged model: W + Σ_s λ_s (alpha/rank) B_s A_s
        for x, part in zip(probes, share, strict=True):
            weight += part * 2.0 * (x[f"{name}.lora_B.weight"] @ x[f"{name}.lora_A.weight"]).T
        logits = base(tokens).logits[:, :-1].log_softmax(-1)
    expected = -logits.gather(-1, tokens[:, 1:, None])[..., 0].sum(1)
    assert_same(loss, expected, rtol=1e-10)


@pytest.mark.parametrize("own", [0.9, 1.0])
def test_probes_and_their_mixtures_are_those_of_the_definition(own: float) -> None:
    problem, read = watched(PROBLEM)
    seen = read["pool"]
    method = op_mix(own=own, weight_decay=0.1)
    steps = list(through(method, problem))
    assert [row["probe"] for _, row in steps if "probe" in row] == [
        name for name in NAMES for _ in range(2)
    ]
    assert [row["phase"] for _, row in steps] == ["probes"] * 6 + ["candidates"] * 7
    assert_same(seen[5:10], seen[:5])  # the same batches for all
    assert PROBLEM.sources is not None
    ends = []
    for number in range(3):
        mixture = torch.full((3,), (1 - own) / 2, dtype=F64)
        mixture[number] = own
        x = {name: leaf.clone().requires_grad_() for name, leaf in PROBLEM.x0.items()}
        optimizer = torch.optim.AdamW(list(x.values()), lr=0.02, weight_decay=0.1)
        for index in seen[:5]:
            optimizer.zero_grad()
            PROBLEM.g(
                {"logits": mixture.clamp_min(1e-12).log()}, x, PROBLEM.lower_data.rows(index)
            ).backward()
            optimizer.step()
        ends.append({name: leaf.detach() for name, leaf in x.items()})
    assert_same(list(steps[5][0]["probes"].values()), ends, rtol=1e-8, atol=1e-11)
    points = method._points(3, Key(3).fold("points"))
    assert_same(
        points[:4], torch.cat([torch.eye(3, dtype=F64), torch.full((1, 3), 1 / 3, dtype=F64)])
    )
    assert_same(points.sum(1), torch.ones(7, dtype=F64), rtol=1e-12)
    data = PROBLEM.upper_data["select"].whole
    for point, losses in zip(points, steps[-1][0]["losses"], strict=True):
        x = {
            name: sum(share * end[name] for share, end in zip(point.tolist(), ends, strict=True))
            for name in ends[0]
        }
        rows_of = PROBLEM.sources.examples(x, data)
        assert_same(
            losses,
            torch.stack([rows_of[data["source"] == part].mean() for part in range(2)]),
            rtol=1e-8,
        )
    state, row = steps[-1]
    mean = state["losses"].mean(1)
    assert_same(method.result(state)[1], ends[int(mean[:3].argmin())], rtol=1e-8, atol=1e-11)
    assert float(row["lowest_loss"]) == float(mean.min())
    mixtures = points @ torch.full((3, 3), (1 - own) / 2, dtype=F64).fill_diagonal_(own)
    laws = [fit(mixtures, state["losses"][:, part]) for part in range(2)]
    assert_same(
        weights(PROBLEM, method.result(state)[0]),
        propose(laws, torch.full((3,), 1 / 3), 0.05),
        rtol=1e-6,
    )


def test_the_best_source_is_found() -> None:
    # Where a probe of a source ends is its centre; f is least at the first.
    problem = convex_sources({"first": 1.0, "second": 0.0, "third": 0.0})
    method = op_mix(
        steps=40, updates=40, lr=0.05, batch_size=None, candidates=20, kl=0.01, train_steps=40
    )
    *_, (state, row) = through(method, problem)
    theta, x = method.result(state)
    assert float(weights(problem, theta)[0]) > 0.95
    assert row["phase"] == "train"
    assert row["cost_lower_gradients"] == 4 * 40
    assert float(x["x"][0]) > 0.9
    assert (method.untrained, op_mix().untrained) == ("", "x is a probe's (train_steps = 0)")


def test_the_prior_is_what_the_problem_starts_at() -> None:
    prior = torch.tensor([0.5, 0.3, 0.2], dtype=F64)
    *_, (state, _) = through(
        op_mix(steps=1, kl=1e4), evolve(PROBLEM, theta0={"logits": prior.log()})
    )
    assert_same(weights(PROBLEM, state["theta"]), prior, atol=1e-3)


def test_a_validation_set_without_rows_has_no_law() -> None:
    data = PROBLEM.upper_data["select"].whole
    right = Data.of(
        {name: leaf[data["source"] == 0] for name, leaf in data.items() if name != "index"}
    )
    problem = evolve(PROBLEM, upper_data={**PROBLEM.upper_data, "select": right})
    *_, (state, row) = through(op_mix(), problem)
    assert state["losses"].shape == (7, 1)
    assert bool(torch.isfinite(weights(problem, state["theta"])).all())
    assert float(row["upper_loss"]) == float(state["losses"][-1, 0])


def test_before_the_mixture_is_known() -> None:
    method = op_mix()
    states = [method.init(PROBLEM, 3), *(state for state, _ in through(method, PROBLEM))]
    for state in states[:-1]:
        assert_same(
            weights(PROBLEM, method.result(state)[0]),
            torch.full((3,), 1 / 3, dtype=F64),
            rtol=1e-12,
        )
    assert float((weights(PROBLEM, method.result(states[-1])[0]) - 1 / 3).abs().max()) > 1e-3


@pytest.mark.parametrize("options", [{}, {"train_steps": 4, "own": 1.0}])
def test_a_state_read_back_goes_on_bit_for_bit(options: dict[str, Any]) -> None:
    method = op_mix(**options)
    assert method.finished(assert_goes_on(method, PROBLEM))


def test_where_sources_stand_in_the_table_does_not_matter() -> None:
    (*_, (state, _)), (*_, (other, _)) = (
        through(op_mix(), problem) for problem in (PROBLEM, in_another_order(PROBLEM))
    )
    assert_same(other["theta"], state["theta"], rtol=1e-6)
    assert_same(other["losses"], state["losses"], rtol=1e-9)


def test_costs_are_what_was_called() -> None:
    problem, calls = counted(PROBLEM)
    *_, (_, row) = through(op_mix(), problem)
    assert row["cost_lower_gradients"] == calls["g"] == 3 * 5
    assert row["cost_upper_values"] == 7
    assert row["cost_rows"] == calls["g_rows"] + calls["f_rows"] == 15 * 6 + 7 * 8


def test_bad_settings() -> None:
    with rejects("not-supported", "problem", "sources", of=ConfigError):
        op_mix().init(network_problem(), 0)
    with rejects("no-rows-for-role", "problem", "upper_data", "select", of=ConfigError):
        op_mix().init(evolve(PROBLEM, upper_data={**PROBLEM.upper_data, "select": Data.none()}), 0)
    with rejects("out-of-range", "method", "candidates", of=ConfigError) as caught:
        op_mix(candidates=4).init(PROBLEM, 0)
    assert "candidates=4 must be at least 5" in caught.value.message
    with rejects("out-of-range", "method", "own", of=ConfigError) as caught:
        op_mix(own=0.3).init(PROBLEM, 0)
    assert "1/3" in caught.value.message
    with rejects("not-supported", "problem", "sources", of=ConfigError) as caught:
        op_mix(own=1.0).init(convex_sources({"alone": 1.0}), 0)
    assert caught.value.message.endswith(" 'alone'")
    for options in ({"kl": 0.0}, {"own": 1.5}, {"steps": 0}, {"candidates": 3}):
        with rejects("out-of-range", next(iter(options)), of=ConfigError):
            OpMix(**options)
    wrong = {
        torch.inf: ("not-finite", ("validation", "right"), "'right' is inf"),
        -1.0: ("out-of-range", ("problem", "f"), "[-1.0, -1.0]"),
    }
    for loss, (code, place, words) in wrong.items():
        constant = torch.tensor(loss, dtype=F64)
        with rejects(code, *place, of=NumericalError) as caught:
            list(
                through(
                    op_mix(), evolve(PROBLEM, f=lambda theta, x, batch, constant=constant: constant)
                )
            )
        assert caught.value.message.startswith("step 7: ")
        assert words in caught.value.message
