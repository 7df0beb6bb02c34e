"""The optimiser of a run, and its steps in place: one branch, or a stacked group of branches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from hgms_adam import adam_
from hgms_core import Data, Group, Loss, Problem, Tree, gradient
from hgms_graphs import Recording, recorded


@frozen
class Rule:
    """SGD or AdamW with its settings. ``done`` is how many steps its moments have already seen."""

    optimizer: str
    momentum: float
    betas: tuple[float, float]
    eps: float
    clip: float | None
    done: int = 0

    @classmethod
    def of(cls, generator: Any, done: int = 0) -> Rule:
        """The fields of these names of a generator."""
        return cls(generator.optimizer, generator.momentum, generator.betas, generator.eps, generator.clip, done)

    def no_moments(self, x: Tree) -> Tree:
        kinds = ("m", "v") if self.optimizer == "adamw" else ("m",) if self.momentum else ()
        return {f"{kind}.{name}": torch.zeros_like(leaf) for kind in kinds for name, leaf in x.items()}


def advance(
    rule: Rule,
    group: Group,
    theta: Tree,
    moments: Tree,
    data: Data,
    index: Tensor | None,
    rates: Sequence[float | Tensor],
    decay: float | Tensor,
    recording: Recording | None = None,
) -> Tensor:
    """Moves ``group.x`` and ``moments`` in place through one step for each rate; returns the last lower losses.

    ``index`` holds batch numbers with axes (steps, batch), after an axis of members where each has its own batch.
    ``recording`` is that of a gradient of this group (:func:`recorded_gradient`).
    """
    leaves = list(group.x.values())
    if recording is not None:
        recording.load(theta, group.x, None if index is None else index[..., 0, :])
        leaves = list(recording.arguments[1].values())
    first, second = list(moments.values())[: len(leaves)], list(moments.values())[len(leaves) :]
    loss = torch.empty(())
    for step, rate in enumerate(rates):
        numbers = None if index is None else index[..., step, :]
        if recording is None:
            grads, loss = gradient(group.loss, theta, group.x, data.batch(numbers))
        else:
            if numbers is not None:
                recording.arguments[2].copy_(numbers)
            grads, loss = recording.run()
        if rule.clip is not None:
            _clip_(grads, rule.clip, stacked=isinstance(group.part, slice))
        if not isinstance(decay, float) or decay:
            _scale_(leaves, 1 - rate * decay)
        if rule.optimizer == "adamw":
            adam_(leaves, grads, first, second, count=rule.done + step + 1, rate=rate, betas=rule.betas, eps=rule.eps)
        else:
            _sgd_(leaves, grads, first, rate, rule.momentum)
    if recording is not None:
        torch._foreach_copy_(list(group.x.values()), leaves)
        loss = loss.clone()
    return loss


def recorded_gradient(problem: Problem, owner: Hashable, theta: Tree, group: Group, index: Tensor | None) -> Recording | None:
    """(∇_x loss, loss) of a group as a recorded function of θ, x and row numbers; None where nothing is recorded."""
    device, data, loss = next(iter(group.x.values())).device, problem.lower_data, group.loss
    place = (group.part.start, group.part.stop) if isinstance(group.part, slice) else "single"
    first = None if index is None else index[..., 0, :]
    return recorded(problem, (owner, place), device, lambda: Recording(_gradient_on(loss, data), theta, group.x, first))


def _gradient_on(loss: Loss, data: Data) -> Callable[[Tree, Tree, Tensor | None], tuple[list[Tensor], Tensor]]:
    return lambda theta, x, index: gradient(loss, theta, x, data.batch(index))


def _sgd_(leaves: list[Tensor], grads: list[Tensor], first: list[Tensor], rate: float | Tensor, momentum: float) -> None:
    if momentum:
        torch._foreach_mul_(first, momentum)
        torch._foreach_add_(first, grads)
        grads = first
    if isinstance(rate, Tensor):
        for leaf, direction in zip(leaves, grads, strict=True):
            leaf.sub_(_per_member(rate, leaf) * direction)
    else:
        torch._foreach_add_(leaves, grads, alpha=-rate)


def _clip_(grads: list[Tensor], bound: float, stacked: bool) -> None:
    """Scales each member's gradient down to norm ``bound``."""
    dims = [tuple(range(1 if stacked else 0, grad.dim())) for grad in grads]
    squares = [grad.square().sum(dim) if dim else grad.square() for grad, dim in zip(grads, dims, strict=True)]
    norm = torch.stack(squares).sum(0).sqrt()
    _scale_(grads, bound / norm.clamp_min(bound))


def _scale_(leaves: list[Tensor], factor: float | Tensor) -> None:
    if isinstance(factor, Tensor) and factor.dim():
        for leaf in leaves:
            leaf.mul_(_per_member(factor, leaf))
    else:
        torch._foreach_mul_(leaves, factor)


def _per_member(numbers: Tensor, leaf: Tensor) -> Tensor:
    """One number for each member, ready to multiply a stacked leaf."""
    return numbers.reshape(-1, *[1] * (leaf.dim() - 1))
