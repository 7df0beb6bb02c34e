"""Recurrent layers with second derivatives and forward-mode derivatives.

The layers consist of operations for which torch supports both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def without_fused() -> Iterator[None]:
    """Disable recurrent kernels without second derivatives or forward mode.

    Inside the context, the library kernels (cuDNN, oneDNN) are disabled. On a GPU, torch then uses
    cells that are also fused and have no forward mode. In forward mode, plain operations compute
    these cells, which takes longer.
    """
    libraries: list[Any] = [torch.backends.cudnn, torch.backends.mkldnn]
    before = [library.enabled for library in libraries]
    forward_mode = forward_ad._current_level >= 0
    try:
        for library in libraries:
            library.enabled = False
        with PlainCells() if forward_mode else contextlib.nullcontext():
            yield
    finally:
        for library, enabled in zip(libraries, before, strict=True):
            library.enabled = enabled


class PlainCells(TorchFunctionMode):
    """Compute LSTM and GRU layers and cells by plain operations on any device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        options = kwargs or {}
        if name == "lstm_cell":
            return _lstm_cell(*args, **options)
        if name == "gru_cell":
            return _gru_cell(*args, **options)
        if name in ("lstm", "gru"):
            from torch._decomp import decomposition_table

            # for a packed sequence, the second argument is a tensor of batch sizes
            form = "data" if isinstance(args[3], list | tuple) else "input"
            overload = getattr(getattr(torch.ops.aten, name), form)
            return decomposition_table[overload](*args, **options)
        return func(*args, **options)


def _lstm_cell(
    x: Tensor,
    state: tuple[Tensor, Tensor],
    of_x: Tensor,
    of_h: Tensor,
    bias_x: Tensor | None = None,
    bias_h: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    h, c = state
    entry, forget, cell, out = (linear(x, of_x, bias_x) + linear(h, of_h, bias_h)).chunk(4, -1)
    following = forget.sigmoid() * c + entry.sigmoid() * cell.tanh()
    return out.sigmoid() * following.tanh(), following


def _gru_cell(
    x: Tensor,
    h: Tensor,
    of_x: Tensor,
    of_h: Tensor,
    bias_x: Tensor | None = None,
    bias_h: Tensor | None = None,
) -> Tensor:
    reset_x, update_x, new_x = linear(x, of_x, bias_x).chunk(3, -1)
    reset_h, update_h, new_h = linear(h, of_h, bias_h).chunk(3, -1)
    update = (update_x + update_h).sigmoid()
    new = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
    return new + update * (h - new)
