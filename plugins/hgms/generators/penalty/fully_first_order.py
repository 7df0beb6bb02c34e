"""F2SA: the value gap with a growing multiplier.

Its upper gradient is computed after both lower states have moved.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms.compiled import Numbers
from hgms.generators.penalty import base
from hgms.generators.penalty.compositions import single_loop
from hgms_core import Composition, Cost, Key, Loss, Problem, Tree, component, gradient, hookimpl
from hgms_core.trees import require_grad
from hgms_core.validators import positive, share


@final
@component
class FullyFirstOrder(base.PenaltyStep):
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

    Parameters
    ----------
    steps
        T.
    lr
        η_y.
    inner_lr
        η_z.
    decay
        c.
    penalty, growth
        λ_0 and p. With noise in both levels the paper has c = 4/7 and p = 1/7, without noise c = 0,
        p = 1/3.
    batch_size, upper_batch_size
        Rows of a lower and an upper batch (None: all).
    count, noise, carry_rule
        N pairs (y, z) on separate batches, as in ``value-gap``.

    Raises
    ------
    ConfigError
        If all N candidates would be equal.

    Notes
    -----
    Cost: N (2T + 2) lower gradients (two of them in θ only) and N (T + 1) upper gradients. Memory:
    2N lower states.

    Source: Kwon, Kwon, Wright and Nowak, *A fully first-order method for stochastic bilevel
    optimization* (2023, arXiv 2301.10945), algorithm 1.

    Examples
    --------
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
    """

    name: ClassVar[str] = "fully-first-order"
    twins: ClassVar[tuple[str, ...]] = ("z",)

    steps: int = field(default=1, validator=positive)
    lr: float = field(default=0.01, validator=positive)
    inner_lr: float = field(default=0.01, validator=positive)
    decay: float = field(default=0.0, validator=share)
    penalty: float = field(default=10.0, validator=positive)
    growth: float = field(default=1 / 7, validator=share)

    def numbers(self, step: int) -> tuple[float, ...]:
        """Return η_y, η_z and λ_k."""
        age = step + 1
        slower = age**-self.decay
        return self.lr * slower, self.inner_lr * slower, self.penalty * age**self.growth

    def draw(self, problem: Problem, key: Key) -> tuple[list[Tree], list[Tree]]:
        return self.draw_each(problem, key, self.steps + 1)

    def cost(self, problem: Problem) -> Cost:
        rows, upper_rows = self.rows(problem)
        passes = self.steps + 1
        counted = passes * (2 * rows + upper_rows)
        return Cost(lower_gradients=2 * passes, upper_gradients=passes, rows=counted)

    def move(
        self,
        losses: tuple[Loss, Loss],
        numbers: Numbers,
        y: Tree,
        aux: Tree,
        theta: Tree,
        below: list[Tree],
        above: list[Tree],
    ) -> tuple[Tree, Tree, Tensor]:
        g, f = losses
        z = base.untag("z", aux)
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
