"""PBGD-Free: y descends f + γg, and θ follows ∂f/∂θ only, without tracking the lower value."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms.compiled import Numbers
from hgms.generators.penalty import base
from hgms.generators.penalty.compositions import single_loop
from hgms_core import Composition, Cost, Key, Loss, Problem, Tree, component, hookimpl
from hgms_core.trees import require_grad
from hgms_core.validators import positive


@final
@component
class ValueFree(base.PenaltyStep):
    """The lower state y of PBGD-Free, and the direct part of the upper gradient at the new y.

    At outer step k, T times on separate batches, and then with one more upper batch::

        y ← y − (η/γ) ∇_y [f(θ, y) + γ g(θ, y)]
        h = ∇_θ f(θ, y)

    The penalty part of h, γ (∇_θ g(θ, y) − ∇_θ min g), is neglected. It is small if f hardly
    changes between the minimisers of g and of f + γg (the paper's flatness condition). Otherwise
    the error does not vanish as γ grows. Combine with hypergradient ``carried``.

    Use when θ acts on f directly and f is flat around the lower solution, for example a
    representation θ that both levels share. Avoid when θ acts through g only, such as weights of
    training rows: h would be 0 (the trait ``direct-upper`` is needed).

    Parameters
    ----------
    steps
        T.
    lr
        η.
    gamma
        γ.
    batch_size, upper_batch_size
        Rows of a lower and an upper batch (None: all).
    count, noise, carry_rule
        N states on separate batches, as in ``value-gap``.

    Raises
    ------
    ConfigError
        If all N candidates would be equal.

    Notes
    -----
    Cost: N T lower gradients and N (T + 1) upper gradients. Memory: N lower states.

    Source: Jiang, Xiao, Chen and Chen, *Beyond value functions: single-loop bilevel optimization
    under flatness conditions* (2025, arXiv 2507.20400), PBGD-Free.

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={"t": torch.ones(1)},
    ...     x0={"x": torch.zeros(1)},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: (x["x"] * t["t"]).sum(),
    ... )
    >>> generator = ValueFree(lr=0.25, gamma=2.0)
    >>> candidates = generator.propose(
    ...     problem, problem.theta0, generator.init(problem, Key(0)), Key(0)
    ... )
    >>> candidates.x["x"], candidates.aux["theta.t"]  # y = (2 − 1/2)/4 = h
    (tensor([[0.3750]]), tensor([[0.3750]]))
    """

    name: ClassVar[str] = "value-free"
    needs: ClassVar[frozenset[str]] = frozenset({"direct-upper"})

    steps: int = field(default=1, validator=positive)
    lr: float = field(default=0.01, validator=positive)
    gamma: float = field(default=10.0, validator=positive)

    def numbers(self, step: int) -> tuple[float, ...]:
        """Return η and γ."""
        return self.lr, self.gamma

    def draw(self, problem: Problem, key: Key) -> tuple[list[Tree], list[Tree]]:
        below, above = self.draw_each(problem, key, self.steps + 1)
        return below[:-1], above

    def cost(self, problem: Problem) -> Cost:
        rows, upper_rows = self.rows(problem)
        counted = self.steps * rows + (self.steps + 1) * upper_rows
        return Cost(lower_gradients=self.steps, upper_gradients=self.steps + 1, rows=counted)

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
        rate, gamma = numbers
        loss = y[next(iter(y))].new_zeros(())
        for batch, upper_batch in zip(below, above[:-1], strict=True):
            y, loss = base.penalised_step(g, f, rate, gamma, theta, y, batch, upper_batch)
        upper = require_grad(theta)
        with torch.enable_grad():
            value = f(upper, y, above[-1])
            (to_theta,) = base.gradients(value, upper)
        return y, {**base.tag("theta", to_theta), "upper_loss": value.detach()}, loss


PBGD_FREE = single_loop(
    "pbgd-free",
    "y descends f + γg and θ follows ∂f/∂θ alone, for an f that θ enters directly; first order.",
    "Jiang, Xiao, Chen and Chen 2025, PBGD-Free.",
    {"name": "value-free", "steps": 1, "lr": 0.3, "gamma": 10.0},
    testing_failures={
        "optimum": "its θ stays where it is, as f does not depend on θ directly there"
    },
)


@hookimpl
def hgms_register_generators() -> list[type]:
    return [ValueFree]


@hookimpl
def hgms_register_methods() -> list[Composition]:
    return [PBGD_FREE]
