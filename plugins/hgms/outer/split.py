"""An outer optimiser with a separate optimiser for a learned lower start."""

from __future__ import annotations

from typing import ClassVar, final

from attrs import field

from hgms.outer.additive import Adam, Sgd
from hgms_core import OuterOptimizer, State, Tree, component, hookimpl

START = "start."
"""Prefix of the names of a learned start's leaves in θ."""


@final
@component
class Split:
    """Update θ and the learned start z separately: θ ← upper(θ, ∂_θ φ), z ← start(z, ∂_z φ).

    For a method with ``learn_start``, whose two kinds of variables have different units (IAPTT-GM:
    Adam for θ, gradient descent for z). Without a learned start only ``upper`` is used.

    Parameters
    ----------
    upper, start
        Any outer optimisers; each has a separate state, schedule, clipping and projection.

    Notes
    -----
    Source: Liu, Liu, Zeng, Zhang, NeurIPS 2021 (arXiv 2110.00455), which steps both variables at
    once.

    Examples
    --------
    >>> import torch
    >>> outer = Split(upper=Sgd(lr=1.0), start=Sgd(lr=0.5))
    >>> theta = {"t": torch.ones(1), "start.x": torch.ones(1)}
    >>> outer.step(theta, {"t": torch.ones(1), "start.x": torch.ones(1)}, outer.init(theta), 0.0)[0]
    {'t': tensor([0.]), 'start.x': tensor([0.5000])}
    """

    name: ClassVar[str] = "split"
    upper: OuterOptimizer = field(factory=Adam)
    start: OuterOptimizer = field(factory=Sgd)

    def init(self, theta: Tree) -> State:
        return {
            "upper": self.upper.init(_part(theta, False)),
            "start": self.start.init(_part(theta, True)),
        }

    def step(
        self, theta: Tree, gradient: Tree, state: State, progress: float
    ) -> tuple[Tree, State]:
        upper, above = self.upper.step(
            _part(theta, False), _part(gradient, False), state["upper"], progress
        )
        start, below = self.start.step(
            _part(theta, True), _part(gradient, True), state["start"], progress
        )
        moved = {**upper, **start}
        return {name: moved[name] for name in theta}, {"upper": above, "start": below}


def _part(theta: Tree, of_start: bool) -> Tree:
    return {name: leaf for name, leaf in theta.items() if name.startswith(START) == of_start}


@hookimpl
def hgms_register_outer_optimizers() -> list[type]:
    return [Split]
