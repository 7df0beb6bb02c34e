"""Conjugate gradients with a randomised Nyström preconditioner."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms.solvers.pcg import ConjugateGradients, Precondition
from hgms_core import Key, LinearSystem, MatVec, Solution, component, hookimpl
from hgms_core.validators import at_least


@final
@component
class NystromCG(ConjugateGradients):
    """Solve (H + γI) v = b by conjugate gradients with a rank-l Nyström preconditioner.

    With Ω an orthonormal test matrix of l columns and Y = HΩ, the approximation of H is Ĥ = Y
    (ΩᵀY)⁻¹ Yᵀ = UΛUᵀ. The preconditioner is::

        M⁻¹ = (λ_l + γ) U (Λ + γI)⁻¹ Uᵀ + (I − UUᵀ)

    The l largest eigenvalues are removed. The preconditioned system has a condition number of about
    (λ_l + γ)/γ.

    Use when H has some tens of large eigenvalues above a bulk of small eigenvalues (as in
    networks), and the tolerance is tight or the ridge small. Plain CG then takes several times
    ``rank`` iterations. Avoid for loose tolerances: the sketch already costs ``rank`` products,
    which plain CG would use for iterations.

    Outcomes: as ``cg``. H may be indefinite: the preconditioner excludes directions of the sketch
    without positive curvature, so it stays positive definite. The iteration then stops as ``cg``
    does.

    Parameters
    ----------
    rank
        l, the number of products for the sketch; at most the dimension is used.
    ridge, rtol, atol, max_steps, clip
        As in ``cg``.
    seed
        Seed of the Gaussian test matrix (the same in every call).

    Notes
    -----
    Cost: ``rank`` products, then as ``cg`` (``Solution.products`` counts all products,
    ``iterations`` only the CG iterations). Memory: 2·rank vectors more than ``cg``.

    Source: Frangella, Tropp and Udell, "Randomized Nyström preconditioning" (2021), Algorithm 2.1
    and equation (1.3). Difference from the source: an eigenvalue decomposition of ΩᵀY without its
    non-positive part replaces the Cholesky factor of a shifted ΩᵀY, because a lower Hessian may be
    indefinite.

    Examples
    --------
    >>> from hgms.solvers import CG, NystromCG
    >>> H = torch.cat([torch.logspace(0, 6, 10), torch.ones(190)]).double()
    >>> b = torch.ones(200, dtype=torch.float64)
    >>> plain, nystrom = (
    ...     s.solve(lambda v: H * v, b) for s in (CG(ridge=1e-3), NystromCG(rank=12, ridge=1e-3))
    ... )
    >>> (
    ...     int(nystrom.iterations) < int(plain.iterations),
    ...     bool(torch.allclose(nystrom.value, b / (H + 1e-3), rtol=1e-4)),
    ... )
    (True, True)
    """

    name: ClassVar[str] = "nystrom"

    rank: int = field(default=20, validator=at_least(1))
    seed: int = 0

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        system = self.system(matvec, b)
        if not (system.size > system.target).any():  # no system to solve, so no sketch
            return self.run(system, x0)
        precondition, largest = self._sketch(system)
        return self.run(system, x0, precondition, largest)

    def _sketch(self, system: LinearSystem) -> tuple[Precondition, Tensor]:
        """Return the preconditioner, and the largest eigenvalue of Ĥ + γI."""
        rhs = system.rhs
        dimension = rhs.shape[-1]
        eps = torch.finfo(rhs.dtype).eps
        # Half precision does not support factorisations.
        dtype = torch.promote_types(rhs.dtype, torch.float32)
        # Drawn on the CPU, so that a GPU run uses the same test matrix.
        gaussian = torch.randn(
            dimension,
            min(self.rank, dimension),
            generator=Key(self.seed).fold("nystrom").generator(),
            dtype=dtype,
        )
        test = torch.linalg.qr(gaussian.to(rhs.device)).Q  # [d, l]
        columns = test.T.to(rhs.dtype)
        sketch = torch.stack(
            [system.apply(column.expand_as(rhs).contiguous()) for column in columns], dim=-1
        ).to(dtype)
        usable = torch.isfinite(sketch).flatten(-2).all(-1)[..., None, None]
        sketch = torch.where(usable, sketch, torch.zeros_like(sketch)) - self.ridge * test

        core = test.T @ sketch
        values, vectors = torch.linalg.eigh((core + core.mT) / 2)  # ascending
        positive = values > eps * dimension**0.5 * torch.linalg.matrix_norm(sketch)[..., None]
        scale = torch.where(positive, values, torch.ones_like(values)).rsqrt() * positive
        # Ĥ = BBᵀ. Its eigenpairs come from the small matrix BᵀB, orthonormalised by QR first, for
        # accuracy.
        basis, small = torch.linalg.qr(sketch @ (vectors * scale[..., None, :]))
        left, singular, _ = torch.linalg.svd(small)  # descending
        u = basis @ left
        eigenvalues = singular**2
        count = positive.sum(-1, keepdim=True)
        used = torch.arange(eigenvalues.shape[-1], device=rhs.device) < count
        least = eigenvalues.gather(-1, (count - 1).clamp_min(0))
        weight = (
            torch.where(
                used,
                (least + self.ridge) / (eigenvalues + self.ridge),
                torch.ones_like(eigenvalues),
            )
            - 1
        )

        def precondition(r: Tensor) -> Tensor:
            inside = (u.mT @ r[..., None].to(dtype)).squeeze(-1)
            return r + (u @ (weight * inside)[..., None]).squeeze(-1).to(r)

        return precondition, ((eigenvalues * used).amax(-1) + self.ridge).to(rhs)


@hookimpl
def hgms_register_linear_solvers() -> list[type]:
    return [NystromCG]
