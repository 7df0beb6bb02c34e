"""Equation (3) with another lower batch for every product: what stochastic approximation asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from attrs import evolve
from torch import Tensor

from hgms_core import (
    Cost,
    Estimate,
    Linearization,
    LinearSolver,
    Ravel,
    Strategy,
    Tree,
    cross_product,
    curvature,
    detach,
    upper_gradients,
)  # fmt: skip

Level = Callable[[Tree, Tree], Tensor]
"""A loss with its batch already bound."""


def on_fresh_batches(
    f: Level,
    g: Level,
    losses: Iterator[Level],
    theta: Tree,
    x: Tree,
    solver: LinearSolver,
    strategy: Strategy,
    v0: Tensor | None,
    rows: tuple[int, int],
    precision: torch.dtype | None,
) -> Estimate:
    """The implicit hypergradient whose products and mixed term each take the next lower loss of ``losses``.

    ‖∇_x g‖ is that of the first of them (of ``g`` where nothing was multiplied). A product with ``vjp`` takes a gradient too,
    whose graph it goes back through, and the cost counts it.
    """
    theta, x = detach(theta), detach(x)
    upper_loss, direct, rhs_tree = upper_gradients(f, theta, x)
    spec = Ravel.of(x)
    slope: Tensor | None = None
    gradients = 0

    def product(v: Tensor) -> Tensor:
        nonlocal slope, gradients
        loss = next(losses)
        here = curvature(lambda point: loss(theta, point), x, strategy, precision=precision)
        gradients += strategy == "vjp" or slope is None
        if slope is None:
            slope = here.gradient
        return here.matvec(v)

    def mixed(v: Tensor) -> Tree:
        return cross_product(next(losses), theta, x, spec.unravel(v), strategy, precision=precision)

    rhs, passes = spec.ravel(rhs_tree), 2 if strategy == "difference" else 1
    estimate = Linearization(upper_loss, direct, rhs, rhs, product, mixed, passes).hypergradient(solver, v0, rows)
    if slope is None:
        slope, gradients = curvature(lambda point: g(theta, point), x, strategy).gradient, 1
    more = Cost(lower_gradients=gradients - 1, rows=rows[1] * (gradients - 1))
    return evolve(estimate, lower_gradient_norm=torch.linalg.vector_norm(slope), cost=estimate.cost + more)
