"""Tools for linear solvers: a counted operator with the ridge, a safe start, a checked result.

A solver that uses :class:`LinearSystem` meets the contract of :class:`hgms_core.LinearSolver`:

- It does not change its inputs.
- It treats a batch as rows.
- It returns only finite values.
- Its residual belongs to the value before clipping.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor

from hgms_core.arguments import check_function, check_part, kind_of
from hgms_core.errors import ConfigError
from hgms_core.protocols import MatVec
from hgms_core.records import Outcome, Solution


@frozen(eq=False)
class Inexact:
    """Products with a relative error of about ``noise``, such as differences of gradients.

    :class:`LinearSystem` reads ``noise`` of any operator that has it. A solver then does not treat
    the error of a product as curvature.

    Examples
    --------
    >>> product = Inexact(lambda v: 2 * v, noise=1e-3)
    >>> product(torch.ones(1)), LinearSystem.of(product, torch.ones(1)).precision
    (tensor([2.]), 0.001)
    """

    matvec: MatVec
    noise: float

    @classmethod
    def difference(cls, matvec: MatVec, dtype: torch.dtype) -> Inexact:
        """Return products by differences of gradients in ``dtype``.

        Their relative error is about ε^(2/3); √ε/10 is an upper bound.
        """
        return cls(matvec, torch.finfo(dtype).eps ** 0.5 / 10)

    def __call__(self, v: Tensor) -> Tensor:
        return self.matvec(v)


@define(eq=False)
class LinearSystem:
    """(H + ridge·I) v = b with b scaled to a largest entry of 1. The scaling prevents overflow and
    underflow of squares.

    - ``rhs``: the scaled b, per system (zero if b is not finite).
    - ``size``: the norm of ``rhs``, per system.
    - ``target``: the residual norm to reach, per system.
    - ``products``: the number of calls of the operator.
    - ``unit``: the unit of vectors in the scaled system.
    - ``precision``: the relative error of a product. It is the machine precision, or the ``noise``
      of the operator. Curvature below ten times this share of the largest curvature counts as zero.

    Raises
    ------
    ConfigError
        If b is complex, of integers, or empty.

    Examples
    --------
    >>> system = LinearSystem.of(lambda v: 2 * v, torch.tensor([3.0, 6.0]), ridge=1.0)
    >>> system.rhs, system.apply(system.rhs), system.products
    (tensor([0.5000, 1.0000]), tensor([1.5000, 3.0000]), 1)
    """

    matvec: MatVec
    ridge: float
    rhs: Tensor
    unit: Tensor
    size: Tensor
    target: Tensor
    finite: Tensor
    precision: float
    products: int | Tensor = 0

    @staticmethod
    def dot(a: Tensor, b: Tensor) -> Tensor:
        """aᵀb, per system."""
        product: Tensor = torch.linalg.vecdot(a, b)
        return product

    @staticmethod
    def norm(a: Tensor) -> Tensor:
        """‖a‖, per system."""
        length: Tensor = torch.linalg.vector_norm(a, dim=-1)
        return length

    @staticmethod
    def rows(scalars: Tensor) -> Tensor:
        """Add an axis to one number per system, to multiply the vectors of the systems."""
        return scalars.unsqueeze(-1)

    @staticmethod
    def pick(which: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Return ``first`` for the systems in the mask ``which``, ``second`` for other systems.

        For a single system on a CPU, it returns ``first`` or ``second`` without a copy. Reading
        ``which`` is fast there, because no device must finish first.
        """
        # a traced mask has no value
        if which.dim() == 0 and which.device.type == "cpu" and type(which) is Tensor:
            return first if which else second
        return torch.where(which.unsqueeze(-1), first, second)

    @classmethod
    def of(
        cls, matvec: MatVec, b: Tensor, *, ridge: float = 0.0, rtol: float = 0.0, atol: float = 0.0
    ) -> LinearSystem:
        check_real(b)
        b = b.detach()
        finite = torch.isfinite(b).all(-1)
        b = torch.where(cls.rows(finite), b, torch.zeros_like(b))
        largest = torch.linalg.vector_norm(b, ord=torch.inf, dim=-1, keepdim=True)
        unit = torch.where(largest > 0, largest, torch.ones_like(largest))
        rhs = b / unit
        size = cls.norm(rhs)
        target = rtol * size if atol <= 0 else torch.maximum(rtol * size, atol / unit.squeeze(-1))
        precision = max(torch.finfo(b.dtype).eps, getattr(matvec, "noise", 0.0))
        return cls(matvec, ridge, rhs, unit, size, target, finite, precision)

    def apply(self, v: Tensor) -> Tensor:
        """Return (H + ridge·I) v. Cost: one product."""
        self.products += 1
        product = self.matvec(v).detach()
        return torch.add(product, v, alpha=self.ridge) if self.ridge else product

    def start(self, x0: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the first iterate and its residual: ``x0`` (one product) or zero (no product).

        A system also starts from zero if its ``x0`` is worse than zero or not finite.
        """
        zero = torch.zeros_like(self.rhs)
        if x0 is None:
            return zero, self.rhs
        x = x0.detach() / self.unit
        residual = self.rhs - self.apply(x)
        helps = self.rows(self.norm(residual) <= self.size)
        return torch.where(helps, x, zero), torch.where(helps, residual, self.rhs)

    def codes(self, outcome: Outcome) -> Tensor:
        """Return the code of ``outcome`` per system, or NONFINITE if its b is not finite."""
        return torch.full_like(self.finite, outcome.code, dtype=torch.int64).masked_fill(
            ~self.finite, Outcome.NONFINITE.code
        )

    def solution(
        self,
        x: Tensor,
        residual: Tensor,
        codes: Tensor,
        iterations: Tensor,
        curvature: Tensor,
        clip: float | None = None,
    ) -> Solution:
        """Return the result in the units of b, from the scaled iterate and its residual norm.

        ``clip`` is the radius of a ball onto which the value is projected.
        """
        value = x * self.unit
        usable = torch.isfinite(value).all(-1) & torch.isfinite(residual)
        value = torch.where(self.rows(usable), value, torch.zeros_like(value))
        codes = codes.masked_fill(~usable, Outcome.NONFINITE.code)
        size = torch.where(self.size > 0, self.size, torch.ones_like(self.size))
        residual = torch.where(usable, residual, self.size) / size
        residual = torch.where(self.finite, residual, torch.ones_like(residual))
        if clip is not None:
            length = self.norm(value)
            value = value * self.rows(
                torch.where(length > clip, clip / length, torch.ones_like(length))
            )
        return Solution(
            value=value,
            codes=codes,
            residual=residual,
            iterations=iterations,
            curvature=curvature,
            products=self.products,
        )


def check_real(b: Tensor) -> None:
    """Require a right-hand side of real floating-point numbers, else raise ConfigError."""
    if not b.is_floating_point():
        raise ConfigError(
            "wrong-dtype",
            f"b has dtype {str(b.dtype).removeprefix('torch.')}, but linear solvers require real "
            "floating-point numbers",
            place=("b",),
            hint="solve for the real and the imaginary parts together" if b.is_complex() else None,
        )
    if b.shape[-1:] == (0,):
        raise ConfigError("wrong-shape", "b contains no number", place=("b",))


def is_solver(value: object) -> bool:
    """Return whether a value has ``solve``; other callables are plain functions."""
    return hasattr(value, "solve")


def as_solver(solver: Any) -> Any:
    """Return the solver, or a LinearSolver for a plain callable ``solve(matvec, b) -> x``."""
    if isinstance(solver, str | type) or not (is_solver(solver) or callable(solver)):
        check_part(("solver",), solver, "a linear solver", ["solve"])
    if is_solver(solver):
        check_function("solve", solver.solve, "matvec", "b", "x0")
        return solver
    check_function("solver", solver, "matvec", "b")
    return CallableSolver(solver)


@frozen
class CallableSolver:
    """Any function ``solve(matvec, b) -> x`` as a LinearSolver. TorchOpt, JAXopt and wrappers of
    SciPy use this convention.

    The function does not report its outcome. One more product therefore checks its result:
    converged means a relative residual of at most ``rtol``.

    Examples
    --------
    >>> solver = CallableSolver(lambda matvec, b: b / 2)
    >>> solver.solve(lambda v: 2 * v, torch.ones(3)).outcome.label
    'converged'
    """

    function: Callable[[MatVec, Tensor], Tensor]
    rtol: float = 1e-4
    name = "callable"

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        system = LinearSystem.of(matvec, b, rtol=self.rtol)
        returned: Any = self.function(system.apply, b)
        if not isinstance(returned, Tensor) or returned.shape != b.shape:
            shape = list(returned.shape) if isinstance(returned, Tensor) else kind_of(returned)
            raise ConfigError(
                "wrong-result",
                f"solver must return a tensor of shape {list(b.shape)}, like b, not {shape}",
                place=("solver",),
            )
        iterations = torch.full_like(system.size, int(system.products), dtype=torch.int64)
        x = returned.detach() / system.unit
        residual = system.norm(system.rhs - system.apply(x))
        converged = residual <= system.target
        codes = torch.where(
            converged, system.codes(Outcome.CONVERGED), system.codes(Outcome.ITERATION_LIMIT)
        )
        unknown = torch.full_like(residual, torch.inf)
        return system.solution(x, residual, codes, iterations, unknown)
