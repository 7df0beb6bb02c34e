"""Small matrix products as loops, which inductor joins with the operations around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hgms.compiled.trace import KNOWN, SMALL_PRODUCT, aten


def _mm(a: Tensor, b: Tensor) -> Any:
    (m, k), n = a.shape, b.shape[1]
    if m * k * n > SMALL_PRODUCT:
        return KNOWN[aten.mm.default](a, b)
    if n < min(m, 16):  # the branches
        return (b.t().unsqueeze(2) * _columns(a).unsqueeze(0)).sum(1).t()
    return (a.unsqueeze(2) * b.unsqueeze(0)).sum(1)


def _bmm(a: Tensor, b: Tensor) -> Any:
    if a.numel() * b.shape[2] > SMALL_PRODUCT:
        return KNOWN[aten.bmm.default](a, b)
    return (a.unsqueeze(3) * b.unsqueeze(1)).sum(2)


def _mv(a: Tensor, b: Tensor) -> Tensor:
    return NotImplemented if a.numel() > SMALL_PRODUCT else (_columns(a) * b.unsqueeze(1)).sum(0)


def _addmm(c: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Any:
    if a.numel() * b.shape[1] > SMALL_PRODUCT:
        return KNOWN[aten.addmm.default](c, a, b, beta, alpha)
    return beta * c + alpha * (a @ b)


def _columns(a: Tensor) -> Tensor:
    """Return the columns of a matrix as rows.

    Inductor vectorises the last axis, and a sum over it takes longer than a sum over another axis.
    A loop copies a matrix from outside only once.
    """
    return a.t().contiguous()


LOOPS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.mv.default: _mv,
    aten.dot.default: lambda a, b: (a * b).sum(),
    aten.addmm.default: _addmm,
}
LARGE = (aten.mm.default, aten.bmm.default, aten.mv.default, aten.addmm.default)
"""Products that are calls of the linear algebra library."""
