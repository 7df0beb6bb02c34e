"""Sums over ranks that can be differentiated, as often and in whichever mode a component wants."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from hgms_core import Tree


class _Sum(Function):
    """y = Σ_r v_r, the same on every rank: its transpose is :class:`_Spread`, and its own
    derivative in forward mode.
    """

    @staticmethod
    def forward(value: Tensor, group: Any) -> Tensor:
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Any], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return spread(slope, ctx.group), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _group: None) -> Tensor:
        return summed(tangent, ctx.group)

    @staticmethod
    def vmap(
        _info: Any, in_dims: tuple[int | None, None], value: Tensor, group: Any
    ) -> tuple[Tensor, int | None]:
        return summed(value, group), in_dims[0]


class _Spread(Function):
    """What is the same on every rank goes into each one's own part: the value itself; slopes of
    the parts add up.
    """

    @staticmethod
    def forward(value: Tensor, group: Any) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Any], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return summed(slope, ctx.group), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _group: None) -> Tensor:
        return spread(tangent, ctx.group)

    @staticmethod
    def vmap(
        _info: Any, in_dims: tuple[int | None, None], value: Tensor, group: Any
    ) -> tuple[Tensor, int | None]:
        return spread(value, group), in_dims[0]


def summed(value: Tensor, group: Any) -> Tensor:
    """Σ over the ranks of ``group``, of values that each has of its own. The result is the same
    on all of them.
    """
    total: Tensor = _Sum.apply(value, group)
    return total


def spread(value: Tensor, group: Any) -> Tensor:
    """The value, which all ranks have, for use in a part that is one rank's own. Its slope is
    the sum of theirs.
    """
    same: Tensor = _Spread.apply(value, group)
    return same


def spread_tree(tree: Tree, group: Any) -> Tree:
    """:func:`spread` of every leaf; of leaves of one type as one vector, so that a gradient is
    one sum over ranks.
    """
    leaves = list(tree.values())
    if len({leaf.dtype for leaf in leaves}) != 1:
        return {name: spread(leaf, group) for name, leaf in tree.items()}
    flat = spread(torch.cat([leaf.reshape(-1) for leaf in leaves]), group)
    parts = flat.split([leaf.numel() for leaf in leaves])
    return {
        name: part.reshape(leaf.shape)
        for (name, leaf), part in zip(tree.items(), parts, strict=True)
    }
