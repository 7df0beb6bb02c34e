"""The fused cells of recurrent layers for the simulated device; torch has them on accelerators
only.

They compute the same numbers as the kernels and, like the kernels, have no forward mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def _lstm(
    of_x: Tensor, of_h: Tensor, cx: Tensor, bias_x: Tensor | None, bias_h: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = of_x + of_h
    if bias_x is not None and bias_h is not None:
        gates = gates + bias_x + bias_h
    entry, forget, cell, out = gates.chunk(4, 1)
    workspace = torch.cat([entry.sigmoid(), forget.sigmoid(), cell.tanh(), out.sigmoid()], 1)
    entry, forget, cell, out = workspace.chunk(4, 1)
    cy = forget * cx + entry * cell
    return out * cy.tanh(), cy, workspace


def _lstm_backward(
    of_hy: Tensor | None,
    of_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    entry, forget, cell, out = workspace.chunk(4, 1)
    zero = torch.zeros_like(cy)
    of_hy = zero if of_hy is None else of_hy
    of_cy = zero if of_cy is None else of_cy
    along = of_cy + of_hy * out * (1 - cy.tanh() ** 2)
    gates = torch.cat(
        [
            along * cell * entry * (1 - entry),
            along * cx * forget * (1 - forget),
            along * entry * (1 - cell**2),
            of_hy * cy.tanh() * out * (1 - out),
        ],
        1,
    )
    return gates, along * forget, gates.sum(0) if has_bias else None


def _gru(
    of_x: Tensor, of_h: Tensor, hx: Tensor, bias_x: Tensor | None, bias_h: Tensor | None
) -> tuple[Tensor, Tensor]:
    if bias_x is not None and bias_h is not None:
        of_x = of_x + bias_x
        of_h = of_h + bias_h
    reset_x, update_x, new_x = of_x.chunk(3, 1)
    reset_h, update_h, new_h = of_h.chunk(3, 1)
    reset = (reset_x + reset_h).sigmoid()
    update = (update_x + update_h).sigmoid()
    new = (new_x + reset * new_h).tanh()
    return new + update * (hx - new), torch.cat([reset, update, new, hx, new_h], 1)


def _gru_backward(
    of_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    reset, update, new, hx, new_h = workspace.chunk(5, 1)
    of_update = of_hy * (hx - new) * update * (1 - update)
    of_new = of_hy * (1 - update) * (1 - new**2)
    of_reset = of_new * new_h * reset * (1 - reset)
    of_x = torch.cat([of_reset, of_update, of_new], 1)
    of_h = torch.cat([of_reset, of_update, of_new * reset], 1)
    biases = (of_x.sum(0), of_h.sum(0)) if has_bias else (None, None)
    return of_x, of_h, of_hy * update, *biases


FUSED: Mapping[str, Callable[..., Any]] = {
    "aten::_thnn_fused_lstm_cell": _lstm,
    "aten::_thnn_fused_lstm_cell_backward_impl": _lstm_backward,
    "aten::_thnn_fused_gru_cell": _gru,
    "aten::_thnn_fused_gru_cell_backward": _gru_backward,
}
"""The function that computes an operation on the CPU, by the name of the operation."""
