"""F2SA: the value gap with a growing multiplier.

Its upper gradient is computed after both lower states have moved.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal, final

import torch
from attrs import field
from torch import Tensor

from hgms.compiled import Numbers, launch
from hgms.config import lowering
from hgms.generators.penalty import base
from hgms.generators.penalty.compositions import single_loop
from hgms_core import (
    Candidates,
    Composition,
    Cost,
    Key,
    Loss,
    Problem,
    State,
    Tree,
    component,
    gradient,
    hookimpl,
)
from hgms_core.trees import require_grad
from hgms_core.validators import not_negative, optional_positive, positive, share


@final
@component
class FullyFirstOrder:
    """The pair (y, z) of F2SA, and the upper gradient at the pair after its steps.

    At outer step k, T times, with a lower batch B_t for both and a separate upper batch::

        z ← z − η_z ∇_z g(θ, z; B_t)
        y ← y − (η_y/λ_k) ∇_y [f(θ, y) + λ_k g(θ, y; B_t)]

    and then, at the new y and z and with one more batch for both::

        h = ∇_θ f(θ, y) + λ_k (∇_θ g(θ, y; B) − ∇_θ g(θ, z; B))
        λ_k = λ_0 (k + 1)^p,     η_y and η_z fall as (k + 1)^−c

    y tends to the minimiser of f + λg and z to the minimiser of g. h then differs from the
    hypergradient by O(1/λ) if g is strongly convex. In contrast to ``value-gap``, h is not divided
    by λ, and uses the lower states after their step. Combine with hypergradient ``carried``.

    Use when second derivatives are expensive and an upper gradient of the true size is wanted.
    Avoid a large λ with small batches: h is λ times a difference of two gradients.

    Arguments:
        steps: T. ``lr``: η_y. ``inner_lr``: η_z. ``decay``: c.
        penalty, growth: λ_0 and p. With noise in both levels the paper has c = 4/7 and p = 1/7,
            without noise c = 0, p = 1/3.
        batch_size, upper_batch_size: rows of a lower and an upper batch (None: all).
        count, noise, carry_rule: N pairs (y, z) on separate batches, as in ``value-gap``.

    Errors: ConfigError if all N candidates would be equal.

    Cost: N (2T + 2) lower gradients (two of them in θ only) and N (T + 1) upper gradients. Memory:
        2N lower states.

    >>> problem = Problem(
    ...     theta0={"t": torch.ones(1)},
    ...     x0={"x": torch.zeros(1)},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: (x["x"] + t["t"]).sum(),
    ... )
    >>> generator = FullyFirstOrder(lr=0.25, inner_lr=0.5, penalty=2.0, growth=0.0)
    >>> candidates = generator.propose(
    ...     problem, problem.theta0, generator.init(problem, Key(0)), Key(0)
    ... )
    >>> (
    ...     candidates.x["x"],
    ...     candidates.aux["theta.t"],
    ... )  # z = 1,  y = (2 − 1/2)/4:  h = 1 + 2 (2 (1 − y) − 0)
    (tensor([[0.3750]]), tensor([[3.5000]]))

    Source: Kwon, Kwon, Wright and Nowak, *A fully first-order method for stochastic bilevel
        optimization* (2023, arXiv 2301.10945), algorithm 1.
    """

    name: ClassVar[str] = "fully-first-order"

    count: int = field(default=1, validator=positive)
    steps: int = field(default=1, validator=positive)
    lr: float = field(default=0.01, validator=positive)
    inner_lr: float = field(default=0.01, validator=positive)
    decay: float = field(default=0.0, validator=share)
    penalty: float = field(default=10.0, validator=positive)
    growth: float = field(default=1 / 7, validator=share)
    batch_size: int | None = field(default=None, validator=optional_positive)
    upper_batch_size: int | None = field(default=None, validator=optional_positive)
    noise: float = field(default=0.0, validator=not_negative)
    carry_rule: Literal["selected", "per-branch"] = "selected"

    memory_hints = lowering(other=["batch_size", "count"])

    def init(self, problem: Problem, key: Key) -> State:
        return base.begin(self, problem, key, twins=("z",))

    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float = 0.0
    ) -> Candidates:
        age = start["step"] + 1
        penalty = self.penalty * age**self.growth
        slower = age**-self.decay
        numbers = (self.lr * slower, self.inner_lr * slower, penalty)
        function = partial(self._step_tensors, (problem.g, problem.f))
        programs = problem.compiler if self.steps <= base.STEPS else None

        def step(y: Tree, aux: Tree, key: Key) -> tuple[Tree, Tree, Tensor]:
            below, above = base.draw_each(problem, key, self, self.steps + 1)
            settings = (self.name, self, problem.g, problem.f)
            x, kept, loss = launch(
                programs, settings, function, numbers, y, base.untag("z", aux), theta, below, above
            )
            return x, kept, loss

        rows, upper_rows = base.rows(problem, self)
        passes = self.steps + 1
        cost = Cost(
            lower_gradients=2 * passes,
            upper_gradients=passes,
            rows=passes * (2 * rows + upper_rows),
        )
        return base.branches(start, key, self, step, cost)

    def _step_tensors(
        self,
        losses: tuple[Loss, Loss],
        numbers: Numbers,
        y: Tree,
        z: Tree,
        theta: Tree,
        below: list[Tree],
        above: list[Tree],
    ) -> tuple[Tree, Tree, Tensor]:
        """Take the step of one pair, as a function of tensors; ``numbers`` are η_y, η_z and λ_k."""
        g, f = losses
        rate, inner_rate, penalty = numbers
        for batch, upper_batch in zip(below[:-1], above[:-1], strict=True):
            y, _ = base.penalised_step(g, f, rate, penalty, theta, y, batch, upper_batch)
            grads, _ = gradient(g, theta, z, batch)
            z = base.descend(z, dict(zip(z, grads, strict=True)), inner_rate)

        upper = require_grad(theta)
        with torch.enable_grad():
            value = f(upper, y, above[-1])
            at_y = g(upper, y, below[-1])
            at_z = g(upper, z, below[-1])
            (to_theta,) = base.gradients(value + penalty * (at_y - at_z), upper)
        kept = base.tag("z", z) | base.tag("theta", to_theta) | {"upper_loss": value.detach()}
        return y, kept, at_y.detach()

    carry = base.carry


F2SA = single_loop(
    "f2sa",
    (
        "Value gap with a growing multiplier: y descends f + λg, z descends g, θ follows the new "
        "pair; first order."
    ),
    "Kwon, Kwon, Wright and Nowak 2023, F2SA.",
    {
        "name": "fully-first-order",
        "steps": 1,
        "lr": 0.3,
        "inner_lr": 0.3,
        "penalty": 1.0,
        "growth": 1 / 7,
    },
)


@hookimpl
def hgms_register_generators() -> list[type]:
    return [FullyFirstOrder]


@hookimpl
def hgms_register_methods() -> list[Composition]:
    return [F2SA]
