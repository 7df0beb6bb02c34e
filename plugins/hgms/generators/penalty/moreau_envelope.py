"""MEHA: the lower level as a penalty on g minus its Moreau envelope.

A second model tracks the proximal point.
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
class MoreauEnvelope(base.PenaltyStep):
    """The pair (y, z) of MEHA, and the upper gradient of the pass that moves y.

    With the Moreau envelope v(θ, y) = min_z g(θ, z) + ‖z − y‖²/(2γ), at outer step k::

        z ← z − η_z (∇_z g(θ, z) + (z − y)/γ)    on a separate batch
        L = f(θ, y)/c_k + g(θ, y; B) − g(θ, z; B) − ‖z − y‖²/(2γ)                      z fixed
        y ← y − η_y ∇_y L = y − η_y (∇_y f/c_k + ∇_y g − (y − z)/γ),      h = ∇_θ L at the old y
        c_k = c_0 (k + 1)^p

    g = v exactly at the stationary points of a weakly convex g, so the penalty g − v needs no
    convexity. For a γ below 1/(the weak convexity of g), the problem in z is strongly convex. As γ
    grows, the penalty becomes the value gap of ``value-gap``. h has the size of a hypergradient
    divided by c_k. Combine with hypergradient ``carried``.

    Use when g is not convex, or has many minimisers, and second derivatives are expensive. Avoid a
    γ far below the step that a gradient of g makes: v is then nearly g, and the penalty has little
    effect.

    Parameters
    ----------
    lr
        η_y.
    inner_lr
        η_z; at most about γ.
    gamma
        γ.
    penalty, growth
        c_0 and p; the paper's theory has p in (0, 1/2), or p = 0.
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
    Cost: N · 3 lower gradients (one of them in θ only) and N upper gradients. Memory: 2N lower
    states.

    Source: Liu, Liu, Yao, Zeng and Zhang, *Moreau envelope for nonconvex bi-level optimization: a
    single-loop and Hessian-free solution strategy* (2024, arXiv 2405.09927), MEHA for smooth lower
    levels.

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={"t": torch.ones(1)},
    ...     x0={"x": torch.zeros(1)},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: (x["x"] + t["t"]).sum(),
    ... )
    >>> generator = MoreauEnvelope(lr=0.25, inner_lr=0.25, gamma=1.0, penalty=2.0, growth=0.0)
    >>> candidates = generator.propose(
    ...     problem, problem.theta0, generator.init(problem, Key(0)), Key(0)
    ... )
    >>> candidates.x["x"], candidates.aux["theta.t"]  # z = ½:  ∇_y L = ½ − 2 + ½,  h = ½ + 2 − 1
    (tensor([[0.2500]]), tensor([[1.5000]]))
    """

    name: ClassVar[str] = "moreau-envelope"
    twins: ClassVar[tuple[str, ...]] = ("z",)

    lr: float = field(default=0.01, validator=positive)
    inner_lr: float = field(default=0.01, validator=positive)
    gamma: float = field(default=10.0, validator=positive)
    penalty: float = field(default=1.0, validator=positive)
    growth: float = field(default=0.49, validator=share)

    def numbers(self, step: int) -> tuple[float, ...]:
        """Return 1/c_k."""
        return (1 / (self.penalty * (step + 1) ** self.growth),)

    def draw(self, problem: Problem, key: Key) -> tuple[list[Tree], list[Tree]]:
        below, above = self.draw_each(problem, key, 2)
        return below, above[-1:]

    def cost(self, problem: Problem) -> Cost:
        rows, upper_rows = self.rows(problem)
        return Cost(lower_gradients=3, upper_gradients=1, rows=3 * rows + upper_rows)

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
        (scale,) = numbers
        grads, _ = gradient(g, theta, z, below[0])
        pulled = {
            name: slope + (z[name] - y[name]) / self.gamma
            for name, slope in zip(z, grads, strict=True)
        }
        z = base.descend(z, pulled, self.inner_lr)

        upper = require_grad(theta)
        lower = require_grad(y)
        with torch.enable_grad():
            value = f(upper, lower, above[0])
            at_y = g(upper, lower, below[-1])
            at_z = g(upper, z, below[-1])
            to_theta, to_y = base.gradients(scale * value + at_y - at_z, upper, lower)
        to_y = {name: leaf - (y[name] - z[name]) / self.gamma for name, leaf in to_y.items()}
        kept = base.tag("z", z) | base.tag("theta", to_theta) | {"upper_loss": value.detach()}
        return base.descend(y, to_y, self.lr), kept, at_y.detach()


MEHA = single_loop(
    "meha",
    (
        "Penalty on g minus its Moreau envelope: y, the proximal point z and θ move together, "
        "first order."
    ),
    "Liu, Liu, Yao, Zeng and Zhang 2024, MEHA.",
    {
        "name": "moreau-envelope",
        "lr": 0.1,
        "inner_lr": 0.1,
        "gamma": 10.0,
        "penalty": 1.0,
        "growth": 0.49,
    },
)


@hookimpl
def hgms_register_generators() -> list[type]:
    return [MoreauEnvelope]


@hookimpl
def hgms_register_methods() -> list[Composition]:
    return [MEHA]
