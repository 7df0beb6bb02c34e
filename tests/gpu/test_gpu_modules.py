"""Modules on the device: rows may stay on the CPU, masks and fresh parameters are the CPU's,
recurrent layers have products.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from placed import compare
from support.helpers import rejects
from torch import Tensor, nn
from torch.nn import functional

from hgms.testing.kit import snapshot
from hgms_core import ROLES, Data, Key, Problem, Tree, curvature, fresh_parameters

pytestmark = pytest.mark.nightly


def loss(model: Any, batch: Tree) -> Tensor:
    return functional.softplus(batch["y"] * model(batch["a"]).squeeze(1))


def rows() -> Data:
    draw = torch.Generator().manual_seed(0)
    return Data.of(
        {name: torch.randn(shape, generator=draw) for name, shape in (("a", (12, 3)), ("y", (12,)))}
    )


def problem(model: nn.Module, data: Data) -> Problem:
    return Problem.of_module(
        model, loss, data, dict.fromkeys(ROLES, data), fresh=fresh_parameters(model)
    )


def test_a_module_on_the_device_computes_what_it_does_on_the_cpu(device: torch.device) -> None:
    torch.manual_seed(0)
    here = nn.Sequential(
        nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 1)
    )
    there = copy.deepcopy(here).to(device)
    data = rows()
    on_cpu = problem(here, data)
    on_device = problem(there, data)
    batch = data.batch(torch.arange(8))
    assert on_device.theta0["theta"].device.type == device.type
    for value in ("g", "f"):
        want = getattr(on_cpu, value)(on_cpu.theta0, on_cpu.x0, batch)
        have = getattr(on_device, value)(on_device.theta0, on_device.x0, batch)
        assert have.device.type == device.type
        torch.testing.assert_close(have.cpu(), want)
    compare(snapshot(on_cpu.initial(Key(1))), snapshot(on_device.initial(Key(1))), device)


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


def test_a_module_on_two_devices_is_refused_where_both_are_trained(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("one device")
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1).to(device))
    with rejects("several-devices") as caught:
        problem(model, rows())
    assert f"cpu and {device.type}:0" in caught.value.message
