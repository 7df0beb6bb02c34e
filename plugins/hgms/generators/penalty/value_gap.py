"""V-PBGD: the lower level as a penalty on the gap g(θ, y) − min g(θ, ·).

A second model ω tracks the minimum.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms.compiled import Numbers
from hgms.generators.penalty import base
from hgms.generators.penalty.compositions import best_of_n, single_loop
from hgms.generators.penalty.ramp import Ramp
from hgms_core import (
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
from hgms_core.validators import decay_rate, positive


@final
@component
class ValueGap(base.PenaltyStep):
    """The pair (y, ω) of V-PBGD, and the upper gradient of the pass that moves y.

    At outer step k, with one lower batch B for both g(y) and g(ω)::

        ω ← ω − η_ω ∇_ω g(θ, ω)    T times, on separate batches
        L = c_k [f(θ, y) + γ_k (g(θ, y; B) − g(θ, ω; B))]                ω fixed
        y ← y − η_y ∇_y L            (with momentum: its running sum),   h = ∇_θ L at the old y
        γ_k = min(γ, γ_0 + (γ − γ_0) k / K),   c_k = min(1/γ_k, 1)

    ω is never reset to y. The minimisers of L over (θ, y) approach the optimistic bilevel solutions
    as γ grows, with an error of order 1/γ. Combine with hypergradient ``carried`` and an outer
    ``sgd``, which moves θ along h at the same time as y moves.

    Use when second derivatives are expensive or do not exist. Avoid small γ: then f moves y freely
    and g(y) need not be near its minimum.

    Parameters
    ----------
    steps
        T.
    lr
        η_y.
    inner_lr
        η_ω.
    momentum
        Of y.
    gamma
        γ.
    ramp
        γ_0 and K (:class:`Ramp`).
    normalise
        Multiply by c_k, which keeps the step bounded as γ grows; else c_k = 1.
    batch_size, upper_batch_size
        Rows of a lower and an upper batch (None: all).
    count
        N pairs, each on separate batches.
    carry_rule
        All pairs start the next step from the ``selected`` pair, or each pair continues separately
        (``per-branch``).
    noise
        Standard deviation of the noise that makes pairs from one state differ; branch 0 has no
        noise. With ``per-branch`` it is added once, at the start of the run (y and ω alike); with
        ``selected`` at every step (y only).

    Raises
    ------
    ConfigError
        If all N candidates would be equal.

    Notes
    -----
    Cost: N (T + 2) lower gradients (one of them in θ only) and N upper gradients. Memory: 2N lower
    states, 3N with momentum.

    Source: Shen and Chen, *On penalty-based bilevel gradient descent method* (2023), V-PBGD.

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={"t": torch.ones(1)},
    ...     x0={"x": torch.zeros(1)},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: (x["x"] ** 2).sum(),
    ... )
    >>> generator = ValueGap(steps=1, inner_lr=0.5, lr=0.25, gamma=2.0, ramp=Ramp(steps=0))
    >>> candidates = generator.propose(
    ...     problem, problem.theta0, generator.init(problem, Key(0)), Key(0)
    ... )
    >>> candidates.x["x"], candidates.aux["theta.t"]  # ω = 1;  c = 1/2:  ∇_y L = −2,  h = 2 − 0
    (tensor([[0.5000]]), tensor([[2.]]))
    """

    name: ClassVar[str] = "value-gap"
    twins: ClassVar[tuple[str, ...]] = ("omega",)

    steps: int = field(default=1, validator=positive)
    lr: float = field(default=0.01, validator=positive)
    inner_lr: float = field(default=0.01, validator=positive)
    momentum: float = field(default=0.0, validator=decay_rate)
    gamma: float = field(default=10.0, validator=positive)
    ramp: Ramp = field(factory=Ramp)
    normalise: bool = True

    def init(self, problem: Problem, key: Key) -> State:
        start = super().init(problem, key)
        return start | {
            "aux": start["aux"] | (base.no_moments(start["x"]) if self.momentum else {})
        }

    def numbers(self, step: int) -> tuple[float, ...]:
        """Return c_k and c_k γ_k."""
        gamma, scale = self.ramp.weights(self.gamma, step, self.normalise)
        return scale, scale * gamma

    def draw(self, problem: Problem, key: Key) -> tuple[list[Tree], list[Tree]]:
        data = problem.lower_data
        index = data.draw(key.fold("lower"), self.batch_size, self.steps + 1)
        below = [
            data.batch(None if index is None else index[inner]) for inner in range(self.steps + 1)
        ]
        return below, [self.upper_batch(problem, key)]

    def cost(self, problem: Problem) -> Cost:
        rows, upper_rows = self.rows(problem)
        counted = rows * (self.steps + 2) + upper_rows
        return Cost(lower_gradients=self.steps + 2, upper_gradients=1, rows=counted)

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
        scale, penalty = numbers
        omega = base.untag("omega", aux)
        m = base.untag("m", aux)
        for batch in below[:-1]:
            grads, _ = gradient(g, theta, omega, batch)
            omega = base.descend(omega, dict(zip(omega, grads, strict=True)), self.inner_lr)

        upper = require_grad(theta)
        lower = require_grad(y)
        with torch.enable_grad():
            at_y = g(upper, lower, below[-1])
            at_omega = g(upper, omega, below[-1])
            value = f(upper, lower, above[0])
            to_theta, to_y = base.gradients(
                scale * value + penalty * (at_y - at_omega), upper, lower
            )

        to_y, kept = base.with_momentum(to_y, m, self.momentum)
        kept |= (
            base.tag("omega", omega) | base.tag("theta", to_theta) | {"upper_loss": value.detach()}
        )
        return base.descend(y, to_y, self.lr), kept, at_y.detach()


V_PBGD = single_loop(
    "v-pbgd",
    "Penalty on the value gap g(y) − g(ω): y, ω and θ move together, first order.",
    "Shen and Chen 2023, V-PBGD.",
    {
        "name": "value-gap",
        "steps": 1,
        "lr": 0.3,
        "inner_lr": 0.3,
        "gamma": 10.0,
        "ramp": {"steps": 1000},
    },
)

V_PBGD_BEST_OF_N = best_of_n(V_PBGD, count=4, noise=0.01)


@hookimpl
def hgms_register_generators() -> list[type]:
    return [ValueGap]


@hookimpl
def hgms_register_methods() -> list[Composition]:
    return [V_PBGD, V_PBGD_BEST_OF_N]
