"""FastMix against a loop of its own in float64: what x and θ become, which rows are seen, and
what it costs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.helpers import F64, assert_same, counted
from support.source_problems import at_mixture, by_torch, network_sources, stepped, watched
from torch import Tensor

from hgms_core import Data, Sources, Tree
from hgms_mix.methods.fastmix import FastMix

PROBLEM = network_sources()


def fastmix(**options: Any) -> FastMix:
    settings = {"updates": 2, "lr": 0.02, "outer_lr": 0.1, "batch_size": 6, "upper_batch_size": 5}
    return FastMix(**(settings | options))


@pytest.mark.parametrize("leaves", ["", "^v$", "[wb]"])
def test_three_steps_are_those_of_the_definition(leaves: str) -> None:
    problem, seen = watched(PROBLEM)
    counting, calls = counted(problem)
    method = fastmix(leaves=leaves)
    steps = stepped(method, counting, 3)
    compared = {"": ["w", "b", "v"], "^v$": ["v"], "[wb]": ["w", "b"]}[leaves]
    logits = torch.zeros(3, dtype=F64, requires_grad=True)
    outer = torch.optim.Adam([logits], lr=0.1, betas=(0.5, 0.999))
    lower, upper = iter(seen["pool"]), iter(seen["differentiate"])
    losses: list[Any] = []
    for state, row in steps:
        theta = {"logits": logits.detach().clone()}
        losses += at_mixture(PROBLEM, theta, [next(lower), next(lower)])
        states = by_torch(PROBLEM.x0, losses, weight_decay=0.1, betas=(0.9, 0.95))
        assert_same(method.result(state)[1], states[-1], rtol=1e-9, atol=1e-12)
        x = {name: leaf.requires_grad_() for name, leaf in states[-1].items()}

        def slopes(index: Tensor, data: Data, x: Tree = x) -> Tensor:
            loss = PROBLEM.f({}, x, data.rows(index))
            grads = torch.autograd.grad(loss, [x[name] for name in compared])
            return torch.cat([grad.flatten() for grad in grads])

        target = slopes(next(upper), PROBLEM.upper_data["differentiate"])
        next(lower)  # the batch of the products, whose sources are then read one by one
        own = [next(lower) for _ in range(3)]
        sources = [PROBLEM.lower_data.rows(index)["source"].tolist() for index in own]
        assert sources == [[0, 0], [1, 1], [2, 2]]
        products = torch.stack([slopes(index, PROBLEM.lower_data) @ target for index in own])
        outer.zero_grad()
        (-0.02 * logits.softmax(0) @ products).backward()
        outer.step()
        assert_same(method.result(state)[0]["logits"], logits.detach(), rtol=1e-9, atol=1e-12)
        shown = [float(row[f"product.{name}"]) for name in PROBLEM.find(Sources).names]
        assert shown == pytest.approx(products.tolist(), rel=1e-9)
    assert next(lower, None) is None
    assert seen["select"] == seen["stop"] == []
    row = steps[-1][1]
    assert (row["cost_lower_gradients"], row["cost_upper_gradients"]) == (3 * (2 + 3), 3)
    assert (calls["g"], calls["pooled"], calls["f"]) == (6, 9, 3)
    rows = calls["g_rows"] + calls["pooled_rows"] + calls["f_rows"]
    assert row["cost_rows"] == rows == 3 * (2 * 6 + 6 + 5)


def test_a_source_that_no_row_is_drawn_of_has_product_zero() -> None:
    method = fastmix(search_batch_size=2)
    missing = [
        [name for name in PROBLEM.find(Sources).names if float(row[f"product.{name}"]) == 0]
        for _, row in stepped(method, PROBLEM, 6)
    ]
    assert [len(names) for names in missing] == 6 * [1]
    assert len(set(map(tuple, missing))) > 1  # which it is, is drawn
