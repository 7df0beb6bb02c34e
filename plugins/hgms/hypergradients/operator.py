"""Equation (3) with another operator instead of the lower Hessian."""

from __future__ import annotations

from attrs import evolve
from torch import Tensor

from hgms.compiled import Levels
from hgms_core import Batch, Estimate, Inexact, LinearSolver, Ravel, Tree, detach
from hgms_core.hypergrad import twice_differentiable_attention


def with_operator(
    levels: Levels,
    below: Batch,
    above: Batch,
    theta: Tree,
    x: Tree,
    solver: LinearSolver,
    v0: Tensor | None,
    rows: tuple[int, int],
) -> Estimate:
    """Return the implicit hypergradient with the operator ``levels.operator``.

    The mixed term is computed from g, by ``levels.strategy``.
    """
    operator = levels.operator
    assert operator is not None
    theta = detach(theta)
    x = detach(x)
    spec = Ravel.of(x)

    def matvec(v: Tensor) -> Tensor:
        with twice_differentiable_attention():
            return spec.ravel(operator(theta, x, below, spec.unravel(v)))

    here = levels.linearization(theta, x, below, above)
    by_difference = Inexact.difference(matvec, levels.precision or here.rhs.dtype)
    products = by_difference if levels.strategy == "difference" else matvec
    return evolve(here, matvec=products).hypergradient(solver, v0, rows)
