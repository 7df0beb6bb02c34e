"""Products with the generalised Gauss–Newton matrix from first derivatives of the outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hgms.gauss_newton.criterion import composite
from hgms.gauss_newton.product import Product, second_derivative
from hgms_core import Batch, Loss, Ravel, Tree, detach
from hgms_core.hypergrad import difference_step


def by_difference(
    loss: Loss, wanted_by: str = 'operator = "ggn"', precision: torch.dtype | None = None
) -> Product:
    """:func:`gauss_newton` with a central difference for J v, and a backward pass for Jᵀ::

        J v ≈ (z(x + τv) − z(x − τv)) / 2τ

    This variant supports networks without forward mode (fused attention, quantised weights, a base
    in parts). It evaluates only values and gradients of the network. The criterion is
    differentiated twice, exactly. ``precision`` is the type in which the outputs are computed, if
    it is coarser than x's type (:func:`hgms_core.hypergrad.difference_step`).

    Raises
    ------
    HgmsError
        As :func:`gauss_newton`.

    Notes
    -----
    Cost: the outputs three times, and one backward pass through them.

    Examples
    --------
    >>> from hgms.gauss_newton import Composite
    >>> loss = Composite(
    ...     outputs=lambda x, batch: x["x"] ** 2,
    ...     criterion=lambda theta, x, z, batch: -z.log().sum(),
    ... )
    >>> at = {"x": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    >>> product = by_difference(loss)({}, at, {}, {"x": torch.ones(2, dtype=torch.float64)})
    >>> product["x"].round(decimals=6).tolist()  # 4/x²
    [4.0, 1.0]
    """
    outputs, criterion = composite(loss, wanted_by)

    def product(theta: Tree, x: Tree, batch: Batch, v: Tree) -> Tree:
        x, v, spec = detach(x), detach(v), Ravel.of(x)
        flat = spec.ravel(x)
        direction = spec.ravel(v)
        step = difference_step(flat, direction, precision)
        with torch.no_grad():
            ends = [
                outputs(spec.unravel(flat + sign * step * direction), batch) for sign in (1, -1)
            ]
        moved = tree_map(lambda plus, minus: (plus - minus) / (2 * step.squeeze(-1)), *ends)
        leaves = {name: leaf.requires_grad_() for name, leaf in detach(x).items()}
        with torch.enable_grad():
            z, form = tree_flatten(outputs(leaves, batch))

        def level(at: Tree, z: Any) -> Tensor:
            return criterion(theta, at, z, batch)

        at = tree_unflatten([leaf.detach() for leaf in z], form)
        own, change = second_derivative(level, (x, at), (v, moved))
        back = torch.autograd.grad(
            z, list(leaves.values()), tree_flatten(change)[0], materialize_grads=True
        )
        return {name: own[name] + part for name, part in zip(x, back, strict=True)}

    return product
