"""Learning-rate schedule, projection onto a set, and clipping by norm.

All outer optimisers share them.
"""

from __future__ import annotations

import math
from typing import Literal, final

import torch
from attrs import field
from torch import Tensor

from hgms_core import ConfigError, Tree, component, norm
from hgms_core.validators import positive, share


@final
@component
class Schedule:
    """The factor on the learning rate.

    ``constant``: 1. ``cosine``: from 1 to ``final`` over the budget, (1 + cos(π·progress))/2.
    ``inverse``: (1 + t/``decay_steps``)^−``power`` after t outer steps.

    Examples
    --------
    >>> Schedule(kind="cosine", final=0.1).factor(step=0, progress=1.0)
    0.1
    >>> Schedule(kind="inverse", decay_steps=50).factor(step=50, progress=0.3)
    0.5
    """

    kind: Literal["constant", "cosine", "inverse"] = "constant"
    final: float = field(default=0.0, validator=share)
    decay_steps: int = field(default=50, validator=positive)
    power: float = field(default=1.0, validator=positive)

    def factor(self, step: int, progress: float) -> float:
        if self.kind == "cosine":
            return self.final + (1 - self.final) * 0.5 * (
                1 + math.cos(math.pi * min(1.0, progress))
            )
        if self.kind == "inverse":
            return float((1.0 + step / self.decay_steps) ** -self.power)
        return 1.0


@final
@component
class Projection:
    """The nearest point of a set, in the Euclidean norm.

    ``box``: every number into [``low``, ``high``]. ``ball``: all leaves together onto norm ≤
    ``radius``. ``simplex``: each leaf onto {p ≥ 0, Σp = 1}.

    Examples
    --------
    >>> Projection(kind="simplex").apply({"w": torch.tensor([0.5, 1.5])})["w"]
    tensor([0., 1.])
    """

    kind: Literal["none", "box", "ball", "simplex"] = "none"
    low: float = -1.0
    high: float = 1.0
    radius: float = field(default=1.0, validator=positive)

    def __attrs_post_init__(self) -> None:
        if self.high < self.low:
            raise ConfigError(
                "out-of-range", f"high={self.high} must be at least low={self.low}", place=("high",)
            )

    def apply(self, theta: Tree) -> Tree:
        if self.kind == "box":
            return {name: leaf.clamp(self.low, self.high) for name, leaf in theta.items()}
        if self.kind == "ball":
            scale = self.radius / norm(theta).clamp_min(self.radius)
            return {name: leaf * scale for name, leaf in theta.items()}
        if self.kind == "simplex":
            return {name: onto_simplex(leaf) for name, leaf in theta.items()}
        return theta


def onto_simplex(point: Tensor) -> Tensor:
    """Compute the nearest probability vector.

    A single threshold is subtracted so that the positive part sums to 1; sorting finds it.
    """
    flat = point.reshape(-1)
    ordered = flat.sort(descending=True).values
    counts = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=flat.dtype)
    thresholds = (ordered.cumsum(0) - 1) / counts
    active = (ordered > thresholds).sum().clamp_min(1)
    # not thresholds[active - 1], because indexing by a tensor would wait for the GPU
    return (
        (flat - thresholds.index_select(0, (active - 1).reshape(1)))
        .clamp_min(0)
        .reshape(point.shape)
    )


def clip_gradient(gradient: Tree, bound: float | None) -> Tree:
    """Scale the gradient down to norm ``bound`` if its norm is larger (all leaves together)."""
    if bound is None:
        return gradient
    scale = bound / norm(gradient).clamp_min(bound)
    return {name: leaf * scale for name, leaf in gradient.items()}
