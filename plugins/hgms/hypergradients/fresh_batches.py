"""Equation (3) with a different lower batch for every product, for stochastic approximation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from attrs import evolve, frozen
from torch import Tensor

from hgms.compiled import Levels, Programs, form
from hgms_core import (
    Batch,
    Cost,
    Estimate,
    Linearization,
    LinearSolver,
    Loss,
    Ravel,
    Strategy,
    Tree,
    cross_product,
    curvature,
    detach,
    upper_gradients,
)


@frozen
class Batches:
    """The upper batch, the first lower batch, and ``more`` lower batches for the products."""

    above: Batch
    below: Batch
    more: Iterator[Batch]


def on_fresh_batches(
    levels: Levels,
    batches: Batches,
    theta: Tree,
    x: Tree,
    solver: LinearSolver,
    v0: Tensor | None,
    rows: tuple[int, int],
    programs: Programs | None,
) -> Estimate:
    """Return the implicit hypergradient with a new lower batch for each product and the mixed term.

    The batches come from ``batches.more``. ‖∇_x g‖ refers to the first of these batches (to
    ``batches.below`` if there was no product). A product with ``vjp`` also computes a gradient,
    because it differentiates the gradient's graph; the cost counts it.
    """
    theta = detach(theta)
    x = detach(x)
    f = levels.f
    g = levels.g
    strategy = levels.strategy
    how = (strategy, levels.precision)
    upper_loss, direct, rhs_tree = form(programs, ("upper gradients", f), partial(_upper, f))(
        theta, x, batches.above
    )
    spec = Ravel.of(x)
    slope: Tensor | None = None
    gradients = 0

    def product(v: Tensor) -> Tensor:
        nonlocal slope, gradients
        wanted = strategy == "vjp" or slope is None
        multiply = form(
            programs, ("fresh product", g, *how, wanted), partial(_product, g, *how, wanted)
        )
        result, at_x = multiply(theta, x, next(batches.more), v)
        gradients += wanted
        slope = at_x if slope is None else slope
        return result

    def cross(v: Tensor) -> Tree:
        mix = form(programs, ("fresh mixed product", g, *how), partial(_cross, g, *how))
        return mix(theta, x, next(batches.more), spec.unravel(v))

    rhs = spec.ravel(rhs_tree)
    passes = 2 if strategy == "difference" else 1
    estimate = Linearization(upper_loss, direct, rhs, rhs, product, cross, passes).hypergradient(
        solver, v0, rows
    )
    if slope is None:
        slope = curvature(lambda point: g(theta, point, batches.below), x, strategy).gradient
        gradients = 1
    spent = Cost(lower_gradients=gradients - 1, rows=rows[1] * (gradients - 1))
    return evolve(
        estimate, lower_gradient_norm=torch.linalg.vector_norm(slope), cost=estimate.cost + spent
    )


def _upper(f: Loss, theta: Tree, x: Tree, above: Batch) -> tuple[Tensor, Tree, Tree]:
    return upper_gradients(lambda t, y: f(t, y, above), theta, x)


def _product(
    g: Loss,
    strategy: Strategy,
    precision: torch.dtype | None,
    wanted: bool,
    theta: Tree,
    x: Tree,
    below: Batch,
    v: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return Hv on a batch, and ∇_x g if ``wanted``."""
    here = curvature(lambda point: g(theta, point, below), x, strategy, precision=precision)
    slope = here.gradient if wanted else None
    return here.matvec(v), slope


def _cross(
    g: Loss,
    strategy: Strategy,
    precision: torch.dtype | None,
    theta: Tree,
    x: Tree,
    below: Batch,
    v: Tree,
) -> Tree:
    return cross_product(lambda t, y: g(t, y, below), theta, x, v, strategy, precision=precision)
