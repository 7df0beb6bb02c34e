"""Conjugate gradients with a preconditioner from earlier products.

The products of previous systems are recycled.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms.solvers.pcg import ConjugateGradients, Precondition
from hgms_core import MatVec, Solution, Tree, component, hookimpl
from hgms_core.capabilities import Capabilities, Recycles
from hgms_core.validators import at_least

SMALL = 1e-6
"""Share of the largest eigenvalue below which an eigenvalue of a small matrix of inner products is
rounding.
"""
USEFUL = 2.0
"""Maximum ratio of the measured curvature of B⁻¹b to the model's curvature; above it, the model is
discarded.
"""


@final
@component
class RecycledCG(ConjugateGradients):
    """(H + γI) v = b by conjugate gradients with a learned preconditioner.

    The preconditioner is learned from the previous systems.

    The preconditioner costs no product. The memory is B = UΛUᵀ + τ(I − UUᵀ), a model of the last H
    + γI with ``rank`` eigenvectors U. Its inverse preconditions the next solve. The products of
    that solve, Y = (H + γI) P, then update the model (the block form of BFGS), which is truncated
    to the ``rank`` largest eigenvalues::

        B⁺ = B − BP (PᵀBP)⁻¹ PᵀB + Y (PᵀY)⁻¹ Yᵀ

    P and Y are projected onto span[U, P]. So B⁺P = Y is true before the truncation only if that
    span contains Y, as in a Krylov space. B⁺ is positive definite, and it keeps the information of
    old products in directions without new products. The start is s = B⁻¹b. If sᵀ(H + γI)s > 2 sᵀBs
    (x was restarted), the model is discarded, and the solve is the same as with ``cg``.

    Use along an outer trajectory (``implicit`` passes the memory from step to step), if H changes
    slowly relative to its spectrum. Avoid for a single system, for which it is ``cg``, and if H is
    different every time (a small new batch per step).

    Outcomes: as ``cg``. The model does not learn from directions without positive curvature.

    Parameters
    ----------
    rank
        Number of stored vectors, ≥ 1.
    ridge, rtol, atol, max_steps, clip
        As in ``cg``. The model learns from the first 2·``rank`` products of a solve.

    Notes
    -----
    Cost: products as ``cg``, fewer from the second system on. A start ``x0`` is used for the first
    system only. Memory: ``rank`` vectors between systems, and two vectors per product within a
    system. In addition to the products, 4·``rank``·d multiply-adds per iteration, and (rank +
    k)(rank + 2k)·d once after a solve of k. N systems together are solved without memory.

    Source: Gratton, Sartenaer and Tshimanga, "On a class of limited memory preconditioners for
    large scale linear systems with multiple right-hand sides" (2011), here with a changing matrix;
    Morales and Nocedal (2000) for a sequence of matrices. Differs in: the model is truncated to its
    largest eigenvalues after each system instead of discarding the oldest pairs.

    Examples
    --------
    >>> H = torch.cat([torch.logspace(0, 3, 20), torch.linspace(0.5, 1, 180)]).double()
    >>> b, solver, memory = (
    ...     torch.ones(200, dtype=torch.float64),
    ...     RecycledCG(ridge=1e-3, rank=30),
    ...     {},
    ... )
    >>> first, memory = solver.solve_from(lambda v: H * v, b, None, memory)
    >>> second, memory = solver.solve_from(lambda v: 1.01 * H * v, b, None, memory)
    >>> 10 * second.products < first.products, second.outcome.label
    (True, 'converged')
    """

    name: ClassVar[str] = "recycled-cg"
    capabilities: ClassVar[Capabilities] = frozenset({Recycles})

    rank: int = field(default=60, validator=at_least(1))

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        return self.run(self.system(matvec, b), x0)

    def solve_from(
        self, matvec: MatVec, b: Tensor, x0: Tensor | None, memory: Tree
    ) -> tuple[Solution, Tree]:
        """Solve with the memory of the last system, and return the new memory.

        ``memory`` is ``{}`` before the first system.
        """
        if b.dim() > 1:
            return self.solve(matvec, b, x0), memory
        pairs: list[tuple[Tensor, Tensor]] = []

        def record_product(v: Tensor) -> Tensor:
            image = matvec(v)
            if len(pairs) < 2 * self.rank:
                pairs.append((v.detach(), image.detach()))
            return image

        system = self.system(matvec, b)
        system.matvec = record_product
        if not memory:
            return self.run(system, x0), update_model({}, pairs, self.ridge, self.rank)
        solve = inverse(memory)
        kept = memory

        def precondition(r: Tensor) -> Tensor:
            nonlocal kept
            if (
                system.products == 1
                # the product of the start s = B⁻¹b: the model is useless if sᵀ(H + γI)s is not near
                # sᵀBs = sᵀb
            ):
                start, image = pairs[0]
                curvature = system.dot(start, torch.add(image, start, alpha=self.ridge))
                if not bool(curvature <= USEFUL * system.dot(start, system.rhs)):
                    kept = {}
            return solve(r) if kept else r

        start = solve(b.detach()) / memory["rest"]
        solution = self.run(system, start, precondition)
        return solution, update_model(kept, pairs, self.ridge, self.rank)


def inverse(memory: Tree) -> Precondition:
    """Return the function r ↦ τB⁻¹r."""
    basis = memory["basis"]
    weight = memory["rest"] / memory["values"] - 1
    return lambda r: torch.addmv(r, basis.T, weight * (basis @ r))


def update_model(memory: Tree, pairs: list[tuple[Tensor, Tensor]], ridge: float, rank: int) -> Tree:
    """Update the model by the products ``pairs`` of H.

    The result is truncated to ``rank`` eigenvectors.

    The computation uses a basis of [U, P].
    """
    shifted = [
        (v / v.norm(), torch.add(image, v, alpha=ridge) / v.norm()) for v, image in pairs if v.any()
    ]
    shifted = [
        (v, image)
        for v, image in shifted
        if bool(torch.isfinite(image).all()) and bool(v @ image > 0)
    ]
    if not shifted:
        return memory
    p, y = (torch.stack(some) for some in zip(*shifted, strict=True))
    # τ is the smallest curvature of the first system
    rest = memory["rest"] if memory else torch.linalg.vecdot(p, y).min()
    rows = torch.cat([memory["basis"], p]) if memory else p
    count = len(rows) - len(p)
    gram = (rows @ rows.T).double()
    images = (rows @ y.T).double()
    model = rest.double() * gram
    if memory:
        model = model + gram[:, :count] * (memory["values"] - rest).double() @ gram[:count]
    forgotten = model[:, count:]
    for columns, sign in ((forgotten, -1), (images, 1)):
        middle = (columns[count:] + columns[count:].T) / 2
        model = (
            model
            + sign * columns @ torch.linalg.pinv(middle, rtol=SMALL, hermitian=True) @ columns.T
        )
    sizes, axes = torch.linalg.eigh(gram)
    kept = sizes > SMALL * sizes[-1]
    white = axes[:, kept] / sizes[kept].sqrt()  # whiteᵀ·rows is orthonormal
    values, vectors = torch.linalg.eigh(white.T @ model @ white)
    largest = values.argsort()[-rank:]
    largest = largest[values[largest] > SMALL * values[-1]]
    return {
        "basis": (white @ vectors[:, largest]).T.to(rows) @ rows,
        "values": values[largest].to(rows),
        "rest": rest,
    }


@hookimpl
def hgms_register_linear_solvers() -> list[type]:
    return [RecycledCG]
