"""Adam's bias-corrected update, in place and as a function of its inputs::

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
    torch._foreach_lerp_(first, grads, 1 - betas[0])
    torch._foreach_mul_(second, betas[1])
    torch._foreach_addcmul_(second, grads, grads, 1 - betas[1])
    root = _denominator(second, correction, *(eps if isinstance(eps, tuple) else (eps, 0.0)))
    if isinstance(scale, Tensor):
        for leaf, direction in zip(leaves, torch._foreach_div(first, root), strict=True):
            leaf.sub_(
                (scale.reshape(-1, *[1] * (leaf.dim() - 1)) if scale.dim() else scale) * direction
            )
    else:
        torch._foreach_addcdiv_(leaves, first, root, -scale)


def adam(
    x: Tree, grads: Tree, first: Tree, second: Tree, **numbers: Any
) -> tuple[Tree, Tree, Tree]:
    """Return (x, m, v) after one step, as differentiable functions of all four trees.

    With ε₀ = 0 the derivative of √v at v = 0 is defined as 0. ``numbers`` are the other arguments
    of :func:`adam_`.
    """
    x, first, second = ({name: tree[name].clone() for name in x} for tree in (x, first, second))
    leaves, *moments = ([*tree.values()] for tree in (x, first, second))
    adam_(leaves, [grads[name] for name in x], *moments, **numbers)
    return x, first, second


def _denominator(
    second: list[Tensor], correction: float | Tensor, eps: float, eps_root: float
) -> list[Tensor]:
    """Return √(v̂ + ε₀) + ε. If no graph is recorded, it changes temporary tensors in place."""
    if torch.is_grad_enabled() and second[0].requires_grad:
        return [
            (leaf / (correction * correction) + eps_root).sqrt() + eps
            if eps_root
            else root(leaf) / correction + eps
            for leaf in second
        ]
    if eps_root:
        roots = torch._foreach_div(second, correction * correction)
        torch._foreach_add_(roots, eps_root)
        torch._foreach_sqrt_(roots)
    else:
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, correction)
    torch._foreach_add_(roots, eps)
    return list(roots)


def root(v: Tensor) -> Tensor:
    """Return √v with the derivative 0 instead of infinity at v = 0.

    A coordinate that never had a gradient therefore keeps its value.

    >>> v = torch.tensor([0.0, 4.0], requires_grad=True)
    >>> torch.autograd.grad(root(v).sum(), v)
    (tensor([0.0000, 0.2500]),)
    """
    value: Tensor = _Root.apply(v)
    return value


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        root = v.sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        return (grad / (2 * root)).masked_fill(~(root > 0), 0)


__all__ = ["adam", "adam_", "corrections", "root"]
