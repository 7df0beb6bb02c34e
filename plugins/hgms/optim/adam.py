"""Adam's bias-corrected update::

    m ← β₁m + (1 − β₁)g,  v ← β₂v + (1 − β₂)g²,  x ← x − η m̂ / (√(v̂ + ε₀) + ε),  m̂ = m/(1 − β₁ᵗ),
        v̂ = v/(1 − β₂ᵗ)

Two scalars contain both corrections. The caller applies weight decay: it is decoupled, so it only
scales x. With ε₀ = 0 (the default), a step near a stationary point has a derivative of order η/ε,
and hypergradients through such steps are unusable. With ε₀ > 0 the derivative is at most η/√ε₀.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from hgms_core import Tree


def corrections(rate: Any, count: Any, betas: tuple[float, float]) -> tuple[Any, Any]:
    """Return (η/(1 − β₁ᵗ), √(1 − β₂ᵗ)) at t = ``count``, including this step.

    Adam multiplies and divides by these numbers. Both may be tensors.

    Examples
    --------
    >>> corrections(0.5, 1, (0.5, 0.75))
    (1.0, 0.5)
    """
    return rate / (1 - betas[0] ** count), (1 - betas[1] ** count) ** 0.5


Operation = Callable[..., Any]


@frozen
class Operations:
    """Operations on lists of tensors, as new tensors or in place."""

    add: Operation
    sub: Operation
    mul: Operation
    lerp: Operation
    addcdiv: Operation


def _in_place(operation: Operation) -> Operation:
    def change(leaves: list[Tensor], *arguments: Any, **options: Any) -> list[Tensor]:
        operation(leaves, *arguments, **options)
        return leaves

    return change


def _on_copies(operation: Operation) -> Operation:
    def compute(leaves: list[Tensor], *arguments: Any, **options: Any) -> list[Tensor]:
        # The derivative of torch._foreach_add fails for gradients of compiled modules, and the
        # derivatives of in-place operations do not.
        copies = [leaf.clone() for leaf in leaves]
        operation(copies, *arguments, **options)
        return copies

    return compute


def _operations(form: Callable[[Operation], Operation]) -> Operations:
    return Operations(
        form(torch._foreach_add_),
        form(torch._foreach_sub_),
        form(torch._foreach_mul_),
        form(torch._foreach_lerp_),
        form(torch._foreach_addcdiv_),
    )


NEW = _operations(_on_copies)
IN_PLACE = _operations(_in_place)


def adam(
    x: Tree,
    grads: Tree,
    first: Tree,
    second: Tree,
    corrected: tuple[float | Tensor, float | Tensor],
    *,
    betas: tuple[float, float],
    eps: float | tuple[float, float],
) -> tuple[Tree, Tree, Tree]:
    """Return (x, m, v) after one step from x, m (``first``) and v (``second``).

    The results are differentiable functions of all four trees. With ε₀ = 0 the derivative of √v at
    v = 0 is defined as 0.

    ``corrected`` is the result of :func:`corrections`: numbers, 0-dimensional tensors, or a first
    number ``[N]`` for leaves that stack N members. ``eps`` is ε, or (ε, ε₀).

    Examples
    --------
    >>> zeros = {"x": torch.zeros(2)}
    >>> x, m, v = adam(
    ...     zeros,
    ...     {"x": torch.tensor([3.0, -0.1])},
    ...     zeros,
    ...     zeros,
    ...     corrections(0.5, 1, (0.9, 0.999)),
    ...     betas=(0.9, 0.999),
    ...     eps=1e-8,
    ... )
    >>> x["x"]
    tensor([-0.5000,  0.5000])
    """
    leaves, slopes, m, v = ([tree[name] for name in x] for tree in (x, grads, first, second))
    after = adam_lists(NEW, leaves, slopes, m, v, corrected, betas, eps)
    x, first, second = (dict(zip(x, values, strict=True)) for values in after)
    return x, first, second


def adam_lists(
    operations: Operations,
    leaves: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    corrected: tuple[float | Tensor, float | Tensor],
    betas: tuple[float, float],
    eps: float | tuple[float, float],
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Apply :func:`adam` to lists of leaves."""
    scale, correction = corrected
    first = operations.lerp(first, grads, 1 - betas[0])
    second = operations.mul(second, betas[1])
    torch._foreach_addcmul_(second, grads, grads, 1 - betas[1])
    root = _denominator(second, correction, *(eps if isinstance(eps, tuple) else (eps, 0.0)))
    if isinstance(scale, Tensor):
        quotients = torch._foreach_div(first, root)
        directions = [per_member(scale, leaf) * leaf for leaf in quotients]
        return operations.sub(leaves, directions), first, second
    return operations.addcdiv(leaves, first, root, -scale), first, second


def per_member(numbers: Any, leaf: Tensor) -> Tensor:
    """Reshape one number per member for a stacked leaf; return a scalar for all members
    unchanged.
    """
    return numbers.reshape(-1, *[1] * (leaf.dim() - 1)) if numbers.dim() else numbers


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

    Examples
    --------
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


__all__ = ["adam", "corrections", "root"]
