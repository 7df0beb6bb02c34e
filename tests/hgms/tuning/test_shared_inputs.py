"""Linear layers with shared rows: the same values and derivatives."""

from __future__ import annotations

import pytest
import torch
from support.helpers import normal
from torch import Tensor
from torch.nn import functional

from hgms.tuning.shared_inputs import MOST, SharedInputs


@pytest.mark.parametrize("outputs", [1, 3, MOST + 1])
@pytest.mark.parametrize("has_bias", [True, False])
def test_values_and_two_derivatives_are_those_of_linear(outputs: int, has_bias: bool) -> None:
    rows = normal(5, 4)
    bias = normal(outputs, seed=1) if has_bias else None
    weights = normal(3, outputs, 4, seed=2).requires_grad_()
    along = normal(3, outputs, 4, seed=3)

    def loss(weight: Tensor) -> Tensor:
        return functional.linear(rows, weight, bias=bias).tanh().square().sum()

    def shared(weight: Tensor) -> Tensor:
        with SharedInputs():
            return loss(weight)

    found = []
    for function in (loss, shared):
        values = torch.vmap(function)(weights)
        (slope,) = torch.autograd.grad(values.sum(), weights, create_graph=True)
        (product,) = torch.autograd.grad(slope, weights, along)
        found.append((values, slope, product))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_a_row_at_a_time_is_the_plain_layer() -> None:
    rows, weights = normal(5, 4), normal(3, 1, 4, seed=1)

    def each(weight: Tensor) -> Tensor:
        with SharedInputs():
            return torch.vmap(lambda row: functional.linear(row, weight))(rows)

    torch.testing.assert_close(torch.vmap(each)(weights), rows @ weights.mT)


def test_products_of_replicas_are_one_product_of_matrices() -> None:
    rows, weights = normal(5, 4), normal(3, 1, 4, seed=1)

    def layer(weight: Tensor) -> Tensor:
        with SharedInputs():
            return functional.linear(rows, weight)

    with torch.profiler.profile() as profile:
        torch.vmap(layer)(weights)
    names = {event.key for event in profile.key_averages()}
    assert "aten::mm" in names
    assert "aten::bmm" not in names


@pytest.mark.parametrize("has_bias", [True, False])
def test_autocast_returns_the_type_of_linear(has_bias: bool) -> None:
    rows, weight = normal(5, 4).float(), normal(1, 4, seed=1).float()
    bias = normal(1, seed=2).float() if has_bias else None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = functional.linear(rows, weight, bias)
        with SharedInputs():
            found = functional.linear(rows, weight, bias)
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
