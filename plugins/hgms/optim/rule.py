"""Steps of SGD and AdamW: in place for one branch or a stack, and as functions of their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from attrs import frozen
from torch import Tensor

from hgms.optim.adam import adam, adam_, corrections
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

    def check_differentiable(self) -> None:
        """Every step of a built-in rule is differentiable."""

    def no_moments(self, x: Tree) -> Tree:
        kinds = ("m", "v") if self.optimizer == "adamw" else ("m",) if self.momentum else ()
        return {
            f"{kind}.{name}": torch.zeros_like(leaf) for kind in kinds for name, leaf in x.items()
        }

    def parts(self, moments: Tree, names: Sequence[str]) -> list[Tree]:
        """Return [m, v], without the moments that the optimiser does not have."""
        return [
            {name: moments[f"{kind}.{name}"] for name in names}
            for kind in "mv"
            if f"{kind}.{names[0]}" in moments
        ]

    def join(self, parts: Sequence[Tree]) -> Tree:
        return {
            f"{kind}.{name}": leaf
            for kind, tree in zip("mv", parts, strict=False)
            for name, leaf in tree.items()
        }

    def numbers(self, step: int, rate: float, decay: float) -> Coefficients:
        """Return the coefficients of step number ``step`` in a run that starts now."""
        return Coefficients.of(self, self.done + step + 1, rate, decay)

    def step(
        self, x: Tree, grads: Tree, moments: Sequence[Tree], numbers: Coefficients
    ) -> list[Tree]:
        """Return [x, m, v] after a step, as functions of all inputs."""
        if numbers.kept is not None:
            x = {name: leaf * numbers.kept for name, leaf in x.items()}
        if self.optimizer == "adamw":
            scale = numbers.scale
            correction = numbers.correction
            return [
                *adam(
                    x,
                    grads,
                    *moments,
                    scale=scale,
                    correction=correction,
                    betas=self.betas,
                    eps=(self.eps, self.eps_root),
                )
            ]
        if not self.momentum:
            return [{name: x[name] - numbers.rate * grads[name] for name in x}]
        first = {name: self.momentum * moments[0][name] + grads[name] for name in x}
        return [{name: x[name] - numbers.rate * first[name] for name in x}, first]


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

    @classmethod
    def of(
        cls, rule: Rule, count: int, rate: float | Tensor, decay: float | Tensor
    ) -> Coefficients:
        decays = isinstance(decay, Tensor) or bool(decay)
        return cls(
            rate, 1 - rate * decay if decays else None, *corrections(rate, count, rule.betas)
        )


def move_(
    rule: Rule,
    leaves: list[Tensor],
    moments: list[Tensor],
    grads: list[Tensor],
    numbers: Coefficients,
    stacked: bool,
) -> None:
    """Take one step in place."""
    first = moments[: len(leaves)]
    second = moments[len(leaves) :]
    if rule.clip is not None:
        clip_(grads, rule.clip, stacked)
    if numbers.kept is not None:
        _scale_(leaves, numbers.kept)
    if rule.optimizer == "adamw":
        scale = numbers.scale
        correction = numbers.correction
        adam_(
            leaves,
            grads,
            first,
            second,
            scale=scale,
            correction=correction,
            betas=rule.betas,
            eps=(rule.eps, rule.eps_root),
        )
        return
    if rule.momentum:
        torch._foreach_mul_(first, rule.momentum)
        torch._foreach_add_(first, grads)
        grads = first
    if isinstance(numbers.rate, Tensor):
        for leaf, direction in zip(leaves, grads, strict=True):
            leaf.sub_(_per_member(numbers.rate, leaf) * direction)
    else:
        torch._foreach_add_(leaves, grads, alpha=-numbers.rate)


def clip_(grads: list[Tensor], bound: float, stacked: bool) -> None:
    """Scale each member's gradient down to the norm ``bound``."""
    dims = [tuple(range(1 if stacked else 0, grad.dim())) for grad in grads]
    squares = [
        grad.square().sum(dim) if dim else grad.square()
        for grad, dim in zip(grads, dims, strict=True)
    ]
    norm = torch.stack(squares).sum(0).sqrt()
    _scale_(grads, bound / norm.clamp_min(bound))


def _scale_(leaves: list[Tensor], factor: float | Tensor) -> None:
    if isinstance(factor, Tensor) and factor.dim():
        for leaf in leaves:
            leaf.mul_(_per_member(factor, leaf))
    else:
        torch._foreach_mul_(leaves, factor)


def _per_member(numbers: Tensor, leaf: Tensor) -> Tensor:
    """Reshape one number per member for a stacked leaf; return a scalar for all members
    unchanged.
    """
    return numbers.reshape(-1, *[1] * (leaf.dim() - 1)) if numbers.dim() else numbers
