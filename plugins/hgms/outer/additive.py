"""Outer optimisers that add a step: gradient descent, projected gradient, Adam and AdamW."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms.outer.shape import Projection, Schedule, clip_gradient
from hgms_core import Problem, State, Tree, component, hookimpl
from hgms_core.capabilities import Capabilities, Fixed, JoinsStep
from hgms_core.validators import decay_rate, each, not_negative, optional_positive, positive


@component
class _Additive(ABC):
    """A step of tensors that receives numbers, such as the rate."""

    capabilities: ClassVar[Capabilities] = frozenset({JoinsStep})

    lr: float = field(default=0.1, validator=positive)
    clip: float | None = field(default=None, validator=optional_positive)
    schedule: Schedule = Schedule()

    def numbers(self, state: State, progress: float) -> tuple[float, ...]:
        """Return the rate."""
        return (self.lr * self.schedule.factor(state["step"], progress),)

    @abstractmethod
    def move(
        self, theta: Tree, gradient: Tree, state: State, numbers: Sequence[Any]
    ) -> tuple[Tree, State]:
        """Return θ and the state after a step; numbers may be tensors."""

    def step(
        self, theta: Tree, gradient: Tree, state: State, progress: float
    ) -> tuple[Tree, State]:
        return self.move(theta, gradient, state, self.numbers(state, progress))

    def operands(self, problem: Problem, state: State, progress: float) -> Tensor | Fixed:
        numbers = torch.tensor(self.numbers(state, progress), dtype=torch.float64)
        corrected = "v" in state  # by Adam, whose numbers depend on the step
        return numbers if corrected or self.schedule.kind != "constant" else Fixed(numbers)

    def compute(
        self, theta: Tree, gradient: Tree, state: State, operands: Tensor
    ) -> tuple[Tree, State]:
        return self.move(theta, gradient, state, operands.unbind())


@final
@component
class Sgd(_Additive):
    """θ ← θ − α m,  m ← β m + h  (m = h without momentum).

    Parameters
    ----------
    lr
        α.
    momentum
        β.
    clip
        Bounds ‖h‖.
    schedule
        Shapes α over the budget.

    Notes
    -----
    Source: Robbins & Monro 1951; Polyak 1964.

    Examples
    --------
    >>> theta, _ = Sgd(lr=0.5).step(
    ...     {"t": torch.ones(1)}, {"t": torch.ones(1)}, Sgd(lr=0.5).init({"t": torch.ones(1)}), 0.0
    ... )
    >>> theta["t"]
    tensor([0.5000])
    """

    name: ClassVar[str] = "sgd"
    momentum: float = field(default=0.0, validator=decay_rate)

    def init(self, theta: Tree) -> State:
        moments = (
            {name: torch.zeros_like(leaf) for name, leaf in theta.items()} if self.momentum else {}
        )
        return {"step": 0, "m": moments}

    def move(
        self, theta: Tree, gradient: Tree, state: State, numbers: Sequence[Any]
    ) -> tuple[Tree, State]:
        (rate,) = numbers
        direction = clip_gradient(gradient, self.clip)
        moments = state["m"]
        if self.momentum:
            direction = moments = {
                name: self.momentum * moments[name] + direction[name] for name in theta
            }
        return {name: theta[name] - rate * direction[name] for name in theta}, {
            "step": state["step"] + 1,
            "m": moments,
        }


@final
@component
class ProjectedGradient(_Additive):
    """θ ← Proj_Θ(θ − α h): the outer step of the analysed HG-MS (Algorithm 1, last line).

    Parameters
    ----------
    lr
        α.
    projection
        The set Θ (the problem's own projection is applied as well).
    clip, schedule
        As in ``sgd``.

    Notes
    -----
    Source: HG-MS paper, Algorithm 1.

    Examples
    --------
    >>> outer = ProjectedGradient(lr=1.0, projection=Projection(kind="box", low=0.0, high=1.0))
    >>> outer.step(
    ...     {"t": torch.ones(1)},
    ...     {"t": torch.full((1,), 5.0)},
    ...     outer.init({"t": torch.ones(1)}),
    ...     0.0,
    ... )[0]["t"]
    tensor([0.])
    """

    name: ClassVar[str] = "projected-gradient"
    projection: Projection = Projection()

    def init(self, theta: Tree) -> State:
        return {"step": 0}

    def move(
        self, theta: Tree, gradient: Tree, state: State, numbers: Sequence[Any]
    ) -> tuple[Tree, State]:
        (rate,) = numbers
        direction = clip_gradient(gradient, self.clip)
        moved = {name: theta[name] - rate * direction[name] for name in theta}
        return self.projection.apply(moved), {"step": state["step"] + 1}


@component
class _Adam(_Additive):
    """Steps along bias-corrected moments of h, with decoupled weight decay."""

    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=each(decay_rate))
    eps: float = field(default=1e-8, validator=positive)
    projection: Projection = Projection()

    def init(self, theta: Tree) -> State:
        zeros = {name: torch.zeros_like(leaf) for name, leaf in theta.items()}
        return {"step": 0, "m": zeros, "v": dict(zeros)}

    def numbers(self, state: State, progress: float) -> tuple[float, ...]:
        """Return the rate and both bias corrections."""
        count = state["step"] + 1
        corrections = 1 / (1 - self.betas[0] ** count), (1 - self.betas[1] ** count) ** 0.5
        return *super().numbers(state, progress), *corrections

    def move(
        self, theta: Tree, gradient: Tree, state: State, numbers: Sequence[Any]
    ) -> tuple[Tree, State]:
        return self.decayed(0.0, theta, gradient, state, numbers)

    def decayed(
        self, decay: float, theta: Tree, gradient: Tree, state: State, numbers: Sequence[Any]
    ) -> tuple[Tree, State]:
        """(1 − rate·decay)θ − rate·m̂/(√v̂ + ε), projected, and the new moments."""
        rate, scale, correction = numbers
        gradient = clip_gradient(gradient, self.clip)
        betas = self.betas
        first = {
            name: torch.lerp(state["m"][name], grad, 1 - betas[0])
            for name, grad in gradient.items()
        }
        second = {
            name: betas[1] * state["v"][name] + (1 - betas[1]) * grad * grad
            for name, grad in gradient.items()
        }
        moved = {}
        for name, leaf in theta.items():
            direction = scale * first[name] / (second[name].sqrt() / correction + self.eps)
            moved[name] = ((1 - rate * decay) * leaf if decay else leaf) - rate * direction
        return self.projection.apply(moved), {"step": state["step"] + 1, "m": first, "v": second}


@final
@component
class Adam(_Adam):
    """θ ← θ − α m̂/(√v̂ + ε), with bias-corrected moments of h.

    The step hardly depends on the length of h. This suits hypergradients of unknown scale (ridge,
    one-step).

    Parameters
    ----------
    lr
        α.
    betas, eps
        As in torch.optim.Adam.
    clip
        Bounds ‖h‖.
    projection, schedule
        As in ``projected-gradient``.

    Notes
    -----
    Source: Kingma & Ba 2015.

    Examples
    --------
    >>> outer = Adam(lr=0.1)
    >>> outer.step(
    ...     {"t": torch.ones(1)},
    ...     {"t": torch.full((1,), 1e-3)},
    ...     outer.init({"t": torch.ones(1)}),
    ...     0.0,
    ... )[0]["t"]
    tensor([0.9000])
    """

    name: ClassVar[str] = "adam"


@final
@component
class AdamW(_Adam):
    """Adam with decoupled weight decay: θ ← (1 − α·wd)θ − α m̂/(√v̂ + ε).

    The decay pulls θ to 0 (logits to uniform weights): an outer regularisation, zero by default.

    Parameters
    ----------
    weight_decay
        Wd; the rest as in ``adam``.

    Notes
    -----
    Source: Loshchilov & Hutter 2019.

    Examples
    --------
    >>> outer = AdamW(lr=0.1, weight_decay=0.5)
    >>> outer.step(
    ...     {"t": torch.ones(1)}, {"t": torch.zeros(1)}, outer.init({"t": torch.ones(1)}), 0.0
    ... )[0]["t"]
    tensor([0.9500])
    """

    name: ClassVar[str] = "adamw"
    weight_decay: float = field(default=0.0, validator=not_negative)

    def move(
        self, theta: Tree, gradient: Tree, state: State, numbers: Sequence[Any]
    ) -> tuple[Tree, State]:
        return self.decayed(self.weight_decay, theta, gradient, state, numbers)


@hookimpl
def hgms_register_outer_optimizers() -> list[type]:
    return [Sgd, ProjectedGradient, Adam, AdamW]
