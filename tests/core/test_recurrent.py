"""Recurrent layers by plain operations: the same numbers, and a forward mode on every device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.helpers import F64
from torch import Tensor, nn

from hgms.adapters.recurrent import PlainCells

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
