"""Recurrent layers by plain operations: the same numbers, and a forward mode on every device."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.helpers import F64
from support.module_problems import Recurrent
from torch import Tensor, nn

from hgms.testing import simulated_device
from hgms_core import ROLES, Data, Problem, Tree
from hgms_core.adapters.recurrent import PlainCells, without_fused

pytestmark = pytest.mark.plugins


def leaves(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def assert_plain(layer: nn.Module, x: Any) -> None:
    want = leaves(layer(x))
    with PlainCells():
        have = leaves(layer(x))
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"bias": False, "num_layers": 2}])
def test_plain_layers_compute_the_same_numbers(kind: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = kind(2, 3, batch_first=True, dtype=F64, **options)
    x = torch.randn(4, 5, 2, dtype=F64)
    lengths = torch.tensor([5, 4, 3, 2])
    assert_plain(layer, x)
    assert_plain(layer, nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("bias", [True, False])
def test_plain_cells_compute_the_same_numbers(kind: Any, bias: bool) -> None:
    torch.manual_seed(0)
    assert_plain(kind(2, 3, bias=bias, dtype=F64), torch.randn(4, 2, dtype=F64))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.nightly
@pytest.mark.skipif(
    os.environ.get("HGMS_GPU_TESTS_DEVICE") != "simulated", reason="requires a process of its own"
)
def test_a_layer_on_an_accelerator_has_a_forward_mode(kind: Any) -> None:
    """The fused cells there have none."""

    def loss(model: Any, batch: Tree) -> Tensor:
        return (model(batch["a"])[:, 0] - 1).square()

    def product(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        rows = Data.of({"a": torch.linspace(-1, 1, 12, dtype=F64).reshape(4, 3)})
        p = Problem.of_module(
            Recurrent(kind).double().to(device), loss, rows, dict.fromkeys(ROLES, rows)
        )
        batch = p.lower_data.batch(None)
        slope = torch.func.grad(lambda x: p.g(p.theta0, x, batch))
        along = {name: torch.ones_like(leaf) for name, leaf in p.x0.items()}
        return [leaf.cpu() for leaf in torch.func.jvp(slope, (p.x0,), (along,))[1].values()]

    here = product(torch.device("cpu"))
    with simulated_device() as device:
        there = product(device)
    assert here
    torch.testing.assert_close(there, here, rtol=1e-10, atol=1e-12)


def test_the_settings_of_torch_are_as_before_afterwards() -> None:
    before = (torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled)
    with without_fused():
        assert not torch.backends.cudnn.enabled
    assert (torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled) == before
