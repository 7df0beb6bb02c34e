"""The derivative of f after one SGD step: what `one-step` and `through-step` share."""

from __future__ import annotations

from typing import Literal

import torch

from hgms_core import (
    ConfigError,
    Cost,
    Estimate,
    LastStep,
    Problem,
    Tree,
    cross_product,
    gradient,
    norm,
    upper_gradients,
)  # fmt: skip


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
    """∇_θ of f(θ, x⁺(θ)) with x⁺ = a − η ∇_x g(θ, x; B) for the step (x, B, η), f on the rows ``above``::

        h = ∇_θ f(θ, x⁺) − η ∇²_θx g(θ, x; B) v,      v = ∇_x f(θ, x⁺)

    ``end`` is x⁺ where it is known; else the step is taken from a = x, for one lower gradient.
    """
    slope, cost = None, step.cost
    if end is None:
        grads, _ = gradient(problem.g, theta, step.x, step.batch)
        slope = dict(zip(step.x, grads, strict=True))
        end = {name: leaf - step.rate * slope[name] for name, leaf in step.x.items()}
        cost += Cost(lower_gradients=1, rows=step.rows)
    loss, direct, v = upper_gradients(lambda theta, x: problem.f(theta, x, above), theta, end)
    if derivative == "per-source":
        mixed, spent = _per_source(problem, theta, step, v)
    else:
        strategy: Literal["vjp", "difference"] = "vjp" if derivative == "exact" else "difference"

        def g(theta: Tree, x: Tree) -> torch.Tensor:
            return problem.g(theta, x, step.batch)

        mixed = cross_product(g, theta, step.x, v, strategy, displacement, problem.precision)
        spent = Cost(cross_products=1, rows=(1 if derivative == "exact" else 2) * step.rows)
    return Estimate(
        value={name: direct[name] - step.rate * mixed[name] for name in direct},
        upper_loss=loss,
        lower_gradient_norm=None if slope is None else norm(slope),
        cost=cost + spent + Cost(upper_gradients=1, rows=upper_rows),
    )


def _per_source(problem: Problem, theta: Tree, step: LastStep, v: Tree) -> tuple[Tree, Cost]:
    """∂_θ Σ_s ω_s(θ) a_s with a_s = ⟨v, ∇ℓ_s(x; B)⟩: one graph, a backward pass a source."""
    sources = problem.sources
    if sources is None:
        raise ConfigError('derivative = "per-source" needs a lower loss that mixes named sources; use "difference" or "exact"')
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in step.x.items()}
    with torch.enable_grad():
        slopes = []
        for loss in sources.losses(leaves, step.batch).unbind():
            grads = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, materialize_grads=True)
            slopes.append(torch.stack([(grad * v[name]).sum() for name, grad in zip(leaves, grads, strict=True)]).sum())
        upper = {name: leaf.detach().requires_grad_() for name, leaf in theta.items()}
        value = (sources.weights(upper) * torch.stack(slopes).detach()).sum()
        mixed = torch.autograd.grad(value, list(upper.values()), materialize_grads=True)
    count = len(sources.names)
    return dict(zip(upper, mixed, strict=True)), Cost(lower_gradients=count, rows=count * step.rows)
