"""Equation (3) with another operator instead of the lower Hessian."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import evolve
from torch import Tensor

from hgms.gauss_newton import Product
from hgms_core import (
    Batch,
    Estimate,
    Inexact,
    Linearization,
    LinearSolver,
    Ravel,
    Strategy,
    Tree,
    detach,
)
from hgms_core.hypergrad import twice_differentiable_attention

Level = Callable[[Tree, Tree], Tensor]
"""A loss with its batch already bound."""


def with_operator(
    product: Product,
    batch: Batch,
    f: Level,
    g: Level,
    theta: Tree,
    x: Tree,
    solver: LinearSolver,
    v0: Tensor | None,
    rows: tuple[int, int],
    strategy: Strategy = "jvp",
    precision: torch.dtype | None = None,
) -> Estimate:
    """Return the implicit hypergradient with the operator ``product(theta, x, batch, v)``.

    The mixed term is computed from g, by ``strategy``.
    """
    theta = detach(theta)
    x = detach(x)
    spec = Ravel.of(x)

    def matvec(v: Tensor) -> Tensor:
        with twice_differentiable_attention():
            return spec.ravel(product(theta, x, batch, spec.unravel(v)))

    here = Linearization.of(f, g, theta, x, strategy, precision)
    by_difference = Inexact.difference(matvec, precision or here.rhs.dtype)
    products = by_difference if strategy == "difference" else matvec
    return evolve(here, matvec=products).hypergradient(solver, v0, rows)
