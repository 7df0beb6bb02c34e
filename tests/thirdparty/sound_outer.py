"""A plugin file that is right in every way, for test_wrong_classes.py to spoil: an outer
optimiser.
"""

from __future__ import annotations

from typing import ClassVar

import attrs
import torch

from hgms_core import State, Tree, hookimpl


@attrs.frozen
class Simplex:
    """The nearest vector of probabilities."""

    def apply(self, theta: Tree) -> Tree:
        return {name: self.nearest(leaf) for name, leaf in theta.items()}

    def nearest(self, leaf: torch.Tensor) -> torch.Tensor:
        ordered = leaf.sort(descending=True).values
        shifts = (ordered.cumsum(0) - 1) / torch.arange(1, len(leaf) + 1, dtype=leaf.dtype)
        return (leaf - shifts[(ordered > shifts).sum() - 1]).clamp_min(0)


@attrs.frozen(kw_only=True)
class Mine:
    """θ ← P(θ − lr·m), m ← decay·m + h, P the projection on probability vectors.

    >>> Mine().lr
    0.1

    Source: projected gradient descent with momentum. Only for probability vectors.
    """

    name: ClassVar[str] = "mine"
    testing_failures: ClassVar[dict[str, str]] = {"quadratic": "it is for probability vectors only"}
    lr: float = 0.1
    decay: float = 0.5
    projection: Simplex = Simplex()

    def init(self, theta: Tree) -> State:
        return {"m": {name: torch.zeros_like(leaf) for name, leaf in theta.items()}}

    def step(
        self, theta: Tree, gradient: Tree, state: State, progress: float
    ) -> tuple[Tree, State]:
        m = {name: self.decay * state["m"][name] + gradient[name] for name in theta}
        moved = {name: theta[name] - self.lr * m[name] for name in theta}
        return self.projection.apply(moved), {"m": m}


@hookimpl
def hgms_register_outer_optimizers() -> list[type]:
    return [Mine]
