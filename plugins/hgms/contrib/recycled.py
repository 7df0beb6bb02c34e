"""Conjugate gradients that remember the last systems: a preconditioner recycled from their own
products.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms.solvers.pcg import Precondition, pcg
from hgms_core import LinearSystem, MatVec, Solution, Tree, component, hookimpl
from hgms_core.validators import at_least, not_negative, optional_positive, positive

SMALL = 1e-6
"""Below this share of the largest, an eigenvalue of a small matrix of inner products is
rounding.
"""
USEFUL = 2.0
"""A model is forgotten whose own solution B⁻¹b meets this many times the curvature that it says."""


@final
@component
class RecycledCG:
    """(H + γI) v = b by conjugate gradients whose preconditioner is learned from the systems
    before, for no product at all.

    Remembered is B = UΛUᵀ + τ(I − UUᵀ), a model of the last H + γI with ``rank`` eigenvectors U.
    Its inverse preconditions the next solve. What that multiplies, Y = (H + γI) P, then updates the
    model (the block form of BFGS), which is cut to the ``rank`` largest eigenvalues again::

        B⁺ = B − BP (PᵀBP)⁻¹ PᵀB + Y (PᵀY)⁻¹ Yᵀ

    P and Y are projected onto span[U, P], so B⁺P = Y holds before the cut only where that span
    contains Y, as in a Krylov space. B⁺ is positive definite, and what an old product said is kept
    where no new one was made. The start is s = B⁻¹b. Where sᵀ(H + γI)s > 2 sᵀBs (x was restarted),
    the model is forgotten, and the solve is ``cg``'s.

    Use along an outer trajectory (``implicit`` hands the memory from step to step), where H changes
    slowly beside its spectrum. Avoid for a single system, where it is ``cg``, and where H is
    another one every time (a small new batch a step).

    Arguments:
        rank: vectors that are remembered, ≥ 1.
        ridge, rtol, atol, max_steps, clip: as in ``cg``. Of a solve, the first 2·``rank`` products
            are learned from.

    Outcomes: as ``cg``. Directions without positive curvature are not learned from.

    Cost: products as ``cg``, fewer from the second system on. A start ``x0`` is used for the first
    alone. Memory: ``rank`` vectors between systems, and two vectors a product within one. Beside
    the products 4·``rank``·d multiply-adds an iteration, and (rank + k)(rank + 2k)·d once after a
    solve of k. N systems at once are solved without memory.

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

    Source: Gratton, Sartenaer and Tshimanga, "On a class of limited memory preconditioners for
    large scale linear systems with multiple right-hand sides" (2011), whose matrix changes here;
    Morales and Nocedal (2000) for a sequence of matrices. Differs in: the model is cut to its
    largest eigenvalues after each system instead of forgetting the oldest pairs.
    """

    name: ClassVar[str] = "recycled-cg"

    rank: int = field(default=60, validator=at_least(1))
    ridge: float = field(default=0.0, validator=not_negative)
    rtol: float = field(default=1e-6, validator=positive)
    atol: float = field(default=0.0, validator=not_negative)
    max_steps: int = field(default=100, validator=at_least(1))
    clip: float | None = field(default=None, validator=optional_positive)

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        system = LinearSystem.of(matvec, b, ridge=self.ridge, rtol=self.rtol, atol=self.atol)
        return pcg(system, x0, self.max_steps, self.clip)

    def solve_from(
        self, matvec: MatVec, b: Tensor, x0: Tensor | None, memory: Tree
    ) -> tuple[Solution, Tree]:
        """``solve`` with what was remembered from the last system (``{}`` before the first), and
        what to remember now.
        """
        if b.dim() > 1:
            return self.solve(matvec, b, x0), memory
        pairs: list[tuple[Tensor, Tensor]] = []

        def watched(v: Tensor) -> Tensor:
            image = matvec(v)
            if len(pairs) < 2 * self.rank:
                pairs.append((v.detach(), image.detach()))
            return image

        system = LinearSystem.of(matvec, b, ridge=self.ridge, rtol=self.rtol, atol=self.atol)
        system.matvec = watched
        if not memory:
            return pcg(system, x0, self.max_steps, self.clip), updated(
                {}, pairs, self.ridge, self.rank
            )
        solve = inverse(memory)
        kept = memory

        def precondition(r: Tensor) -> Tensor:
            nonlocal kept
            if (
                system.products == 1
                # of the start s = B⁻¹b: where sᵀ(H + γI)s is not near sᵀBs = sᵀb, the model is of
                # no use
            ):
                start, image = pairs[0]
                curvature = system.dot(start, torch.add(image, start, alpha=self.ridge))
                if not bool(curvature <= USEFUL * system.dot(start, system.rhs)):
                    kept = {}
            return solve(r) if kept else r

        solution = pcg(
            system, solve(b.detach()) / memory["rest"], self.max_steps, self.clip, precondition
        )
        return solution, updated(kept, pairs, self.ridge, self.rank)


def inverse(memory: Tree) -> Precondition:
    """r ↦ τB⁻¹r."""
    basis = memory["basis"]
    weight = memory["rest"] / memory["values"] - 1
    return lambda r: torch.addmv(r, basis.T, weight * (basis @ r))


def updated(memory: Tree, pairs: list[tuple[Tensor, Tensor]], ridge: float, rank: int) -> Tree:
    """The model after the products ``pairs`` of H, cut to ``rank`` eigenvectors. All in a basis
    of [U, P].
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
    # τ is the smallest curvature that the first system met.
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
