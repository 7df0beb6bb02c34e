"""The derivative of f after one SGD step, which `one-step` and `through-step` share."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from attrs import frozen
from torch import Tensor

from hgms.compiled import Numbers, launch
from hgms_core import (
    ConfigError,
    Cost,
    Estimate,
    LastStep,
    Loss,
    Problem,
    Sources,
    Tree,
    cross_product,
    gradient,
    norm,
    upper_gradients,
)
from hgms_core.trees import require_grad


@frozen
class _Levels:
    """Both losses, and how the mixed term is computed: by source if there are ``sources``."""

    f: Loss
    g: Loss
    derivative: Literal["exact", "difference", "per-source"]
    displacement: float | None
    precision: torch.dtype | None
    sources: Sources | None


def through(
    problem: Problem,
    theta: Tree,
    step: LastStep,
    above: Tree,
    upper_rows: int,
    derivative: Literal["exact", "difference", "per-source"],
    displacement: float | None = None,
    end: Tree | None = None,
) -> Estimate:
    """Return ∇_θ of f(θ, x⁺(θ)) after the step x⁺ = a − η ∇_x g(θ, x; B).

    The step is (x, B, η), and f uses the rows ``above``::

        h = ∇_θ f(θ, x⁺) − η ∇²_θx g(θ, x; B) v,      v = ∇_x f(θ, x⁺)

    ``end`` is x⁺ if it is known; otherwise the step starts at a = x and costs one lower gradient.
    """
    sources = _sources(problem) if derivative == "per-source" else None
    levels = _Levels(problem.f, problem.g, derivative, displacement, problem.precision, sources)
    programs = None if sources is not None else problem.compiler
    key = ("through", levels)
    function = partial(_through, levels)
    loss, value, length = launch(
        programs, key, function, (step.rate,), step.x, theta, step.batch, above, end
    )
    if sources is not None:
        count = len(sources.names)
        spent = Cost(lower_gradients=count, rows=count * step.rows)
    else:
        spent = Cost(cross_products=1, rows=(1 if derivative == "exact" else 2) * step.rows)
    own = Cost(lower_gradients=1, rows=step.rows) if end is None else Cost()
    cost = step.cost + own + spent + Cost(upper_gradients=1, rows=upper_rows)
    return Estimate(value=value, upper_loss=loss, lower_gradient_norm=length, cost=cost)


def _through(
    levels: _Levels,
    rates: Numbers,
    x: Tree,
    theta: Tree,
    below: Tree,
    above: Tree,
    end: Tree | None,
) -> tuple[Tensor, Tree, Tensor | None]:
    """Return f after the step, h, and ‖∇_x g‖ if the step was computed."""
    (rate,) = rates
    slope = None
    if end is None:
        grads, _ = gradient(levels.g, theta, x, below)
        slope = dict(zip(x, grads, strict=True))
        end = {name: leaf - rate * slope[name] for name, leaf in x.items()}
    loss, direct, v = upper_gradients(lambda theta, x: levels.f(theta, x, above), theta, end)
    if levels.sources is not None:
        mixed = _per_source(levels.sources, theta, x, below, v)
    else:
        mixed = cross_product(
            lambda theta, x: levels.g(theta, x, below),
            theta,
            x,
            v,
            "vjp" if levels.derivative == "exact" else "difference",
            levels.displacement,
            levels.precision,
        )
    value = {name: direct[name] - rate * mixed[name] for name in direct}
    return loss, value, None if slope is None else norm(slope)


def _sources(problem: Problem) -> Sources:
    sources = problem.find(Sources)
    if sources is None:
        raise ConfigError(
            "not-supported",
            "derivative='per-source' requires a lower loss that mixes named sources, but the "
            "problem has no sources",
            place=("hypergradient", "derivative"),
            hint='set derivative = "difference" or "exact"',
        )
    return sources


def _per_source(sources: Sources, theta: Tree, x: Tree, below: Tree, v: Tree) -> Tree:
    """Return ∂_θ Σ_s ω_s(θ) a_s with a_s = ⟨v, ∇ℓ_s(x; B)⟩: one graph, one backward pass per
    source.
    """
    leaves = require_grad(x)
    with torch.enable_grad():
        slopes = []
        for loss in sources.losses(leaves, below).unbind():
            grads = torch.autograd.grad(
                loss, list(leaves.values()), retain_graph=True, materialize_grads=True
            )
            slopes.append(
                torch.stack(
                    [(grad * v[name]).sum() for name, grad in zip(leaves, grads, strict=True)]
                ).sum()
            )
        upper = require_grad(theta)
        value = (sources.weights(upper) * torch.stack(slopes).detach()).sum()
        mixed = torch.autograd.grad(value, list(upper.values()), materialize_grads=True)
    return dict(zip(upper, mixed, strict=True))
