"""OP-Mix: probes, interpolated adapters, the law and the mixture near the prior, each against
another way to it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, counted, normal, rejects
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
from torch import Tensor

from hgms_core import Key, NumericalError, Sources, stack
from hgms_mix.contrib.op_mix import OpMix
from hgms_mix.contrib.op_mix.law import Law, fit, propose
from hgms_mix.lm import interpolate

PROBLEM = network_sources()


def op_mix(**options: Any) -> OpMix:
    settings = {"steps": 5, "updates": 3, "lr": 0.02, "batch_size": 6, "candidates": 7, "chunk": 5}
    return OpMix(**(settings | options))


def on_the_simplex(count: int, sources: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.rand(count, sources, generator=draw, dtype=F64) + 0.01
    return numbers / numbers.sum(1, keepdim=True)


def test_a_law_is_recovered() -> None:
    mixtures, other = on_the_simplex(12, 3, 0), on_the_simplex(9, 3, 1)
    slopes = torch.tensor([-0.8, 0.3, 0.6], dtype=F64)
    losses, expected = (2.0 + (omega @ slopes).exp() for omega in (mixtures, other))
    law = fit(mixtures, losses)
    assert math.exp(law.floor) == pytest.approx(2.0, abs=1e-4)
    assert_same(law.slopes, slopes, atol=1e-4)
    assert_same(law(other), expected, atol=1e-6)
    # A far outlier counts linearly: it hardly moves the law.
    losses[4] += 5
    assert_same(fit(mixtures, losses)(other), expected, atol=0.04)


def far(omega: Tensor, slopes: Tensor, prior: Tensor, kl: float) -> float:
    """A bound on the distance to the minimum in the 1-norm, by the spread of the derivative."""
    level = ((slopes @ omega).exp()[:, None] * slopes).mean(0) + kl * (omega / prior).log()
    return float(level.max() - level.min()) / (2 * kl)


@pytest.mark.parametrize("kl", [0.05, 0.01])
@pytest.mark.parametrize("sets", [1, 3])
def test_proposals_are_minima_for_uneven_priors(kl: float, sets: int) -> None:
    for seed in range(25):
        slopes = 2 * normal(sets, 6, seed=seed)
        prior = (2 * normal(6, seed=1000 + seed)).softmax(0)
        laws = [Law(floor=0.0, slopes=row, error=0.0) for row in slopes]
        omega = propose(laws, prior, kl)
        # weights below float64's smallest number have no logarithm
        some = omega > 0
        assert float(omega.sum()) == pytest.approx(1.0)
        assert far(omega[some], slopes[:, some], prior[some], kl) < 1e-8


def test_proposals_are_minima_for_steep_laws_at_a_small_kl() -> None:
    for seed in range(25):
        slopes = 10 * normal(4, 8, seed=seed)
        prior = (2 * normal(8, seed=1000 + seed)).softmax(0)
        laws = [Law(floor=0.0, slopes=row, error=0.0) for row in slopes]
        omega = propose(laws, prior, 1e-3)
        some = omega > 0
        assert far(omega[some], slopes[:, some], prior[some], 1e-3) < 1e-6


def test_a_proposal_without_a_solution_is_an_error() -> None:
    law = Law(floor=0.0, slopes=torch.tensor([800.0, 900.0], dtype=F64), error=0.0)
    with rejects("not-converged", "method", "kl", of=NumericalError):
        propose([law], torch.full((2,), 0.5, dtype=F64), kl=0.05)


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
        loss, _ = model.nll(interpolate(probes, share), tokens, mask)
        name = "transformer.h.0.attn.c_attn"
        weight = base.get_submodule(name).weight
        # the merged model: W + Σ_s λ_s (alpha/rank) B_s A_s
        for x, part in zip(probes, share, strict=True):
            weight += part * 2.0 * (x[f"{name}.lora_B.weight"] @ x[f"{name}.lora_A.weight"]).T
        logits = base(tokens).logits[:, :-1].log_softmax(-1)
    expected = -logits.gather(-1, tokens[:, 1:, None])[..., 0].sum(1)
    assert_same(loss, expected, rtol=1e-10)


@pytest.mark.extended
@pytest.mark.parametrize("own", [0.9, pytest.param(1.0, marks=pytest.mark.extended)])
def test_probes_and_their_mixtures_are_those_of_the_definition(own: float) -> None:
    problem, seen = watched(PROBLEM)
    problem, calls = counted(problem)
    method = op_mix(own=own, weight_decay=0.1)
    steps = list(through(method, problem))
    batches = seen["pool"]
    shares = torch.full((3, 3), (1 - own) / 2, dtype=F64).fill_diagonal_(own)
    ends = []
    for mixture in shares:
        theta = {"logits": mixture.clamp_min(1e-12).log()}
        losses = at_mixture(PROBLEM, theta, batches[:5])  # the same batches for all
        ends.append(by_torch(PROBLEM.x0, losses, weight_decay=0.1)[-1])
    assert_same(list(steps[5][0]["probes"].values()), ends, rtol=1e-8, atol=1e-11)
    points = method._points(3, Key(3).fold("points"))
    state, row = steps[-1]
    data = PROBLEM.upper_data["select"].whole
    for point, found in zip(points, state["losses"], strict=True):
        x = {name: torch.tensordot(point, leaf, 1) for name, leaf in stack(ends).items()}
        losses = PROBLEM.find(Sources).examples(x, data)
        expected = torch.stack([losses[data["source"] == part].mean() for part in range(2)])
        assert_same(found, expected, rtol=1e-8)
    mean = state["losses"].mean(1)
    assert_same(method.result(state)[1], ends[int(mean[:3].argmin())], rtol=1e-8, atol=1e-11)
    laws = [fit(points @ shares, state["losses"][:, part]) for part in range(2)]
    assert_shares(PROBLEM, method, state, propose(laws, torch.full((3,), 1 / 3), 0.05), rtol=1e-6)
    assert (row["cost_lower_gradients"], row["cost_upper_values"]) == (calls["g"], 7) == (15, 7)
    assert row["cost_rows"] == calls["g_rows"] + calls["f_rows"] == 15 * 6 + 7 * 8


def test_the_best_source_is_found() -> None:
    # Where a probe of a source ends is its centre; f is least at the first.
    problem = convex_sources({"first": 1.0, "second": 0.0, "third": 0.0})
    method = op_mix(
        steps=40, updates=40, lr=0.05, batch_size=None, candidates=20, kl=0.01, train_steps=40
    )
    *_, (state, row) = through(method, problem)
    theta, x = method.result(state)
    assert float(weights(problem, theta)[0]) > 0.95
    assert float(x["x"][0]) > 0.9
    assert (row["phase"], row["cost_lower_gradients"]) == ("train", 4 * 40)


@pytest.mark.extended
def test_the_prior_is_what_the_problem_starts_at() -> None:
    prior = torch.tensor([0.5, 0.3, 0.2], dtype=F64)
    method = op_mix(steps=1, kl=1e4)
    *_, (state, _) = through(method, evolve(PROBLEM, theta0={"logits": prior.log()}))
    assert_shares(PROBLEM, method, state, prior, atol=1e-3)
