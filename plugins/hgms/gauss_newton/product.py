"""Products with the generalised Gauss–Newton matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hgms.gauss_newton.criterion import composite
from hgms_core import Batch, Loss, Tree

Product = Callable[[Tree, Tree, Batch, Tree], Tree]


def gauss_newton(loss: Loss, wanted_by: str = 'operator = "ggn"') -> Product:
    """``product(theta, x, batch, v)`` = G v, with the shapes of x, for a loss with outputs z(x) and
    a criterion c::

        G = [I; J]ᵀ ∇²_(x,z) c(θ, x, z) [I; J],        J = ∂z/∂x

    A pure function of tensors, made of ``torch.func`` alone. Positive semidefinite where c is
    convex in (x, z); the Hessian itself where z is linear in x.

    Errors: ConfigError where the loss does not say its outputs; the message begins with
        ``wanted_by``.

    Cost: the outputs twice, one of them with a tangent, and one backward pass through them: about a
        Hessian product.

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

    Source: Schraudolph (2002); Martens (2020), section 8.
    """
    outputs, criterion = composite(loss, wanted_by)

    def product(theta: Tree, x: Tree, batch: Batch, v: Tree) -> Tree:
        def level(at: Tree, z: Any) -> Tensor:
            return criterion(theta, at, z, batch)

        def network(at: Tree) -> Any:
            return outputs(at, batch)

        z, moved = torch.func.jvp(network, (x,), (v,))[:2]
        own, change = torch.func.jvp(torch.func.grad(level, argnums=(0, 1)), (x, z), (v, moved))[1]
        (back,) = torch.func.vjp(network, x)[1](change)
        return {name: own[name] + back[name] for name in x}

    return product
