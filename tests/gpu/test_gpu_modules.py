"""Modules on the device: recurrent layers have products, and rows may stay on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hgms.adapters import fresh_parameters, from_module
from hgms_core import ROLES, Data, Problem, Tree, curvature

pytestmark = pytest.mark.nightly


def loss(model: Any, batch: Tree) -> Tensor:
    return functional.softplus(batch["y"] * model(batch["a"]).squeeze(1))


def rows() -> Data:
    draw = torch.Generator().manual_seed(0)
    return Data.of(
        {name: torch.randn(shape, generator=draw) for name, shape in (("a", (12, 3)), ("y", (12,)))}
    )


def problem(model: nn.Module, data: Data) -> Problem:
    return from_module(model, loss, data, dict.fromkeys(ROLES, data), fresh=fresh_parameters(model))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_have_products_on_the_device(
    kind: type[nn.RNNBase], device: torch.device
) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = kind(1, 4, batch_first=True), nn.Linear(4, 1)

        def forward(self, a: Tensor) -> Tensor:
            out: Tensor = self.out(self.cell(a[..., None])[0][:, -1])
            return out

    torch.manual_seed(0)
    data = rows()
    p = problem(Recurrent().to(device), data)
    batch = data.batch(None)
    size = sum(leaf.numel() for leaf in p.x0.values())
    v = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(device)
    backward, forward, apart = (
        curvature(lambda x: p.g(p.theta0, x, batch), p.x0, strategy).matvec(v)
        for strategy in ("vjp", "jvp", "difference")
    )
    torch.testing.assert_close(forward, backward, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(apart, backward, rtol=5e-2, atol=5e-3)
