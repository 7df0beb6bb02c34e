"""The step of SGD and of AdamW, for one branch or a stack of branches."""

from __future__ import annotations

from typing import Literal

import torch
from attrs import frozen
from torch import Tensor

from hgms.optim.adam import adam_, corrections, per_member, root
from hgms_core import ConfigError, Tree


@frozen
class Rule:
    """SGD or AdamW with its settings. ``done`` is the number of steps already taken with the
    moments.
    """

    optimizer: Literal["sgd", "adamw"]
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    eps_root: float = 0.0
    clip: float | None = None
    done: int = 0

    def check_linear(self) -> None:
        if self.optimizer != "sgd" or self.clip is not None:
            raise not_linear(self.optimizer if self.clip is None else "clip")

    def no_moments(self, x: Tree) -> Tree:
        """Return moments of zero: m, and for AdamW then v, each in the order of x."""
        kinds = ("m", "v") if self.optimizer == "adamw" else ("m",) if self.momentum else ()
        return {
            f"{kind}.{name}": torch.zeros_like(leaf) for kind in kinds for name, leaf in x.items()
        }

    def numbers(self, step: int, rate: float | Tensor, decay: float | Tensor) -> Coefficients:
        """Return the coefficients of step number ``step`` in a run that starts now."""
        decays = isinstance(decay, Tensor) or bool(decay)
        kept = 1 - rate * decay if decays else None
        return Coefficients(rate, kept, *corrections(rate, self.done + step + 1, self.betas))

    def step(
        self,
        x: Tree,
        grads: list[Tensor],
        moments: Tree,
        numbers: Coefficients,
        *,
        stacked: bool = False,
        in_place: bool = False,
    ) -> tuple[Tree, Tree]:
        """Return (x, moments) after a step; differentiable if gradients are recorded.

        With ``in_place``, x and the moments change, which saves the memory of their copies.
        """
        if not in_place:
            x, moments = (
                {name: leaf.clone() for name, leaf in tree.items()} for tree in (x, moments)
            )
        grads = clipped(grads, self.clip, stacked)
        leaves = [*x.values()]
        first = [*moments.values()][: len(x)]
        second = [*moments.values()][len(x) :]
        if isinstance(numbers.kept, Tensor):
            for leaf in leaves:
                leaf.mul_(per_member(numbers.kept, leaf))
        elif numbers.kept is not None:
            torch._foreach_mul_(leaves, numbers.kept)
        if self.optimizer == "adamw":
            corrected = (numbers.scale, numbers.correction)
            eps = (self.eps, self.eps_root)
            adam_(leaves, grads, first, second, corrected, self.betas, eps)
            return x, moments
        if self.momentum:
            torch._foreach_mul_(first, self.momentum)
            torch._foreach_add_(first, grads)
            grads = first
        if isinstance(numbers.rate, Tensor):
            for leaf, direction in zip(leaves, grads, strict=True):
                leaf.sub_(per_member(numbers.rate, direction) * direction)
        else:
            # Out of place, the derivative of _foreach_add fails for gradients of compiled modules.
            torch._foreach_add_(leaves, grads, alpha=-numbers.rate)
        return x, moments


def not_linear(optimizer: str) -> ConfigError:
    """Return the error for an optimiser with a step that is not linear in ∇g."""
    return ConfigError(
        "not-supported",
        f"a step that is linear in ∇g requires the optimizer 'sgd', but the generator has "
        f"{optimizer!r}",
        place=("generator", "optimizer"),
        hint="change the optimizer, or use the hypergradient 'unrolled' with last = 1",
    )


@frozen(eq=False)
class Coefficients:
    """Coefficients of one step.

    They are the rate η, 1 − η·wd (absent without decay), and Adam's scale and correction
    (:func:`hgms.optim.adam.corrections`).
    """

    rate: float | Tensor
    kept: float | Tensor | None
    scale: float | Tensor
    correction: float | Tensor


def clipped(grads: list[Tensor], bound: float | None, stacked: bool) -> list[Tensor]:
    """Return each member's gradient, scaled down to the norm ``bound``."""
    if bound is None:
        return grads
    dims = [tuple(range(1 if stacked else 0, grad.dim())) for grad in grads]
    squares = [
        grad.square().sum(dim) if dim else grad.square()
        for grad, dim in zip(grads, dims, strict=True)
    ]
    # clamp_min applies the bound: its derivative at a zero gradient is 0, and not 0·inf.
    factor = bound / root(torch.stack(squares).sum(0)).clamp_min(bound)
    return [per_member(factor, grad) * grad for grad in grads]
