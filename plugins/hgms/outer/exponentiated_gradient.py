"""Exponentiated gradient: mirror descent on the simplex."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from attrs import field

from hgms.outer.shape import Schedule, clip_gradient
from hgms_core import ConfigError, State, Tree, component, hookimpl
from hgms_core.validators import optional_positive, positive


@final
@component
class ExponentiatedGradient:
    """p ← p·exp(−α h) / Σ p·exp(−α h), each leaf a probability vector.

    Use when θ itself is a mixture on the simplex; it stays there by construction and changes
    multiplicatively. Avoid for logits. The first step normalises a start off the simplex; an entry
    that is exactly 0 stays 0.

    Parameters
    ----------
    lr
        α.
    clip
        Bounds ‖h‖.
    schedule
        Shapes α over the budget.

    Raises
    ------
    ConfigError
        If a leaf of the start has no positive finite entry (for example, logits that start at 0).

    Notes
    -----
    Source: Kivinen & Warmuth 1997.

    Examples
    --------
    >>> outer = ExponentiatedGradient(lr=1.0)
    >>> p = {"p": torch.tensor([0.5, 0.5])}
    >>> outer.step(p, {"p": torch.log(torch.tensor([1.0, 3.0]))}, outer.init(p), 0.0)[0]["p"]
    tensor([0.7500, 0.2500])
    """

    name: ClassVar[str] = "exponentiated-gradient"
    lr: float = field(default=0.1, validator=positive)
    clip: float | None = field(default=None, validator=optional_positive)
    schedule: Schedule = Schedule()

    def init(self, theta: Tree) -> State:
        for name, leaf in theta.items():
            if not (leaf.clamp_min(0).sum() > 0 and torch.isfinite(leaf).all()):
                raise ConfigError(
                    "wrong-value",
                    "exponentiated-gradient requires a positive start, but the upper variable "
                    f"{name!r} has no positive entry or is not finite",
                    place=("theta0", name),
                    hint="start from a probability vector, or use sgd or adam for logits",
                )
        return {"step": 0}

    def step(
        self, theta: Tree, gradient: Tree, state: State, progress: float
    ) -> tuple[Tree, State]:
        direction = clip_gradient(gradient, self.clip)
        rate = self.lr * self.schedule.factor(state["step"], progress)
        moved = {}
        for name, leaf in theta.items():
            # computed in logarithms, so that a large step cannot overflow
            logits = leaf.clamp_min(0).log() - rate * direction[name]
            moved[name] = torch.softmax(logits.reshape(-1), 0).reshape(leaf.shape)
        return moved, {"step": state["step"] + 1}


@hookimpl
def hgms_register_outer_optimizers() -> list[type]:
    return [ExponentiatedGradient]
