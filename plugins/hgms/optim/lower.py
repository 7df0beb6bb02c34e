"""Lower optimisers: the ``optimizer`` of the generators ``branches`` and ``trajectory``."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar, Literal, final

import torch
from attrs import evolve, field

from hgms.optim.rule import Rule
from hgms.optim.stepper import Build
from hgms.optim.timetable import Schedule, Timetable, timetable_of
from hgms.optim.torch_rule import TorchRule
from hgms_core import State, Tree, component
from hgms_core.validators import decay_rate, each, not_negative, optional_positive, positive, share


@final
@component
class Cosine:
    """Decrease the learning rate from lr to ``floor``·lr along half a cosine.

    Parameters
    ----------
    floor
        The end, as a share of lr.
    period
        Lower steps of the decrease, repeated over the whole run; None: the K steps of each outer
        step.

    Examples
    --------
    >>> Cosine(floor=0.5).factors(steps=2, done=0)
    [1.0, 0.75]
    """

    name: ClassVar[str] = "cosine"

    floor: float = field(default=0.0, validator=share)
    period: int | None = field(default=None, validator=optional_positive)

    def factors(self, steps: int, done: int) -> list[float]:
        """Return the factor of each of ``steps`` steps, after ``done`` lower steps of the run."""
        if self.period is None:
            turns = [step / steps for step in range(steps)]
        else:
            turns = [((done + step) % self.period) / self.period for step in range(steps)]
        floor = self.floor
        return [floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * turn)) for turn in turns]


@component
class _BuiltIn:
    """The fields that ``sgd`` and ``adamw`` share."""

    lr: float = field(default=0.1, validator=positive)
    weight_decay: float = field(default=0.0, validator=not_negative)
    schedule: Cosine | Schedule | None = None
    moments: Literal["carry", "fresh"] = "carry"
    _times: dict[Any, Timetable] = field(init=False, factory=dict, eq=False, repr=False)

    @property
    def decay(self) -> float:
        return self.weight_decay

    def rates(self, x0: Tree, spread: list[float], steps: int, start: State) -> list[list[float]]:
        """Return the rate of each branch in each of ``steps`` steps.

        ``spread`` contains the factor of each branch on the learning rate.
        """
        if not callable(self.schedule):
            return _spread(self.lr, spread, _factors(self.schedule, steps, start))
        done = start["optimizer_steps"]
        build = partial(torch.optim.SGD, lr=self.lr)
        times = timetable_of(self._times, x0, build, self.schedule)
        return _spread(1.0, spread, [times.options(done + k)[0]["lr"] for k in range(steps)])


@final
@component
class SGD(_BuiltIn):
    """Take steps of SGD with decoupled weight decay: m ← μ m + ∇g,  x ← (1 − η λ) x − η m.

    Parameters
    ----------
    lr
        η.
    momentum
        μ.
    weight_decay
        λ.
    schedule
        Of lr: None, ``cosine``, or from Python a function that returns a scheduler of torch, such
        as ``lambda optimizer: lr_scheduler.StepLR(optimizer, 30)``. The scheduler advances once per
        lower step, restarts with fresh moments, and must not depend on a loss.
    moments
        ``carry`` keeps the moments with their weights, ``fresh`` resets them to zero in each outer
        step.

    Notes
    -----
    Source: Polyak (1964).
    """

    name: ClassVar[str] = "sgd"

    momentum: float = field(default=0.0, validator=decay_rate)

    def rule(self, x0: Tree, done: int = 0) -> Rule:
        """Return the step of this optimiser after ``done`` steps with the same moments."""
        return Rule("sgd", momentum=self.momentum, done=done)


@final
@component
class AdamW(_BuiltIn):
    """Take steps of AdamW: x ← (1 − η λ) x − η m̂ / (√(v̂ + ε₀) + ε).

    Parameters
    ----------
    lr
        η.
    betas, eps, weight_decay
        As in torch.optim.
    eps_root
        ε₀; 0 as in torch.optim. Set it, for example to 1e-6, for ``unrolled``. Near a stationary
        point, the derivative of a step is of order lr/eps without it, and at most lr/√ε₀ with it.
        The registered ``hg-baseline`` sets it.
    schedule, moments
        As in :class:`SGD`.

    Notes
    -----
    Source: Loshchilov and Hutter (2019), Algorithm 2.
    """

    name: ClassVar[str] = "adamw"

    lr: float = field(default=1e-3, validator=positive)
    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=each(decay_rate))
    eps: float = field(default=1e-8, validator=positive)
    eps_root: float = field(default=0.0, validator=not_negative)

    def rule(self, x0: Tree, done: int = 0) -> Rule:
        """Return the step of this optimiser after ``done`` steps with the same moments."""
        return Rule("adamw", betas=self.betas, eps=self.eps, eps_root=self.eps_root, done=done)


@final
@component
class Torch:
    """Use an optimiser of ``torch.optim``, or a custom one; from Python only.

    Each branch has a separate optimiser. Its steps have no derivative: the hypergradient
    ``unrolled`` requires ``sgd`` or ``adamw``.

    Parameters
    ----------
    build
        Function that returns the optimiser of the parameters, such as
        ``lambda params: torch.optim.RMSprop(params, lr=0.01)``.
    schedule, moments
        As in :class:`SGD`.

    Raises
    ------
    ConfigError
        For a function that does not return an optimiser of these parameters, and for a schedule
        that depends on a loss.
    """

    name: ClassVar[str] = "torch"
    decay: ClassVar[float] = 1.0

    build: Build
    schedule: Cosine | Schedule | None = None
    moments: Literal["carry", "fresh"] = "carry"
    _times: dict[Any, Timetable] = field(init=False, factory=dict, eq=False, repr=False)

    def rule(self, x0: Tree, done: int = 0) -> TorchRule:
        """Return the step of this optimiser after ``done`` steps with the same state."""
        schedule = self.schedule if callable(self.schedule) else None
        return TorchRule(self.build, timetable_of(self._times, x0, self.build, schedule), done=done)

    def rates(self, x0: Tree, spread: list[float], steps: int, start: State) -> list[list[float]]:
        """Return the factor on the optimiser's rate for each branch in each of ``steps`` steps.

        The rule applies a schedule of torch.
        """
        schedule = None if callable(self.schedule) else self.schedule
        return _spread(1.0, spread, _factors(schedule, steps, start))


@final
@component
class Clip:
    """Scale the gradient of each branch down to the norm ``clip``, then step.

    In a file, ``clip`` is a key in the table of the optimiser.

    Examples
    --------
    >>> Clip(optimizer=SGD(lr=0.5), clip=2.0).optimizer.lr
    0.5
    """

    optimizer: SGD | AdamW | Torch = field(factory=SGD, metadata={"flat": True})
    clip: float = field(default=1.0, validator=positive)

    @property
    def decay(self) -> float:
        return self.optimizer.decay

    @property
    def moments(self) -> Literal["carry", "fresh"]:
        return self.optimizer.moments

    @property
    def schedule(self) -> Cosine | Schedule | None:
        return self.optimizer.schedule

    def rule(self, x0: Tree, done: int = 0) -> Rule | TorchRule:
        rule: Rule | TorchRule = self.optimizer.rule(x0, done)
        return evolve(rule, clip=self.clip)

    def rates(self, x0: Tree, spread: list[float], steps: int, start: State) -> list[list[float]]:
        return self.optimizer.rates(x0, spread, steps, start)


LowerOptimizer = SGD | AdamW | Torch | Clip
"""One step of ``optimizer.rule(x0, done)`` moves one branch, or a stack of branches."""


def _spread(rate: float, spread: list[float], shape: list[float]) -> list[list[float]]:
    return [[rate * factor * step for factor in spread] for step in shape]


def _factors(schedule: Cosine | None, steps: int, start: State) -> list[float]:
    return [1.0] * steps if schedule is None else schedule.factors(steps, start["lower_steps"])
