"""Autograd nodes of :func:`hgms.integrations.lower_solution`: a minimiser, and a linear solve.

The linear solve computes the minimiser's derivative. With H = ∇²_xx g(θ, x) + γI, all at the
minimiser x*(θ)::

    x*:           backward  s ↦ −∇²_θx g·v,  v = H⁻¹s              forward  dθ ↦ −H⁻¹ ∇²_xθ g·dθ
    v = H⁻¹s:     backward  w ↦ u = H⁻¹w for s,  −∂(uᵀHv) for θ and x    forward  H⁻¹(ds − dH·v)

Each formula uses only the other node, and derivatives of g at (θ, x) from torch.func. Both nodes
can therefore be differentiated as often as g, backward and forward, and x in these derivatives is
x*(θ).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.forward_ad import _set_fwd_grad_enabled, unpack_dual
from torch.func import grad, jvp

from hgms.integrations.level import Level, name_missing_derivatives
from hgms_core import Tree, cross_product, detach
from hgms_core.torch_errors import with_forward_mode


class Minimiser(Function):
    """(level, θ, x or None) to x*(θ): the given x, or the result of ``level.find``."""

    @staticmethod
    def forward(level: Level, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = tensors[len(level.names) :]
        if level.find is not None:
            with (
                name_missing_derivatives(),
                torch.enable_grad(),
            ):  # optimisers of torch need gradients enabled
                x = level.find(detach(dict(zip(level.names, tensors, strict=True))))
            level.lower, leaves = tuple(x), tuple(x.values())
        # Return separate tensors, because autograd modifies the returned tensors.
        return tuple(leaf.detach() for leaf in leaves)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.level, *tensors = inputs
        ctx.unused = len(tensors) - len(ctx.level.names)
        # Save the outputs: in a second derivative x is x*(θ), and autograd detects in-place
        # changes.
        keep(ctx, *tensors[: len(ctx.level.names)], *output)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        level: Level = ctx.level
        leaves = saved_tensors(ctx)
        theta, x = level.split(leaves)
        some = leaves_with_gradient(theta, ctx.needs_input_grad[1:])
        with name_missing_derivatives():
            v = dict(zip(x, Solve.apply(level, level.v0, *slopes, *leaves), strict=True))
            parts = cross_term(level, theta, some, x, v)
        return (
            None,
            *(parts.get(name) if name in some else None for name in theta),
            *[None] * ctx.unused,
        )

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        level: Level = ctx.level
        with name_missing_derivatives(), _set_fwd_grad_enabled(True):
            leaves = saved_tensors(ctx, forward=True)
            theta, x = level.split(leaves)
            some = {
                name: along
                for name, along in zip(theta, tangents, strict=False)
                if along is not None
            }

            def slope(some: Tree) -> Tree:
                return grad(lambda at: level.loss({**theta, **some}, at))(x)

            turned = jvp(slope, ({name: theta[name] for name in some},), (some,))[1]
            return tuple(-leaf for leaf in Solve.apply(level, None, *turned.values(), *leaves))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        return member_by_member(Minimiser, info.batch_size, in_dims, inputs)


def cross_term(level: Level, theta: Tree, some: Tree, x: Tree, v: Tree) -> Tree:
    """Return −∇²_θx g·v for ``some`` leaves of θ.

    If torch has no forward-mode derivative, use two backward passes; the result then has no further
    derivatives.
    """

    def forward() -> Tree:
        return grad(lambda some: -level.along({**theta, **some}, x, v))(some)

    def backward() -> Tree:
        if torch.is_grad_enabled():
            return forward()
        mixed = cross_product(lambda a, b: level.loss({**theta, **a}, b), some, x, v)
        return {name: -leaf for name, leaf in mixed.items()}

    return with_forward_mode(forward, backward)


class Solve(Function):
    """(level, v0, s, θ, x) to v = H⁻¹s."""

    @staticmethod
    def forward(level: Level, v0: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(level.lower)
        theta, x = level.split([leaf.detach() for leaf in tensors[count:]])
        with name_missing_derivatives():
            return tuple(level.solve([leaf.detach() for leaf in tensors[:count]], theta, x, v0))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.level, _, *tensors = inputs
        keep(ctx, *tensors[len(output) :], *output)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        level, theta, x, v = unpack_saved(ctx)
        at = [*theta.values(), *x.values()]
        with name_missing_derivatives():
            u = Solve.apply(level, None, *slopes, *at)
            some = leaves_with_gradient(theta, ctx.needs_input_grad[2 + len(x) :])
            turned = dict(zip(x, u, strict=True))
            upper, lower = grad(lambda at: -level.along({**theta, **at[0]}, at[1], turned, v))(
                (some, x)
            )
        return (None, None, *u, *(upper.get(name) for name in theta), *lower.values())

    @staticmethod
    def jvp(ctx: Any, _level: None, _v0: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        with _set_fwd_grad_enabled(True):
            level, theta, x, v = unpack_saved(ctx, forward=True)
        of_v = tangents[: len(v)]
        of_theta = tangents[len(v) : -len(x)]
        of_x = tangents[-len(x) :]
        some = {
            name: slope for name, slope in zip(theta, of_theta, strict=True) if slope is not None
        }
        moved = {name: slope for name, slope in zip(x, of_x, strict=True) if slope is not None}

        def product(some: Tree, part: Tree) -> list[Tensor]:
            return [*grad(lambda at: level.along({**theta, **some}, at, v))({**x, **part}).values()]

        with name_missing_derivatives(), _set_fwd_grad_enabled(True):
            at = ({name: theta[name] for name in some}, {name: x[name] for name in moved})
            turned = jvp(product, at, (some, moved))[1]
            rhs = [
                -leaf if slope is None else slope - leaf
                for slope, leaf in zip(of_v, turned, strict=True)
            ]
            return tuple(Solve.apply(level, None, *rhs, *theta.values(), *x.values()))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        return member_by_member(Solve, info.batch_size, in_dims, inputs)


def keep(ctx: Any, *tensors: Tensor) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def saved_tensors(ctx: Any, forward: bool = False) -> list[Tensor]:
    """Return the saved tensors as views.

    Saved tensors of a finished torch.func transform are converted to plain tensors.

    ``forward``: without the tangents of the level that a node's ``jvp`` is for. Torch calls ``jvp``
    with forward mode off. This function switches it on, because transforms around that level have
    separate tangents.
    """
    views = [leaf.view_as(leaf) for leaf in ctx.saved_tensors]
    return [unpack_dual(leaf, level=0).primal for leaf in views] if forward else views


def unpack_saved(ctx: Any, forward: bool = False) -> tuple[Level, Tree, Tree, Tree]:
    """Return the values saved by :class:`Solve`: the level, θ, x and v."""
    level = ctx.level
    tensors = saved_tensors(ctx, forward)
    theta, x = level.split(tensors[: -len(level.lower)])
    return level, theta, x, dict(zip(x, tensors[-len(level.lower) :], strict=True))


def leaves_with_gradient(theta: Tree, needed: Sequence[bool]) -> Tree:
    """Return the leaves of θ whose gradient is needed."""
    return {
        name: leaf
        for (name, leaf), need in zip(theta.items(), needed, strict=False)
        if need and leaf.is_floating_point()
    }


def member_by_member(
    function: Any, count: int, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Apply a node to N stacked members, one after the other.

    The solver stops at a different time for each member.
    """
    with name_missing_derivatives():
        members = [
            function.apply(
                *(
                    leaf if dim is None else leaf.select(dim, i)
                    for leaf, dim in zip(inputs, in_dims, strict=True)
                )
            )
            for i in range(count)
        ]
        return tuple(torch.stack(leaves) for leaves in zip(*members, strict=True)), (0,) * len(
            members[0]
        )
