"""Adam's bias-corrected update: in place, and as a differentiable function.

Both use the same operations::

    m ← β₁m + (1 − β₁)g,  v ← β₂v + (1 − β₂)g²,  x ← x − η m̂ / (√(v̂ + ε₀) + ε),  m̂ = m/(1 − β₁ᵗ),
        v̂ = v/(1 − β₂ᵗ)

Two scalars contain both corrections. The caller applies weight decay: it is decoupled, so it only
scales x. With ε₀ = 0 (the default), a step near a stationary point has a derivative of order η/ε,
and hypergradients through such steps are unusable. With ε₀ > 0 the derivative is at most η/√ε₀.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hgms_core import Tree


def corrections(rate: Any, count: Any, betas: tuple[float, float]) -> tuple[Any, Any]:
    """Return (η/(1 − β₁ᵗ), √(1 − β₂ᵗ)) at t = ``count``, including this step.

    Adam multiplies and divides by these numbers. Both may be tensors.

    >>> corrections(0.5, 1, (0.5, 0.75))
    (1.0, 0.5)
    """
    return rate / (1 - betas[0] ** count), (1 - betas[1] ** count) ** 0.5


def adam_(
    leaves: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    *,
    scale: float | Tensor,
    correction: float | Tensor,
    betas: tuple[float, float],
    eps: float | tuple[float, float],
) -> None:
    """Apply one step in place: ``leaves``, m (``first``) and v (``second``) change, ``grads`` do
    not.

    ``scale`` and ``correction`` are the results of :func:`corrections`: numbers, 0-dimensional
    tensors, or a ``scale`` ``[N]`` for leaves that stack N members. ``eps`` is ε, or (ε, ε₀).

    >>> x, m, v = ([torch.zeros(2)] for _ in range(3))
    >>> scale, correction = corrections(0.5, 1, (0.9, 0.999))
    >>> adam_(
    ...     x,
    ...     [torch.tensor([3.0, -0.1])],
    ...     m,
    ...     v,
    ...     scale=scale,
    ...     correction=correction,
    ...     betas=(0.9, 0.999),
    ...     eps=1e-8,
    ... )
    >>> x[0]
    tensor([-0.5000,  0.5000])
    """
    eps, eps_root = _both(eps)
    torch._foreach_lerp_(first, grads, 1 - betas[0])
    torch._foreach_mul_(second, betas[1])
    torch._foreach_addcmul_(second, grads, grads, 1 - betas[1])
    if eps_root:
        root = torch._foreach_div(second, correction * correction)
        torch._foreach_add_(root, eps_root)
        torch._foreach_sqrt_(root)
    else:
        root = torch._foreach_sqrt(second)
        torch._foreach_div_(root, correction)
    torch._foreach_add_(root, eps)
    if isinstance(scale, Tensor):
        for leaf, direction in zip(leaves, torch._foreach_div(first, root), strict=True):
            leaf.sub_(
                (scale.reshape(-1, *[1] * (leaf.dim() - 1)) if scale.dim() else scale) * direction
            )
    else:
        torch._foreach_addcdiv_(leaves, first, root, -scale)


def adam(
    x: Tree,
    grads: Tree,
    first: Tree,
    second: Tree,
    *,
    scale: float | Tensor,
    correction: float | Tensor,
    betas: tuple[float, float],
    eps: float | tuple[float, float],
) -> tuple[Tree, Tree, Tree]:
    """Return (x, m, v) after one step, as differentiable functions of all four trees.

    With ε₀ = 0 the derivative of √v at v = 0 is defined as 0.

    ``scale`` and ``correction`` are the results of :func:`corrections`: numbers, or 0-dimensional
    tensors. ``eps`` is ε, or (ε, ε₀).
    """
    eps, eps_root = _both(eps)
    first = {name: torch.lerp(first[name], grads[name], 1 - betas[0]) for name in x}
    second = {
        name: torch.addcmul(betas[1] * second[name], grads[name], grads[name], value=1 - betas[1])
        for name in x
    }
    root = {
        name: (leaf / (correction * correction) + eps_root).sqrt() + eps
        if eps_root
        else _Root.apply(leaf) / correction + eps
        for name, leaf in second.items()
    }
    if isinstance(scale, Tensor):
        return {name: x[name] - scale * first[name] / root[name] for name in x}, first, second
    return (
        {name: torch.addcdiv(x[name], first[name], root[name], value=-scale) for name in x},
        first,
        second,
    )


def _both(eps: float | tuple[float, float]) -> tuple[float, float]:
    """Return (ε, ε₀)."""
    return eps if isinstance(eps, tuple) else (eps, 0.0)


class _Root(torch.autograd.Function):
    """√v with the derivative 0 instead of infinity at v = 0.

    A coordinate that never had a gradient therefore keeps its value.
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        root = v.sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        return (grad / (2 * root)).masked_fill(~(root > 0), 0)


__all__ = ["adam", "adam_", "corrections"]
