"""Checks of linear solvers: (H + ridge·I) v = b from products, for every kind of H.

The reported residual and outcome must be correct.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hgms.facts import settings_of
from hgms.testing import oracle
from hgms.testing.kit import (
    F64,
    ask_if,
    ask_of_field,
    demand,
    demand_equal,
    fail,
    has,
    normal,
    numbers,
    place,
    show,
    with_fields,
)
from hgms_core import Key, LinearSolver, Outcome, Solution
from hgms_core.capabilities import Randomized, find

SIZE = 24


def exercise(solver: Any, dtype: torch.dtype, variant: int) -> tuple[Any, Callable[[], Any]]:
    h = matrix(0.5, 1.5, seed=variant).to(dtype)
    b = normal(SIZE, seed=10 + variant, dtype=dtype)
    start = 0.1 * normal(SIZE, seed=20, dtype=dtype)

    def call() -> Any:
        return {
            "cold": solver.solve(lambda v: v @ h, b, None),
            "warm": solver.solve(lambda v: v @ h, b, start),
        }

    return {"b": b, "x0": start}, call


def eye() -> Tensor:
    return torch.eye(SIZE, dtype=F64, device=place())


class Operator:
    """H as a product with vectors that counts its calls.

    Each row of a stack is a separate system.
    """

    def __init__(self, h: Tensor) -> None:
        self.h = h
        self.calls = 0

    def __call__(self, v: Tensor) -> Tensor:
        self.calls += 1
        return (v.unsqueeze(-2) @ self.h).squeeze(-2)


def matrix(low: float, high: float, seed: int = 0, zeros: int = 0) -> Tensor:
    """Return a symmetric matrix in a random basis.

    The eigenvalues are log-spaced from ``low`` to ``high``, and ``zeros`` eigenvalues are 0.
    """
    basis = torch.linalg.qr(normal(SIZE, SIZE, seed=seed)).Q
    values = torch.logspace(math.log10(low), math.log10(high), SIZE, dtype=F64, device=place())
    values[:zeros] = 0.0
    return basis * values @ basis.T


def solve(solver: Any, h: Tensor, b: Tensor, x0: Tensor | None = None) -> Solution:
    """Return the solution after checks of its shapes, finiteness, residual and outcome."""
    answer: Solution = with_fields(solver, clip=None).solve(Operator(h), b, x0)
    demand(
        isinstance(answer, Solution),
        f"solve returns {type(answer).__name__}; return a hgms_core.Solution",
    )
    demand(
        answer.value.shape == b.shape,
        f"the value has the shape {list(answer.value.shape)}, b has {list(b.shape)}",
    )
    for name in ("codes", "residual", "iterations", "curvature"):
        shape = getattr(answer, name).shape
        demand(
            shape == b.shape[:-1],
            f"{name} has the shape {list(shape)}; one number per system is {list(b.shape[:-1])}",
        )
    demand(torch.isfinite(answer.value).all(), f"the value is not finite: {show(answer.value)}")
    ridge = ridge_of(solver)
    true = _residual(h, b, answer.value, ridge)
    if _far(answer.residual, true).any():
        # The usual cause of a wrong residual: v solves a similar system.
        near = {
            "; −v has it: the sign is wrong": _residual(h, b, -answer.value, ridge),
            "; ‖b − H·v‖/‖b‖ is; the ridge is missing": _residual(h, b, answer.value, 0.0),
        }
        likely = next(
            (why for why, residual in near.items() if not _far(residual, answer.residual).any()), ""
        )
        fail(
            f"it claims the residual {show(answer.residual)}, ‖b − (H + {ridge:g}·I)v‖/‖b‖ is "
            f"{show(true)}{likely}"
        )
    wrong = answer.converged & (true > 1.001 * _tolerance(solver) + 1e-9)
    demand(
        not wrong.any(),
        f"it says converged with a residual of {show(true)}; its rtol is {_tolerance(solver):g}",
    )
    return answer


def _residual(h: Tensor, b: Tensor, v: Tensor, ridge: float) -> Tensor:
    """Return ‖b − (H + ridge·I)v‖/‖b‖ of every system; ‖v‖ if b = 0."""
    left: Tensor = torch.linalg.vector_norm(b - Operator(h)(v) - ridge * v, dim=-1)
    size: Tensor = torch.linalg.vector_norm(b, dim=-1)
    return left / torch.where(size > 0, size, torch.ones_like(size))


def _far(claimed: Tensor, true: Tensor) -> Tensor:
    return (true - claimed).abs() > 1e-6 + 1e-3 * true


def ridge_of(solver: Any) -> float:
    return float(settings_of(solver).get("ridge", 0.0))


def _off(v: Tensor, exact: Tensor) -> float:
    """Return ‖v − exact‖/‖exact‖."""
    return float((v - exact).norm() / exact.norm())


def _tolerance(solver: Any) -> float:
    return float(settings_of(solver).get("rtol", 1e-2))


def check_residual(solver: Any) -> None:
    """On positive definite systems of condition 1 to 1e4 the reported residual is correct.
    `converged` means at most `rtol`, for each system separately.
    """
    for condition in (1.0, 1e2, 1e4):
        solve(solver, matrix(condition**-0.5, condition**0.5, seed=1), normal(SIZE, seed=2))
    solve(
        with_fields(solver, max_steps=2),
        torch.stack([eye(), matrix(1e-2, 1e2, seed=1)]),
        normal(2, SIZE, seed=3),
    )


def check_dense_solve(solver: Any) -> None:
    """A system with eigenvalues from 0.5 to 1.5 converges, and v agrees with a dense solve."""
    h = matrix(0.5, 1.5, seed=3)
    b = normal(SIZE, seed=4)
    answer = solve(solver, h, b)
    demand(
        answer.converged.all(),
        f"it did not converge: outcome {answer.outcome.label}, residual {show(answer.residual)}; "
        "if it requires more steps, increase them in testing_instance()",
    )
    error = _off(answer.value, torch.linalg.solve(h + ridge_of(solver) * eye(), b))
    allowed = 6 * _tolerance(solver) + 1e-9
    demand(
        error <= allowed,
        f"v is off by {error:.1e} of its length from the dense solution (allowed: {allowed:.1e})",
    )


def check_ridge(solver: Any) -> None:
    """The field `ridge` is added to H: the solution is (H + ridge·I)⁻¹ b."""
    ask_of_field(solver, "ridge")
    solve(with_fields(solver, ridge=0.4), matrix(0.5, 1.1, seed=5), normal(SIZE, seed=6))


def check_identity(solver: Any) -> None:
    """With H = I the solution is a multiple of b: b/(1 + ridge) if it converged. A division by a
    residual of 0 does not end the solve as `nonfinite`.
    """
    b = normal(SIZE, seed=7)
    answer = solve(solver, eye(), b)
    _demand_finite(answer)
    across = answer.value - (answer.value @ b) / (b @ b) * b
    demand(
        across.norm() <= 1e-8 * b.norm(),
        f"v has a part of length {float(across.norm()):.1e} across b",
    )


def _demand_finite(answer: Solution) -> None:
    demand(
        not (answer.codes == Outcome.NONFINITE.code).any(),
        "the outcome is nonfinite, but b and all products are finite; guard denominators that are "
        "0 when the residual is 0",
    )


def check_zero_rhs(solver: Any) -> None:
    """b = 0 gives v = 0 with residual 0, in a single system and in a stack with another system. The
    outcome is not `nonfinite`.
    """
    h = matrix(0.5, 1.5, seed=8)
    zero = torch.zeros(SIZE, dtype=F64, device=place())
    alone = solve(solver, h, zero)
    demand(
        not alone.value.any() and not alone.residual.any(),
        f"v = {show(alone.value)}, residual {show(alone.residual)}",
    )
    _demand_finite(alone)
    beside = solve(solver, h.expand(2, SIZE, SIZE), torch.stack([zero, normal(SIZE, seed=9)]))
    demand(not beside.value[0].any(), f"in a batch with another system v = {show(beside.value[0])}")


def check_singular(solver: Any) -> None:
    """For a singular H with b in its range, the solution is finite and its residual correct. If
    it converged, it is the solution of least norm.
    """
    h = matrix(0.5, 1.5, seed=10, zeros=6)
    b = h @ normal(SIZE, seed=11)
    plain = with_fields(solver, ridge=0.0)
    answer = solve(plain, h, b)
    if answer.converged.all() and not ridge_of(plain):
        error = _off(answer.value, torch.linalg.pinv(h, rtol=1e-9) @ b)
        demand(
            error <= 6 * _tolerance(solver) + 1e-8,
            f"v is off by {error:.1e} of its length from H⁺b",
        )


def check_indefinite(solver: Any) -> None:
    """An indefinite H raises no error: the value is finite and the residual correct. `converged`
    is reported only if it is true.
    """
    solve(
        with_fields(solver, ridge=0.0),
        matrix(0.5, 1.5, seed=12) - 0.9 * eye(),
        normal(SIZE, seed=13),
    )


def check_nonfinite(solver: Any) -> None:
    """A product or right-hand side that is not finite gives a finite value and the outcome
    `nonfinite`, never an error. This applies to a single system and to a stack with a valid
    system, which is still solved.
    """
    h = matrix(0.5, 1.5, seed=14)
    b = normal(SIZE, seed=15)
    broken = b.index_fill(0, numbers([3], torch.int64), math.nan)
    factors = torch.stack([torch.ones_like(b), torch.full_like(b, math.nan)])
    bad = [Outcome.NONFINITE]
    second = [solver.solve(Operator(h), b, None).outcome, Outcome.NONFINITE]
    for what, matvec, rhs, wanted in (
        ("NaN products", lambda v: v * math.nan, b, bad),
        ("infinite products", lambda v: v * math.inf, b, bad),
        ("a NaN in b", Operator(h), broken, bad),
        (
            "NaN products of the second system",
            lambda v: v @ h * factors,
            torch.stack([b, b]),
            second,
        ),
        ("a NaN in the second b", lambda v: v @ h, torch.stack([b, broken]), second),
    ):
        answer: Solution = solver.solve(matvec, rhs, None)
        came = [list(Outcome)[code] for code in answer.codes.reshape(-1).tolist()]
        demand(torch.isfinite(answer.value).all(), f"with {what} the value is {show(answer.value)}")
        demand(
            came == wanted,
            f"with {what} the outcomes are {[outcome.label for outcome in came]}, not "
            f"{[outcome.label for outcome in wanted]}",
        )


def check_iteration_limit(solver: Any) -> None:
    """If one iteration is not enough, the outcome is not `converged`, and no error is raised. v
    is no worse than 0.
    """
    short = with_fields(solver, max_steps=1)
    answer = solve(short, matrix(0.1, 1.5, seed=16), normal(SIZE, seed=17))
    if has(solver, "max_steps"):
        demand(
            int(answer.iterations) <= 1,
            f"with max_steps = 1 it took {int(answer.iterations)} iterations",
        )
        demand(
            float(answer.residual) <= 1 + 1e-9,
            f"the residual {float(answer.residual):.3g} is larger than that of v = 0",
        )


def check_warm_start(solver: Any) -> None:
    """A start at the solution is used: the iterations and the residual do not exceed the values
    of a start at zero.
    """
    h = matrix(0.5, 1.5, seed=18)
    b = normal(SIZE, seed=19)
    exact = torch.linalg.solve(h + ridge_of(solver) * eye(), b)
    cold = solve(solver, h, b)
    warm = solve(solver, h, b, exact)
    residuals = f"{float(warm.residual):.1e}, from zero with {float(cold.residual):.1e}"
    close = float(warm.residual) <= max(float(cold.residual), _tolerance(solver)) * (1 + 1e-9)
    demand(close, f"from the solution it ends with the residual {residuals}")
    counts = int(warm.iterations), int(cold.iterations)
    demand(
        counts[0] <= counts[1],
        f"from the solution it takes {counts[0]} iterations, from zero {counts[1]}",
    )


def check_batch(solver: Any) -> None:
    """Rows are separate systems: three operators solved together have the same solutions as
    separately.
    """
    h = torch.stack(
        [matrix(0.5, 1.5, seed=20), matrix(0.8, 1.0, seed=21), matrix(0.5, 0.9, seed=22)]
    )
    b = normal(3, SIZE, seed=23) * numbers([[1.0], [100.0], [0.01]])
    together = solve(solver, h, b)
    for i in range(3):
        alone = solve(solver, h[i], b[i])
        gap = _off(together.value[i], alone.value)
        allowed = 1e-8 + 4 * (float(together.residual[i]) + float(alone.residual)) * (
            together.converged[i] & alone.converged
        )
        demand(
            gap <= allowed,
            f"system {i} differs by {gap:.1e} of its length from what it gives alone",
        )


def check_scaling(solver: Any) -> None:
    """The solution is linear in b: if b is scaled by 1e-30 or 1e30, v is scaled by the same
    factor.
    """
    h = matrix(0.5, 1.5, seed=24)
    b = normal(SIZE, seed=25)
    plain = with_fields(solver, atol=0.0)
    unscaled = solve(plain, h, b).value
    for factor in (1e-30, 1e30):
        gap = _off(solve(plain, h, factor * b).value / factor, unscaled)
        demand(
            gap <= 1e-6,
            (
                f"for {factor:g}·b it gives a v that is off by {gap:.1e} from {factor:g} times "
                "that for b"
            ),
        )


def check_products(solver: Any) -> None:
    """`Solution.products` is the number of calls of the operator. On an accelerator, calls that
    change no result do not count.
    """
    h = Operator(matrix(0.5, 1.5, seed=26))
    products = solver.solve(h, normal(SIZE, seed=27), None).products
    fits = products == h.calls if place().type == "cpu" else 0 < products <= h.calls
    demand(fits, f"it says {products} products and made {h.calls}")


def check_iterations(solver: Any) -> None:
    """`Solution.iterations` counts the steps: at most the number of products. If `max_steps`
    limits the steps, there is at least one step towards a solution, and a larger limit does not
    reduce the count.
    """
    h = matrix(0.5, 1.5, seed=30)
    b = normal(SIZE, seed=31)
    counted = []
    limits = (2, 5) if has(solver, "max_steps") else ()
    for limited in (*(with_fields(solver, max_steps=limit) for limit in limits), solver):
        products = Operator(h)
        answer = limited.solve(products, b, None)
        counted.append(int(answer.iterations))
        demand(
            counted[-1] <= products.calls,
            f"it says {counted[-1]} iterations and made {products.calls} products",
        )
        demand(
            not limits or not products.calls or counted[-1] > 0 or not bool(answer.value.any()),
            (
                f"it says {counted[-1]} iterations, made {products.calls} products and moved "
                f"from 0 to {show(answer.value)}"
            ),
        )
    allowed = all(count <= limit for count, limit in zip(counted, limits, strict=False))
    demand(
        allowed and counted == sorted(counted),
        f"with max_steps {[*limits, 'as it is']} it says {counted} iterations",
    )


def check_curvature(solver: Any) -> None:
    """`Solution.curvature` is a Rayleigh quotient of H + ridge·I, between its lowest and highest
    eigenvalue. It is infinite if the solver computed no quotient.
    """
    ridge = ridge_of(solver)
    for low, high, shift in ((0.7, 0.7, 0.0), (0.5, 1.5, 0.0), (0.5, 1.5, 0.9)):
        h = matrix(low, high, seed=32) - shift * eye()
        came = float(solve(solver, h, normal(SIZE, seed=33)).curvature)
        ends = low - shift + ridge, high - shift + ridge
        inside = came == math.inf or ends[0] - 1e-6 <= came <= ends[1] + 1e-6
        demand(
            inside,
            (
                f"it says {came:.6g}, the eigenvalues of H + ridge·I are from {ends[0]:.6g} to "
                f"{ends[1]:.6g}"
            ),
        )


def check_clip(solver: Any) -> None:
    """The field `clip` bounds the length of v."""
    ask_of_field(solver, "clip")
    h = Operator(matrix(0.5, 1.5, seed=28))
    size = float(with_fields(solver, clip=0.1).solve(h, normal(SIZE, seed=29), None).value.norm())
    demand(size <= 0.1 * (1 + 1e-9), f"with clip = 0.1 the value has the length {size:.3g}")


def check_key(solver: Any) -> None:
    """If the solver declares `Randomized`, `with_key(key)` returns a solver with random numbers
    from the key: the same solution for the same key, other numbers for another key.
    """
    randomized = find(solver, Randomized)
    ask_if(randomized, "it does not declare Randomized")
    assert randomized is not None
    h = Operator(matrix(0.5, 1.5, seed=34))
    b = normal(SIZE, seed=35)
    key = Key(9)
    keyed = [randomized.with_key(own) for own in (key, key, key.fold("another"))]
    kinds = {type(other).__name__ for other in keyed if not isinstance(other, LinearSolver)}
    demand(not kinds, f"with_key returns {', '.join(kinds)}; return a solver")
    (drawn, first), (_, again), (others, _) = (
        oracle.record_draws(other.solve, h, b, None) for other in keyed
    )
    demand_equal(
        first.value, again.value, "solved again with the same key,", "; draw from the key alone"
    )
    demand(
        not oracle.same_draws(drawn, others),
        f"with two keys it draws the same {len(drawn)} tensors of random numbers",
    )
