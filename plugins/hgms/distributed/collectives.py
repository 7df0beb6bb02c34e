"""Differentiable sums over ranks, for derivatives of any order in reverse and forward mode."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from hgms_core import Tree


class _Sum(Function):
    """y = Σ_r v_r, equal on every rank.

    Its transpose is :class:`_Spread`; in forward mode it is its own derivative.
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
        return sum_over_ranks(tangent, ctx.group)

    @staticmethod
    def vmap(
        _info: Any, in_dims: tuple[int | None, None], value: Tensor, group: Any
    ) -> tuple[Tensor, int | None]:
        return sum_over_ranks(value, group), in_dims[0]


class _Spread(Function):
    """Use a value that is equal on all ranks in the local part of each rank.

    The forward result is the value itself; the gradients of the parts are summed.
    """

    @staticmethod
    def forward(value: Tensor, group: Any) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Any], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return sum_over_ranks(slope, ctx.group), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _group: None) -> Tensor:
        return spread(tangent, ctx.group)

    @staticmethod
    def vmap(
        _info: Any, in_dims: tuple[int | None, None], value: Tensor, group: Any
    ) -> tuple[Tensor, int | None]:
        return spread(value, group), in_dims[0]


def sum_over_ranks(value: Tensor, group: Any) -> Tensor:
    """Return Σ over the ranks of ``group`` of the local values; all ranks get the same result."""
    return _Sum.apply(value, group)


def spread(value: Tensor, group: Any) -> Tensor:
    """Return the value, which all ranks have, for use in the local part of one rank.

    Its gradient is the sum of the gradients on all ranks.
    """
    return _Spread.apply(value, group)


def spread_tree(tree: Tree, group: Any) -> Tree:
    """Apply :func:`spread` to every leaf.

    Leaves of one type are combined to one vector, so a gradient needs one sum over ranks.
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
