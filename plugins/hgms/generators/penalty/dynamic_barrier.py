"""BOME: θ and y move together along ∇f, corrected so that the value gap keeps falling."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms.compiled import form
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
    hookimpl,
)
from hgms_core.trees import require_grad
from hgms_core.validators import positive


@final
@component
class DynamicBarrier(base.PenaltyGenerator):
    """The lower state y of BOME, and the upper part of its joint direction.

    With ∇ = (∇_θ, ∇_y) and one lower batch for the whole step::

        y^{t+1} = y^t − η_T ∇_y g(θ, y^t),   y^0 = y    T steps; y^T is then fixed
        q(θ, y) = g(θ, y) − g(θ, y^T)
        λ = max(η − ⟨∇f, ∇q⟩ / ‖∇q‖², 0)    so that ⟨∇f + λ∇q, ∇q⟩ ≥ η ‖∇q‖²
        y ← y − η_y (∇_y f + λ ∇_y q),   h = ∇_θ f + λ ∇_θ q             both at the old (θ, y)

    λ is the smallest weight with which q falls at the required rate: there is no penalty to choose.
    y is carried to the next step; y^T is not. Combine with hypergradient ``carried`` and an outer
    ``sgd``.

    Use when tuning a penalty weight is not wanted. Avoid very noisy batches: λ is a ratio of two
    inner products.

    Parameters
    ----------
    steps
        T.
    inner_lr
        η_T.
    lr
        η_y.
    eta
        η, how fast the gap must fall.
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
    Cost: N (T + 1) lower gradients (the gradient at y serves q and the first of the T steps, the
    gradient at y^T is in θ only), N upper gradients. Memory: N lower states and a few gradients.

    Source: Liu, Ye, Wright, Stone and Liu, *BOME! Bilevel optimization made easy: a simple
    first-order approach* (2022).

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={"t": torch.ones(1)},
    ...     x0={"x": torch.zeros(1)},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: (x["x"] + 2 * t["t"]).sum(),
    ... )
    >>> generator = DynamicBarrier(steps=1, inner_lr=0.5, lr=0.25, eta=1.0)
    >>> candidates = generator.propose(
    ...     problem, problem.theta0, generator.init(problem, Key(0)), Key(0)
    ... )
    >>> candidates.x["x"], candidates.aux["theta.t"]  # ∇q = (2, −2), ∇f = (2, 1): λ = 1 − 2/8
    (tensor([[0.1250]]), tensor([[3.5000]]))
    """

    name: ClassVar[str] = "dynamic-barrier"

    steps: int = field(default=10, validator=positive)
    inner_lr: float = field(default=0.1, validator=positive)
    lr: float = field(default=0.1, validator=positive)
    eta: float = field(default=0.5, validator=positive)

    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float = 0.0
    ) -> Candidates:
        g = problem.g
        f = problem.f
        programs = problem.compiler
        before = form(programs, (f"{self.name} slopes", self, g, f), partial(self._slopes, g, f))
        after = form(programs, (f"{self.name} step", self, g), partial(self._bent, g))

        def step(y: Tree, aux: Tree, key: Key) -> tuple[Tree, Tree, Tensor]:
            below = self.lower_batch(problem, key)
            above = self.upper_batch(problem, key)
            slopes, end, losses = before(y, theta, below, above)
            end = base.descent(programs, self, g, self.steps - 1, self.inner_lr, theta, end, below)
            x, kept = after(y, end, slopes, theta, below)
            return x, {**kept, "upper_loss": losses["f"]}, losses["g"]

        rows, upper_rows = self.rows(problem)
        cost = Cost(
            lower_gradients=self.steps + 1,
            upper_gradients=1,
            rows=rows * (self.steps + 1) + upper_rows,
        )
        return self.branches(start, key, step, cost)

    def _slopes(
        self, g: Loss, f: Loss, y: Tree, theta: Tree, below: Tree, above: Tree
    ) -> tuple[dict[str, Tree], Tree, dict[str, Tensor]]:
        """Return both gradients at (θ, y), y after the first step, and the losses."""
        upper = require_grad(theta)
        lower = require_grad(y)
        with torch.enable_grad():
            at_y = g(upper, lower, below)
            g_theta, g_y = base.gradients(at_y, upper, lower)
            value = f(upper, lower, above)
            f_theta, f_y = base.gradients(value, upper, lower)
        slopes = {"g_theta": g_theta, "g_y": g_y, "f_theta": f_theta, "f_y": f_y}
        return (
            slopes,
            base.descend(y, g_y, self.inner_lr),
            {"g": at_y.detach(), "f": value.detach()},
        )

    def _bent(
        self, g: Loss, y: Tree, end: Tree, slopes: dict[str, Tree], theta: Tree, below: Tree
    ) -> tuple[Tree, Tree]:
        """Return the next y and its ``aux``, from the gradients at y and y^T."""
        g_theta, g_y, f_theta, f_y = (slopes[name] for name in ("g_theta", "g_y", "f_theta", "f_y"))
        upper = require_grad(theta)
        with torch.enable_grad():
            (end_theta,) = base.gradients(g(upper, end, below), upper)
        q_theta = {name: g_theta[name] - end_theta[name] for name in g_theta}
        size = _dot(q_theta, q_theta) + _dot(g_y, g_y)
        inner = _dot(f_theta, q_theta) + _dot(f_y, g_y)
        # If ∇q = 0, its weight has no effect; the bound avoids 0/0.
        weight = (self.eta - inner / size.clamp_min(torch.finfo(size.dtype).tiny)).clamp_min(0)
        to_theta = {name: f_theta[name] + weight * q_theta[name] for name in f_theta}
        to_y = {name: f_y[name] + weight * g_y[name] for name in f_y}
        kept = {**base.tag("theta", to_theta), "lower_gradient_norm": _dot(g_y, g_y).sqrt()}
        return base.descend(y, to_y, self.lr), kept


def _dot(a: Tree, b: Tree) -> Tensor:
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum() if a else torch.zeros(())


BOME = single_loop(
    "bome",
    (
        "θ and y move along ∇f, bent by a dynamic barrier so that the value gap keeps falling; "
        "first order."
    ),
    "Liu et al. 2022, BOME.",
    {"name": "dynamic-barrier", "steps": 10, "inner_lr": 0.3, "lr": 0.3, "eta": 0.5},
)


@hookimpl
def hgms_register_generators() -> list[type]:
    return [DynamicBarrier]


@hookimpl
def hgms_register_methods() -> list[Composition]:
    return [BOME]
