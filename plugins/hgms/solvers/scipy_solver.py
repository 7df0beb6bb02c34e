"""The iterative solvers of scipy.sparse.linalg."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from hgms_core import LinearSystem, MatVec, Outcome, Solution, component, hookimpl
from hgms_core.validators import at_least, not_negative, positive

Method = Literal[
    "bicg", "bicgstab", "cg", "cgs", "gcrotmk", "gmres", "lgmres", "minres", "qmr", "tfqmr"
]
Array = np.ndarray[Any, np.dtype[Any]]


@final
@component
class ScipySolver:
    """Solve (H + γI) v = b by any iterative solver of ``scipy.sparse.linalg``, selected by name.

    Each solver receives the operator as a ``LinearOperator`` and needs only products. H is
    symmetric, so products with Hᵀ (``bicg``, ``qmr``) are products with H.

    Use when ``cg`` and ``minres`` fail on a system, or for comparison with common solvers. Avoid on
    a GPU and for large batches. The vectors are copied to NumPy and back. The rows of a batch are
    solved separately, and each product costs as much as a product of the whole batch.

    Outcomes: CONVERGED, by the true residual, never by the method's own estimate; ITERATION_LIMIT;
    NEGATIVE_CURVATURE (``cg`` only, with the iterate before it); STAGNATED (breakdown, or no
    further progress); NONFINITE.

    Parameters
    ----------
    method
        ``cg`` for positive definite systems; ``minres`` for indefinite systems; ``gmres``,
        ``lgmres``, ``gcrotmk`` (20, 30 and 20 vectors per cycle) for any system; ``bicg``,
        ``bicgstab``, ``cgs``, ``qmr``, ``tfqmr`` use short recurrences and can break down.
    ridge
        γ ≥ 0, in the units of H.
    rtol
        Relative residual to reach, > 0.
    max_steps
        Maximum number of products (one per step; two per step for ``bicg``, ``bicgstab``, ``cgs``,
        ``qmr``).

    Notes
    -----
    Cost: the method's products, one product to check, one for a warm start. Float32 and float64
    keep their type; shorter types are converted to float32 internally. Memory: the method's.

    Source: Virtanen et al., "SciPy 1.0" (2020), and the papers that the documentation of each
    function names.

    Examples
    --------
    >>> H = torch.tensor([2.0, -1.0, 4.0], dtype=torch.float64)
    >>> solution = ScipySolver(method="gmres", rtol=1e-10).solve(
    ...     lambda v: H * v, torch.ones(3, dtype=torch.float64)
    ... )
    >>> solution.outcome.label, (1e6 * solution.value).round().div(1e6).tolist(), solution.products
    ('converged', [0.5, -1.0, 0.25], 5)
    """

    name: ClassVar[str] = "scipy"

    method: Method = "minres"
    ridge: float = field(default=0.0, validator=not_negative)
    rtol: float = field(default=1e-6, validator=positive)
    max_steps: int = field(default=100, validator=at_least(1))

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        system = LinearSystem.of(matvec, b, ridge=self.ridge, rtol=self.rtol)
        x, r = system.start(x0)
        x = x.clone()
        size = system.norm(r)
        codes = system.codes(Outcome.CONVERGED)
        steps = torch.zeros_like(codes)
        curvature = torch.full_like(size, torch.inf)
        for row in [()] if r.dim() == 1 else [(i,) for i in range(r.shape[0])]:
            if size[row] > system.target[row]:
                own = _Row(system, row, self.method, self.max_steps, stops=self.method == "cg")
                x[row], size[row], outcome = own.solve(x[row], r[row])
                codes[row] = outcome.code
                steps[row] = own.steps
                curvature[row] = own.curvature
        return system.solution(x, size, codes, steps, curvature)


class _Stop(Exception):
    """Raised in a product to end the method with the iterate of its last callback."""


@define
class _Row:
    """One system for SciPy.

    It counts products, records curvature, and stops the method if necessary: ``stops`` at
    directions without positive curvature.
    """

    system: LinearSystem
    row: tuple[int, ...]
    method: Method
    limit: int
    stops: bool
    steps: int = 0
    curvature: float = math.inf
    largest: float = 0.0
    why: Outcome | None = None
    latest: Any = None

    def solve(self, x: Tensor, r: Tensor) -> tuple[Tensor, float, Outcome]:
        """Call the method for the remaining residual r until it is small; add its results to x.

        A correction must improve the residual by more than its rounding error. Return (x, its
        residual norm, outcome).
        """
        system = self.system
        target = float(system.target[self.row])
        size = float(r.norm())
        ease = 0.9
        while True:
            before = self.steps
            tolerance = max(ease * target / size, system.precision)
            value = self.correction(r, tolerance)
            fresh = system.rhs[self.row] - self.apply(x + value)
            true = float(fresh.norm())
            is_stuck = not true <= 0.5 * size
            # after negative curvature the value is a step of descent
            is_descent = self.why is Outcome.NEGATIVE_CURVATURE
            gain = float((fresh - r).norm()) if is_descent else size - true
            error = 10 * system.precision * self.largest * float(value.norm())
            is_better = math.isfinite(true) and gain > 0 and error <= gain
            is_last = tolerance <= system.precision or self.steps == before or not is_better
            if is_better:
                x = x + value
                r = fresh
                size = true
            if size <= target:
                return x, size, Outcome.CONVERGED
            if self.why is not None:
                return x, size, self.why
            if self.steps >= self.limit:
                return x, size, Outcome.ITERATION_LIMIT
            if is_stuck and is_last:
                return x, size, Outcome.STAGNATED
            ease *= 1e-3 if is_stuck else 0.1

    def correction(self, r: Tensor, tolerance: float) -> Tensor:
        """Return the method's solution for the right-hand side r."""
        from scipy.sparse import linalg

        short = r.dtype not in (torch.float32, torch.float64)
        rhs = (r.float() if short else r).cpu().numpy()
        self.latest = np.zeros_like(rhs)
        operator = linalg.LinearOperator(
            (len(rhs), len(rhs)), matvec=self.product, rmatvec=self.product, dtype=rhs.dtype
        )
        arguments: dict[str, Any] = {
            "rtol": tolerance,
            "callback": self.note,
            **_lengths(self.method, self.limit - self.steps, len(rhs)),
        }
        if self.method != "minres":
            arguments["atol"] = 0.0
        solver: Callable[..., tuple[Array, int]] = getattr(linalg, self.method)
        value = self.latest
        try:
            with np.errstate(all="ignore"):
                value, _ = solver(operator, rhs, **arguments)
        except (_Stop, ArithmeticError, np.linalg.LinAlgError):  # stopped, or a breakdown
            value = self.latest
        return torch.from_numpy(np.array(value)).to(r)

    def note(self, x: Array) -> None:
        self.latest = np.array(x)

    def apply(self, v: Tensor) -> Tensor:
        vector = torch.zeros_like(self.system.rhs)
        vector[self.row] = v.to(vector)
        return self.system.apply(vector)[self.row]

    def product(self, v: Array) -> Array:
        v = v.reshape(-1)
        size = float(v @ v)
        if size == 0:
            return np.zeros_like(v)
        if self.steps == self.limit:
            raise _Stop
        self.steps += 1
        tensor = torch.from_numpy(v)
        product: Array = self.apply(tensor).cpu().to(tensor.dtype).numpy()
        if not np.isfinite(product).all():
            self.why = Outcome.NONFINITE
            raise _Stop
        quotient = float(v @ product) / size
        self.curvature = min(self.curvature, quotient)
        self.largest = max(self.largest, abs(quotient))
        zero = 10 * self.system.precision * self.largest
        if quotient <= zero and self.stops:
            negative = quotient < -zero
            self.why = Outcome.NEGATIVE_CURVATURE if negative else Outcome.STAGNATED
            raise _Stop
        return product


def _lengths(method: Method, limit: int, size: int) -> dict[str, Any]:
    """Return the iteration limits of a method.

    Methods with cycles return no iterate of an interrupted cycle, so their cycles are short enough
    to fit.
    """
    if method == "gmres":  # a cycle and its residual
        cycle = max(1, min(20, size, limit - 1))
        return {"restart": cycle, "maxiter": max(1, limit // (cycle + 1)), "callback_type": "x"}
    if method == "lgmres":
        cycle = max(1, min(30, size, limit))
        return {"inner_m": cycle, "maxiter": max(1, (limit + 1) // (cycle + 1))}
    if method == "gcrotmk":  # the first cycle is twice as long
        cycle = max(1, min(20, size, limit // 2))
        return {"m": cycle, "k": cycle, "maxiter": max(1, limit // (2 * cycle))}
    return {"maxiter": limit}


@hookimpl
def hgms_register_linear_solvers() -> list[type]:
    return [ScipySolver]
