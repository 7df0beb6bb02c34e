"""Products with the generalised Gauss–Newton matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hgms.gauss_newton.criterion import composite
from hgms_core import Batch, Loss, Tree
from hgms_core.torch_errors import with_forward_mode

Product = Callable[[Tree, Tree, Batch, Tree], Tree]


def gauss_newton(loss: Loss, wanted_by: str = 'operator = "ggn"') -> Product:
    """Return ``product(theta, x, batch, v)`` = G v, with the shapes of x.

    The loss has outputs z(x) and a criterion c::

        G = [I; J]ᵀ ∇²_(x,z) c(θ, x, z) [I; J],        J = ∂z/∂x

    The product is a pure function of tensors that uses only ``torch.func``. G is positive
    semidefinite if c is convex in (x, z). It equals the Hessian if z is linear in x.

    Raises
    ------
    ConfigError
        If the loss does not declare its outputs; the message begins with ``wanted_by``.

    Notes
    -----
    Cost: the outputs twice, once with a tangent, and one backward pass through them: about one
    Hessian product.

    Source: Schraudolph (2002); Martens (2020), section 8.

    Examples
    --------
    >>> from hgms.gauss_newton import Composite
    >>> loss = Composite(
    ...     outputs=lambda x, batch: x["x"] ** 2,
    ...     criterion=lambda theta, x, z, batch: -z.log().sum(),
    ... )
    >>> product = gauss_newton(
    ...     loss
    ... )  # z = x², c = −log z: J = 2x, c″ = 1/z², so G = 4x²/x⁴ (and ∇²g = 2/x²)
    >>> product({}, {"x": torch.tensor([1.0, 2.0])}, {}, {"x": torch.ones(2)})
    {'x': tensor([4., 1.])}
    """
    outputs, criterion = composite(loss, wanted_by)

    def product(theta: Tree, x: Tree, batch: Batch, v: Tree) -> Tree:
        def level(at: Tree, z: Any) -> Tensor:
            return criterion(theta, at, z, batch)

        def network(at: Tree) -> Any:
            return outputs(at, batch)

        z, moved = tangent(network, x, v)
        own, change = second_derivative(level, (x, z), (v, moved))
        (back,) = torch.func.vjp(network, x)[1](change)
        return {name: own[name] + back[name] for name in x}

    return product


def tangent(network: Callable[[Tree], Any], x: Tree, v: Tree) -> tuple[Any, Any]:
    """Return z(x) and J v, in forward mode.

    Without forward mode, J v is the derivative of u ↦ Jᵀu along v.
    """

    def backward() -> tuple[Any, Any]:
        z, pull = torch.func.vjp(network, x)[:2]
        (moved,) = torch.func.vjp(lambda u: pull(u)[0], tree_map(torch.zeros_like, z))[1](v)
        return z, moved

    def forward() -> tuple[Any, Any]:
        z, moved = torch.func.jvp(network, (x,), (v,))[:2]
        return z, moved

    return with_forward_mode(forward, backward)


def second_derivative(
    level: Callable[[Tree, Any], Tensor], at: tuple[Tree, Any], along: tuple[Tree, Any]
) -> tuple[Tree, Any]:
    """Return ∇²c · (v, w) at (x, z), in forward over reverse mode, or by two reverse passes."""
    slopes = torch.func.grad(level, argnums=(0, 1))

    def forward() -> tuple[Tree, Any]:
        return torch.func.jvp(slopes, at, along)[1]

    def backward() -> tuple[Tree, Any]:
        def inner(x: Tree, z: Any) -> Tensor:
            pairs = zip(tree_leaves(slopes(x, z)), tree_leaves(along), strict=True)
            return torch.stack([(slope * part).sum() for slope, part in pairs]).sum()

        return torch.func.grad(inner, argnums=(0, 1))(*at)

    return with_forward_mode(forward, backward)
