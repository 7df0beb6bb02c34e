"""The iterative solvers of scipy.sparse.linalg."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from attrs import field
from torch import Tensor

from hgms.solvers.rounds import Correction, in_rounds
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

        def correct(r: Tensor, tolerance: Tensor, left: Tensor) -> Correction:
            value = torch.zeros_like(r)
            steps = torch.zeros_like(left)
            codes = torch.full_like(left, Outcome.CONVERGED.code)
            curvature = torch.full_like(tolerance, torch.inf)
            largest = torch.zeros_like(tolerance)
            for row in [()] if r.dim() == 1 else [(i,) for i in range(r.shape[0])]:
                if left[row] > 0:
                    watched = _Watched(
                        system, row, r.dtype, int(left[row]), stop_at_negative=self.method == "cg"
                    )
                    value[row] = watched.run(self.method, r[row], float(tolerance[row]))
                    steps[row], curvature[row] = watched.steps, watched.curvature
                    largest[row] = watched.largest
                    if watched.why is not None:
                        codes[row] = watched.why.code
            return Correction(
                value=value, steps=steps, codes=codes, curvature=curvature, largest=largest
            )

        return in_rounds(system, x0, self.max_steps, correct)


class _Stop(Exception):
    """Raised in a product to end the method with the iterate of its last callback."""


class _Watched:
    """One system for SciPy.

    It counts products, records curvature, and stops the method if necessary.
    """

    def __init__(
        self,
        system: LinearSystem,
        row: tuple[int, ...],
        dtype: torch.dtype,
        limit: int,
        *,
        stop_at_negative: bool,
    ) -> None:
        self.system = system
        self.row = row
        self.dtype = dtype
        self.limit = limit
        self.stop_at_negative = stop_at_negative
        self.steps = 0
        self.curvature = float("inf")
        self.largest = 0.0
        self.why: Outcome | None = None
        self.latest: Array | None = None

    def run(self, method: Method, r: Tensor, tolerance: float) -> Tensor:
        from scipy.sparse import linalg

        short = self.dtype not in (torch.float32, torch.float64)
        rhs = (r.float() if short else r).cpu().numpy()
        self.latest = np.zeros_like(rhs)
        operator = linalg.LinearOperator(
            (len(rhs), len(rhs)), matvec=self.product, rmatvec=self.product, dtype=rhs.dtype
        )
        arguments: dict[str, Any] = {
            "rtol": tolerance,
            "callback": self.note,
            **_lengths(method, self.limit, len(rhs)),
        }
        if method != "minres":
            arguments["atol"] = 0.0
        solver: Callable[..., tuple[Array, int]] = getattr(linalg, method)
        value = self.latest
        try:
            with np.errstate(all="ignore"):
                value, _ = solver(operator, rhs, **arguments)
        except (_Stop, ArithmeticError, np.linalg.LinAlgError):  # stopped, or a breakdown
            value = self.latest
        return torch.from_numpy(np.array(value)).to(r)

    def note(self, x: Array) -> None:
        self.latest = np.array(x)

    def product(self, v: Array) -> Array:
        v = v.reshape(-1)
        size = float(v @ v)
        if size == 0:
            return np.zeros_like(v)
        if self.steps == self.limit:
            raise _Stop
        self.steps += 1
        vector = torch.zeros_like(self.system.rhs)
        vector[self.row] = torch.from_numpy(v).to(vector)
        product: Array = (
            self.system.apply(vector)[self.row].cpu().to(torch.from_numpy(v).dtype).numpy()
        )
        if not np.isfinite(product).all():
            self.why = Outcome.NONFINITE
            raise _Stop
        quotient = float(v @ product) / size
        self.curvature = min(self.curvature, quotient)
        self.largest = max(self.largest, abs(quotient))
        zero = 10 * self.system.precision * self.largest
        if quotient <= zero and self.stop_at_negative:
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
