"""A Kronecker-factored inverse of the lower Gauss–Newton matrix.

It is used directly, or as a preconditioner of conjugate gradients.
"""

from __future__ import annotations

from typing import ClassVar, final

import attrs
from attrs import field
from torch import Tensor

from hgms.contrib.kronecker import kronecker_inverse
from hgms.solvers.cg import CG
from hgms.solvers.identity import solution_of
from hgms.solvers.pcg import ConjugateGradients, Precondition
from hgms_core import (
    Batch,
    Composition,
    LinearSolver,
    Loss,
    MatVec,
    Solution,
    Tree,
    component,
    hookimpl,
)
from hgms_core.capabilities import Capabilities, UsesLoss
from hgms_core.validators import at_least


@final
@component
class KFAC(ConjugateGradients):
    """(H + γI) v = b with K-FAC's inverse of the lower Gauss–Newton matrix.

    It approximates the inverse of the Gauss–Newton matrix G of the lower loss.

    The factors are computed by ``curvlinops``::

        K = ⊕_layers B ⊗ A,   A = (1/n) Σ_i a_i a_iᵀ,   B = Σ_i Σ_c g_ic g_icᵀ,   M = K + (γ + τ)I

    a_i are the inputs of a layer (with a 1 for its bias). g_ic are the gradients at its outputs for
    the columns of a root of row i's ∇²_zz c, so B contains θ's weights of rows. τ is the mean
    curvature of the criterion in x only (2ω of a weight decay). M is inverted exactly, by the
    eigenvectors of A and B.

    ``max_steps = 0`` returns v = M⁻¹b. Otherwise M preconditions conjugate gradients, and the
    result is as exact as the result of ``cg``.

    Use if layers are nearly independent and inputs and gradients are nearly uncorrelated, or if
    only the plain inverse is affordable. Avoid without a comparison with ``cg``: on the cleaning
    network it takes 0.7 to 1.3 times the products.

    Outcomes: as ``cg``. With ``max_steps = 0`` CONVERGED if the residual is at most ``rtol``,
    otherwise NOT_SOLVED.

    Parameters
    ----------
    max_steps
        Iteration limit of CG; 0 for the inverse itself.
    ridge, rtol, atol, clip
        As in ``cg``.

    Raises
    ------
    MissingExtra
        Without the package (``pip install 'hgms[curvlinops]'``). ConfigError for a lower loss that
        does not declare its outputs, for outputs that are not ``[n, C]``, and for a criterion that
        is not a sum over rows. ConfigError also for leaves of x that are not a weight or bias of
        ``F.linear`` or ``F.conv2d``.

    Notes
    -----
    Cost: as ``cg``. Each solve also needs C backward passes and an eigenvalue decomposition of each
    factor, which the count of products does not include. ``max_steps = 0``: one product, for the
    residual. If the loss is unknown (a plain ``hypergradient(f, g, …)``), the solver is ``cg``;
    :meth:`for_loss` returns the solver for a loss.

    Source: Martens and Grosse, "Optimizing neural networks with Kronecker-factored approximate
    curvature" (2015); for hypergradients, 2603.29108; Dangel et al., *curvlinops*.

    Examples
    --------
    >>> import torch
    >>> solution = KFAC(ridge=1.0).solve(lambda v: 2 * v, torch.ones(2, dtype=torch.float64))
    >>> (3 * solution.value).tolist(), solution.outcome.label
    ([1.0, 1.0], 'converged')
    """

    name: ClassVar[str] = "kfac"
    capabilities: ClassVar[Capabilities] = frozenset({UsesLoss})

    max_steps: int = field(default=100, validator=at_least(0))

    def for_loss(self, loss: Loss, theta: Tree, x: Tree, batch: Batch) -> LinearSolver:
        """Return the solver of systems with the curvature of this loss at (θ, x)."""
        inverse = kronecker_inverse(loss, theta, x, batch, self.ridge)
        if self.max_steps:
            return self._cg(inverse)
        return Factored(settings=self, inverse=inverse)

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        return self._cg(None).solve(matvec, b, x0)

    def _cg(self, inverse: Precondition | None) -> CG:
        return CG(
            ridge=self.ridge,
            rtol=self.rtol,
            atol=self.atol,
            max_steps=max(1, self.max_steps),
            clip=self.clip,
            preconditioner=inverse,
        )


@attrs.frozen(kw_only=True)
class Factored:
    """Compute v = M⁻¹b, and one product for its residual."""

    name: ClassVar[str] = "factored"
    settings: KFAC
    inverse: Precondition

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        system = self.settings.system(matvec, b)
        return solution_of(system, self.inverse(system.rhs), self.settings.clip)


@hookimpl
def hgms_register_linear_solvers() -> list[type]:
    return [KFAC]


KFAC_METHOD = Composition(
    name="kfac",
    summary=(
        "Few SGD steps with momentum, and K-FAC's inverse in the place of a linear solve; needs "
        "curvlinops."
    ),
    source="Liao, Dangel, Yu, AISTATS 2026 (arXiv 2603.29108).",
    parts={
        "generator": {
            "name": "branches",
            "count": 1,
            "steps": 10,
            "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
            "batch_size": 256,
        },
        "selector": {"name": "first"},
        "hypergradient": {
            "name": "implicit",
            "batch_size": 256,
            "upper_batch_size": 256,
            "solver": {"name": "kfac", "max_steps": 0, "ridge": 1e-3},
        },
        "outer": {"name": "adam", "lr": 0.1},
    },
    testing={"hypergradient": {"solver": {"name": "cg"}}},  # losses of size 1 without a network
)


@hookimpl
def hgms_register_methods() -> list[Composition]:
    return [KFAC_METHOD]
