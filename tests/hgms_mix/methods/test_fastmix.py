"""FastMix against a loop of its own in float64: what x and θ become, which rows are seen, and
what it costs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, counted, network_problem, rejects
from support.source_problems import (
    assert_goes_on,
    convex_sources,
    in_another_order,
    language_sources,
    network_sources,
    watched,
)
from torch import Tensor

from hgms_core import ConfigError, Data, NumericalError, Problem, State, Tree
from hgms_mix.methods.fastmix import FastMix

PROBLEM = network_sources()


def fastmix(**options: Any) -> FastMix:
    settings = {"updates": 2, "lr": 0.02, "outer_lr": 0.1, "batch_size": 6, "upper_batch_size": 5}
    return FastMix(**(settings | options))


def stepped(method: FastMix, problem: Problem, steps: int) -> list[tuple[State, dict[str, Any]]]:
    state = method.init(problem, 3)
    rows = []
    for _ in range(steps):
        state, row = method.step(problem, state)
        rows.append((state, row))
    return rows


def slopes(loss: Tensor, x: Tree) -> dict[str, Tensor]:
    return dict(zip(x, torch.autograd.grad(loss, list(x.values())), strict=True))


@pytest.mark.parametrize("leaves", ["", "^v$", "[wb]"])
def test_three_steps_are_those_of_the_definition(leaves: str) -> None:
    problem, seen = watched(PROBLEM)
    method = fastmix(leaves=leaves)
    steps = stepped(method, problem, 3)
    assert PROBLEM.sources is not None
    x = {name: leaf.clone().requires_grad_() for name, leaf in PROBLEM.x0.items()}
    compared = {"": ["w", "b", "v"], "^v$": ["v"], "[wb]": ["w", "b"]}[leaves]
    logits = torch.zeros(3, dtype=F64, requires_grad=True)
    inner = torch.optim.AdamW(list(x.values()), lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
    outer = torch.optim.Adam([logits], lr=0.1, betas=(0.5, 0.999))
    lower = iter(seen["pool"])
    upper = iter(seen["differentiate"])
    for state, row in steps:
        for _ in range(2):
            batch = PROBLEM.lower_data.rows(next(lower))
            inner.zero_grad()
            losses = PROBLEM.sources.examples(x, batch)
            means = [losses[batch["source"] == number].mean() for number in range(3)]
            (logits.detach().softmax(0) @ torch.stack(means)).backward()
            inner.step()
        target = slopes(
            PROBLEM.sources.examples(
                x, PROBLEM.upper_data["differentiate"].rows(next(upper))
            ).mean(),
            x,
        )
        products = []
        next(lower)  # the batch of the products, whose sources are then read one by one
        for number in range(3):
            own = PROBLEM.lower_data.rows(next(lower))
            assert own["source"].tolist() == [number, number]
            grads = slopes(PROBLEM.sources.examples(x, own).mean(), x)
            products.append(sum(float((grads[name] * target[name]).sum()) for name in compared))
        outer.zero_grad()
        (-0.02 * logits.softmax(0) @ torch.tensor(products, dtype=F64)).backward()
        outer.step()
        assert_same(
            method.result(state)[1],
            {name: leaf.detach() for name, leaf in x.items()},
            rtol=1e-9,
            atol=1e-12,
        )
        assert_same(method.result(state)[0]["logits"], logits.detach(), rtol=1e-9, atol=1e-12)
        names = ("near", "turned", "noise")
        assert [float(row[f"product.{name}"]) for name in names] == pytest.approx(
            products, rel=1e-9
        )
    assert next(lower, None) is None
    assert seen["select"] == seen["stop"] == []


def test_a_source_that_no_row_is_drawn_of_has_product_zero() -> None:
    method = fastmix(search_batch_size=2)
    rows = [row for _, row in stepped(method, PROBLEM, 6)]
    zeros = [
        [name for name in ("near", "turned", "noise") if float(row[f"product.{name}"]) == 0]
        for row in rows
    ]
    assert all(len(missing) == 1 for missing in zeros)
    assert len({missing[0] for missing in zeros}) > 1  # which it is, is drawn


def test_weight_goes_to_the_source_that_is_like_the_validation_rows() -> None:
    problem = convex_sources({"like": 1.0, "other": 0.0, "third": 0.0})
    assert problem.sources is not None
    (*_, (state, _)) = stepped(fastmix(lr=0.01, weight_decay=0.0, batch_size=9), problem, 40)
    weights = problem.sources.weights(state["theta"])
    assert float(weights[0]) > 0.9
    # In a language model too: answers that are twice the number, of two kinds of rows.
    problem = language_sources(1)
    assert problem.sources is not None
    method = fastmix(batch_size=8, upper_batch_size=None, leaves="wte")
    (*_, (state, row)) = stepped(method, problem, 8)
    assert float(problem.sources.weights(state["theta"])[0]) > 0.6
    assert float(row["product.doubles"]) > float(row["product.dots"])


def test_a_state_read_back_goes_on_bit_for_bit() -> None:
    assert_goes_on(fastmix(), PROBLEM, most=4)


def test_where_sources_stand_in_the_table_does_not_matter() -> None:
    (*_, (state, row)), (*_, (other, again)) = (
        stepped(fastmix(), p, 4) for p in (PROBLEM, in_another_order(PROBLEM))
    )
    assert_same(other["theta"], state["theta"], rtol=1e-9)
    for name in ("near", "turned", "noise"):
        assert float(again[f"product.{name}"]) == pytest.approx(
            float(row[f"product.{name}"]), rel=1e-9
        )


def test_seeds_decide() -> None:
    method = fastmix()
    first, same, other = (method.step(PROBLEM, method.init(PROBLEM, seed))[0] for seed in (0, 0, 1))
    assert_same(first["train"], same["train"])
    assert not torch.equal(first["train"]["x.w"], other["train"]["x.w"])


def test_costs_are_what_was_called() -> None:
    problem, calls = counted(PROBLEM)
    *_, (_, row) = stepped(fastmix(), problem, 3)
    assert (row["cost_lower_gradients"], row["cost_upper_gradients"]) == (3 * (2 + 3), 3)
    assert (calls["g"], calls["pooled"], calls["f"]) == (6, 9, 3)
    assert (
        row["cost_rows"]
        == calls["g_rows"] + calls["pooled_rows"] + calls["f_rows"]
        == 3 * (2 * 6 + 6 + 5)
    )


def test_a_source_whose_loss_is_not_finite_stops_the_run() -> None:
    assert PROBLEM.sources is not None
    pooled = PROBLEM.sources.pooled

    def broken(theta: Tree, x: Tree, batch: Any) -> Tensor:
        return pooled(theta, x, batch) / (batch["source"] != 2).all()  # inf for `noise`

    with rejects("not-finite", "method", "lr", of=NumericalError) as caught:
        stepped(fastmix(), evolve(PROBLEM, sources=evolve(PROBLEM.sources, pooled=broken)), 1)
    assert "step 1" in caught.value.message
    assert "'noise' is inf" in caught.value.message


def test_bad_settings() -> None:
    with rejects("not-supported", "problem", "sources", of=ConfigError):
        fastmix().init(network_problem(), 0)
    with rejects("no-rows-for-role", "problem", "upper_data", "differentiate", of=ConfigError):
        fastmix().init(
            evolve(PROBLEM, upper_data={**PROBLEM.upper_data, "differentiate": Data.none()}), 0
        )
    with rejects("unknown-leaves", "method", "leaves", of=ConfigError) as caught:
        fastmix(leaves="lm_head").init(PROBLEM, 0)
    assert "w, b, v" in caught.value.message
    for code, options in (
        ("wrong-value", {"leaves": "("}),
        ("out-of-range", {"updates": 0}),
        ("out-of-range", {"outer_betas": (0.5, 1.0)}),
        ("out-of-range", {"outer_lr": 0.0}),
    ):
        with rejects(code, *options, of=ConfigError):
            FastMix(**options)
    broken = {
        name: leaf * torch.nan
        for name, leaf in PROBLEM.upper_data["differentiate"].whole.items()
        if name == "y"
    }
    whole = {**PROBLEM.upper_data["differentiate"].whole, **broken}
    data = Data.of({name: leaf for name, leaf in whole.items() if name != "index"})
    with rejects("not-finite", "method", "lr", of=NumericalError) as caught:
        stepped(
            fastmix(), evolve(PROBLEM, upper_data={**PROBLEM.upper_data, "differentiate": data}), 1
        )
    assert "step 1" in caught.value.message
