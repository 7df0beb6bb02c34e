"""The dynamic Lanczos process: a Krylov space for a matrix that changes.

Each outer step extends the space by one product.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from attrs import evolve, field
from torch import Tensor

from hgms.solvers.pcg import pcg
from hgms_core import (
    Composition,
    LinearSystem,
    MatVec,
    Outcome,
    Solution,
    Tree,
    component,
    hookimpl,
)
from hgms_core.capabilities import Capabilities, HasTestingInstance, Recycles
from hgms_core.validators import at_least, not_negative, optional_positive, positive

norm = LinearSystem.norm


@final
@component
class LancBiO:
    """(H + γI) v = b for changing H and b, by one Lanczos step per outer step.

    An epoch starts with the last v as its anchor v̄, w = (H + γI) v̄ and q_1 = (b − w)/‖b − w‖. Its
    step j uses the current H and b. It adds a column to the tridiagonal T and a vector to Q, and
    corrects the anchor::

        u = (H + γI) q_j,    α_j = q_jᵀu,    β_j q_{j+1} = u − Q Qᵀu,    v = v̄ + Q T⁻¹ Qᵀ(b − w)

    After ``restart`` steps, v is the next anchor. If H is constant, v is the iterate of conjugate
    gradients after j steps from v̄.

    Use with ``implicit`` in a method with many small outer steps, for which a rough v that follows
    its system is enough. Avoid if every outer step must meet a tolerance (``recycled-cg``), and if
    the lower level is restarted.

    Outcomes: ITERATION_LIMIT (the usual outcome: a step was completed). CONVERGED, checked with a
    product. NEGATIVE_CURVATURE: T is not positive definite, because H + γI is not, or has changed
    too much within the epoch; STAGNATED: T is singular. In both cases the v of the previous space
    is returned, and the next system starts an epoch. NONFINITE. After a step, the residual is the
    value of the recursion: exact for a constant H, and an estimate if H changed.

    Parameters
    ----------
    restart
        m, the outer steps of an epoch, ≥ 1.
    ridge, rtol, atol, clip
        As in ``cg``. Without memory, ``solve`` takes at most m steps on its single system.

    Notes
    -----
    Cost: one product per step, one more for the w of an epoch (none if v̄ = 0), so 1 + 1/m per
    system; one more if the residual seems to meet the tolerance. In addition to the products, 6·m·d
    multiply-adds per step. Memory between systems: m + 4 vectors. ``x0`` is the first anchor. N
    systems together are solved without memory, by ``cg`` with m steps, which gives the same
    iterates.

    Source: Gao, Yang and Yuan, "LancBiO: dynamic Lanczos-aided bilevel optimization via Krylov
    subspace" (2025), its algorithm with restarts. Differs in: q_{j+1} is orthogonal to all previous
    vectors, in the source only to the last two; see the README.

    Examples
    --------
    >>> H, b = (
    ...     torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64),
    ...     torch.ones(3, dtype=torch.float64),
    ... )
    >>> solver, memory = LancBiO(), {}
    >>> for _ in range(3):
    ...     solution, memory = solver.solve_from(lambda v: H * v, b, None, memory)
    ...     print(
    ...         solution.outcome.label,
    ...         solution.products,
    ...         (1e6 * solution.value).round().div(1e6).tolist(),
    ...     )
    iteration-limit 1 [0.428571, 0.428571, 0.428571]
    iteration-limit 1 [0.828571, 0.628571, 0.228571]
    converged 2 [1.0, 0.5, 0.25]
    """

    name: ClassVar[str] = "lancbio"
    capabilities: ClassVar[Capabilities] = frozenset({HasTestingInstance, Recycles})

    restart: int = field(default=10, validator=at_least(1))
    ridge: float = field(default=0.0, validator=not_negative)
    rtol: float = field(default=1e-6, validator=positive)
    atol: float = field(default=0.0, validator=not_negative)
    clip: float | None = field(default=None, validator=optional_positive)

    @classmethod
    def testing_instance(cls) -> LancBiO:
        """Return an instance for ``hgms check`` with enough steps for a solution."""
        return cls(restart=60)

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        if b.dim() > 1:
            system = LinearSystem.of(matvec, b, ridge=self.ridge, rtol=self.rtol, atol=self.atol)
            return pcg(system, x0, self.restart, self.clip)
        steps: list[Solution] = []
        memory: Tree = {}
        for _ in range(self.restart):
            solution, memory = self.solve_from(matvec, b, x0, memory)
            steps.append(solution)
            if solution.outcome is not Outcome.ITERATION_LIMIT:
                break
        return evolve(
            solution,
            iterations=torch.stack([step.iterations for step in steps]).sum(0),
            curvature=torch.stack([step.curvature for step in steps]).amin(0),
            products=sum(step.products for step in steps),
        )

    def solve_from(
        self, matvec: MatVec, b: Tensor, x0: Tensor | None, memory: Tree
    ) -> tuple[Solution, Tree]:
        """Take one step on this system, with the epoch in ``memory``.

        ``memory`` is ``{}`` before the first system.
        """
        if b.dim() > 1:
            return self.solve(matvec, b, x0), memory
        system = LinearSystem.of(matvec, b, ridge=self.ridge, rtol=self.rtol, atol=self.atol)
        if not bool(system.size > 0):  # b is zero or not finite: no information on the next
            return self._answer(
                system, system.rhs, system.size, Outcome.CONVERGED
            ), memory if not system.finite else {}
        epoch = memory if "basis" in memory else begin(system, memory.get("v", x0))
        anchor = epoch["anchor"] / system.unit
        r = system.rhs - epoch["image"] / system.unit
        if epoch is not memory and bool(norm(r) <= system.target):
            return self._answer(system, anchor, norm(r), Outcome.CONVERGED), {"v": epoch["anchor"]}
        longer, outcome = extend(system, epoch)
        curvature = longer["diagonal"][-1:]
        over = outcome is not Outcome.ITERATION_LIMIT
        correction, rest = correct(epoch if over else longer, r)
        x = anchor + correction
        size = norm(rest)
        if not over and bool(size <= system.target):
            size = norm(system.rhs - system.apply(x))
            over = True
            outcome = Outcome.CONVERGED if bool(size <= system.target) else outcome
        over = over or len(longer["diagonal"]) == self.restart or not bool(longer["beside"][-1])
        v = x * system.unit
        return self._answer(system, x, size, outcome, curvature), {"v": v} if over else {
            **longer,
            "v": v,
        }

    def _answer(
        self,
        system: LinearSystem,
        x: Tensor,
        size: Tensor,
        outcome: Outcome,
        curvature: Tensor | None = None,
    ) -> Solution:
        """Return the solution after a step, which found ``curvature``, or without a step."""
        codes = system.codes(outcome)
        unknown = torch.full_like(size, torch.inf)
        least = (
            unknown
            if curvature is None
            else torch.where(torch.isfinite(curvature[0]), curvature[0], unknown)
        )
        return system.solution(
            x, size, codes, torch.full_like(codes, curvature is not None), least, self.clip
        )


def begin(system: LinearSystem, last: Tensor | None) -> Tree:
    """Start an epoch without a step, from the last v or from zero.

    It starts from zero if zero has a smaller ½vᵀ(H + γI)v − bᵀv. For a constant H an epoch does not
    raise this value (the residual may rise).
    """
    rhs = system.rhs
    x = torch.zeros_like(rhs)
    image = torch.zeros_like(rhs)
    if last is not None and bool(last.any()):
        start = last.detach() / system.unit
        product = system.apply(start)
        if bool(start @ product <= 2 * (rhs @ start)):
            x = start
            image = product
    size = norm(rhs - image)
    q = (rhs - image) / torch.where(size > 0, size, torch.ones_like(size))
    none = rhs.new_zeros(0)
    vectors = {"anchor": x * system.unit, "image": image * system.unit, "basis": q.unsqueeze(0)}
    return {**vectors, "diagonal": none, "beside": none}


def extend(system: LinearSystem, epoch: Tree) -> tuple[Tree, Outcome]:
    """Extend the epoch by one step; return ITERATION_LIMIT if its T is usable for a solve."""
    basis = epoch["basis"]
    u = system.apply(basis[-1])
    alpha = basis[-1] @ u
    size = norm(u)
    for _ in range(2):  # a second pass removes rounding errors
        u = torch.addmv(u, basis.T, basis @ u, alpha=-1)
    beta = norm(u)
    eps = torch.finfo(u.dtype).eps
    # the space is invariant under H
    beta = torch.where(beta > 10 * eps * size, beta, torch.zeros_like(beta))
    u = u / torch.where(beta > 0, beta, torch.ones_like(beta)) * (beta > 0)
    diagonal, beside = (
        torch.cat([epoch[name], new.unsqueeze(0)])
        for name, new in (("diagonal", alpha), ("beside", beta))
    )
    longer = {
        **epoch,
        "basis": torch.cat([basis, u.unsqueeze(0)]),
        "diagonal": diagonal,
        "beside": beside,
    }
    if not bool(torch.isfinite(alpha) & torch.isfinite(size)):
        return longer, Outcome.NONFINITE
    values = torch.linalg.eigvalsh(tridiagonal(longer))
    zero = 10 * system.precision * values.abs().amax()
    if bool(values[0] < -zero):
        return longer, Outcome.NEGATIVE_CURVATURE
    return longer, Outcome.ITERATION_LIMIT if bool(values[0] > zero) else Outcome.STAGNATED


def tridiagonal(epoch: Tree) -> Tensor:
    """Build T, in float64."""
    beside = epoch["beside"][:-1].double()
    return torch.diag(epoch["diagonal"].double()) + torch.diag(beside, 1) + torch.diag(beside, -1)


def correct(epoch: Tree, r: Tensor) -> tuple[Tensor, Tensor]:
    """Compute Q T⁻¹ Qᵀr, and the residual of r.

    The residual is r − QQᵀr − β_j y_j q_{j+1} with y = T⁻¹Qᵀr.
    """
    count = len(epoch["diagonal"])
    if not count:
        return torch.zeros_like(r), r
    basis = epoch["basis"][:count]
    following = epoch["basis"][count]
    inside = basis @ r
    y = torch.linalg.solve(tridiagonal(epoch), inside.double()).to(r)
    left = torch.addmv(r, basis.T, inside, alpha=-1) - epoch["beside"][-1] * y[-1] * following
    return basis.T @ y, left


@hookimpl
def hgms_register_linear_solvers() -> list[type]:
    return [LancBiO]


LANCBIO = Composition(
    name="lancbio",
    summary=(
        "Few warm-started SGD steps and one step of a Lanczos process, which continues while "
        "the lower Hessian changes."
    ),
    source="Gao, Yang, Yuan, ICLR 2025 (arXiv 2404.03331).",
    parts={
        "generator": {
            "name": "branches",
            "count": 1,
            "steps": 5,
            "optimizer": {"name": "sgd", "lr": 0.1},
        },
        "selector": {"name": "first"},
        "hypergradient": {
            "name": "implicit",
            "solver": {"name": "lancbio", "restart": 10, "ridge": 2e-2},
        },
        "outer": {"name": "sgd", "lr": 0.1},
        "max_curvature": 15.0,  # 1.5 / lr
    },
)


@hookimpl
def hgms_register_methods() -> list[Composition]:
    return [LANCBIO]
