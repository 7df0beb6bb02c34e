"""Compare the implicit hypergradient with finite differences, in float64.

The differences re-solve the lower level.

At a point θ the lower level is solved to high accuracy: by the closed form of the task, else by
L-BFGS and Newton's method from x0. At the solution, with H = ∇²_xx g and without truncation or
regularisation::

    h = ∇_θ f − ∇²_θx g v,  v = H⁺ ∇_x f  against  (F(θ + εu) − F(θ − εu)) / 2ε,  F(θ) = f(θ, x*(θ))

F is followed from x*(θ): each difference re-solves the lower level from this start. A comparison is
meaningless if the lower level was not solved, has no unique solution or has a kink at its solution.
The report then contains the reason instead of a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from hgms_core import (
    ConfigError,
    Key,
    Problem,
    Ravel,
    Tree,
    cross_product,
    curvature,
    upper_gradients,
)
from hgms_core.capabilities import HasClosedForm, find

LARGEST = 3_000
"""The maximum number of lower variables: H is dense and factored. Larger problems are rejected."""
STATIONARY = 1e-8
"""‖∇_x g‖ / (1 + |g|) at which the lower level counts as solved; Newton's method usually reaches
1e-13.
"""
FLAT = 1e-7
"""Eigenvalues of H below this share of the largest count as 0: directions along the manifold of
minimisers.
"""
ACROSS = 1e-6
"""The share of ‖∇_x f‖ along flat directions up to which the slope counts as zero."""
MISMATCH = "MISMATCH"
"""The verdict of a comparison that differs by more than the tolerance."""


class Unsolved(Exception):
    """The reason why the lower level cannot be used for a comparison."""


@frozen
class Row:
    """One direction at one point.

    ``error`` is the difference over the larger of |finite difference| and ‖h‖/√dim θ.
    """

    point: int
    direction: str
    hypergradient: float
    difference: float
    error: float
    verdict: str


@frozen
class Report:
    """All comparisons, notes about them, and the verdict as a sentence."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    verdict: str
    agrees: bool


@frozen
class _Level:
    """The lower level at one θ, on flat vectors."""

    problem: Problem
    theta: Tree
    spec: Ravel

    def value(self, x: Tensor) -> Tensor:
        return self.problem.g(self.theta, self.spec.unravel(x), self.problem.lower_data.batch(None))

    def slope(self, x: Tensor) -> tuple[float, Tensor]:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            value = self.value(leaf)
            (gradient,) = torch.autograd.grad(value, leaf, materialize_grads=True)
        return float(value.detach()), gradient

    def products(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function v ↦ H v."""
        return curvature(
            lambda tree: self.value(self.spec.ravel(tree)), self.spec.unravel(x)
        ).matvec

    def hessian(self, x: Tensor) -> _Eigen:
        rows = torch.stack([*map(self.products(x), torch.eye(len(x), dtype=x.dtype))])
        values, vectors = torch.linalg.eigh(0.5 * (rows + rows.T))
        return _Eigen(
            values,
            vectors,
            values.abs() <= FLAT * values.abs().max().clamp_min(torch.finfo(values.dtype).tiny),
        )

    def solve(self, start: Tensor, far: bool) -> Tensor:
        """Return a minimiser near ``start``.

        If it may be far, L-BFGS runs first. Newton steps within the curved directions follow.
        """
        x = self._descend(start) if far else start
        value, gradient = self.slope(x)
        for _ in range(50):
            size = float(gradient.norm())
            if size <= 1e-14 * (1 + abs(value)):
                break
            step = self.hessian(x).solve(gradient, torch.abs)
            moved = [
                (x - length * step, *self.slope(x - length * step)) for length in (1.0, 0.5, 0.1)
            ]
            after, value_after, gradient_after = min(
                moved, key=lambda trial: float(trial[2].norm())
            )
            if not float(gradient_after.norm()) < size:
                break
            x = after
            value = value_after
            gradient = gradient_after
        size = float(gradient.norm()) / (1 + abs(value))
        if not size <= STATIONARY:
            raise Unsolved(
                f"the lower level was not solved: ‖∇_x g‖ = {size:.1e} (1 + |g|) is left. It may "
                "have a kink at its minimiser, "
                "no minimiser, or be too flat; a penalty or a smooth activation helps"
            )
        return x

    def _descend(self, start: Tensor) -> Tensor:
        from scipy.optimize import minimize

        def both(x: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = self.slope(torch.from_numpy(x).to(start.dtype))
            return value, gradient.numpy()

        options = {"maxiter": 5_000, "maxfun": 10_000, "maxcor": 50, "gtol": 1e-9, "ftol": 1e-16}
        minimum = minimize(both, start.numpy(), jac=True, method="L-BFGS-B", options=options)
        return torch.from_numpy(minimum.x)


@frozen
class _Eigen:
    """The eigenvalues and eigenvectors of H, and the flat directions."""

    values: Tensor
    vectors: Tensor
    flat: Tensor

    def solve(self, b: Tensor, of: Callable[[Tensor], Tensor] = lambda values: values) -> Tensor:
        """Return H⁺b; with ``of`` = abs, |H|⁺b, a descent direction."""
        parts = self.vectors.T @ b / torch.where(self.flat, 1.0, of(self.values))
        return self.vectors @ torch.where(self.flat, 0.0, parts)


@frozen
class _Point:
    """The lower level at a θ, its solution x, and the closed form of the solution, if any."""

    level: _Level
    x: Tensor
    exact: Any

    @classmethod
    def at(cls, problem: Problem, theta: Tree, exact: Any) -> _Point:
        spec = Ravel.of(problem.x0)
        level = _Level(problem, theta, spec)
        if exact is None:
            return cls(level, level.solve(spec.ravel(problem.x0), far=True), None)
        x = spec.ravel(exact.solution(theta))
        value, gradient = level.slope(x)
        if not float(gradient.norm()) <= 1e-6 * (1 + abs(value)):
            raise Unsolved(
                "the closed form's solution does not solve the lower level: ‖∇_x g‖ = "
                f"{float(gradient.norm()):.1e}"
            )
        return cls(level, x, exact)

    def value(self, theta: Tree) -> float:
        """Return F(θ') at a θ' near θ; the lower level is solved from x."""
        problem = self.level.problem
        spec = self.level.spec
        if self.exact is not None:
            x = self.exact.solution(theta)
        else:
            x = spec.unravel(_Level(problem, theta, spec).solve(self.x, far=False))
        return float(problem.f(theta, x, problem.upper_data["differentiate"].batch(None)))

    def hypergradient(self) -> tuple[Tree, int]:
        """Return h and the number of flat directions.

        If f has no slope along the flat directions, the choice of the minimiser has no effect to
        first order: steps along them do not change f. An example is the bias of a softmax without a
        penalty.

        Raises
        ------
        Unsolved
            If x is not an isolated minimiser and not known to be the best minimiser.
        """
        problem = self.level.problem
        theta = self.level.theta
        spec = self.level.spec
        above = problem.upper_data["differentiate"].batch(None)
        below = problem.lower_data.batch(None)
        x = spec.unravel(self.x)
        _, direct, slope = upper_gradients(lambda t, y: problem.f(t, y, above), theta, x)
        rhs = spec.ravel(slope)
        hessian = self.level.hessian(self.x)
        flat = int(hessian.flat.sum())
        largest = hessian.values.abs().max()
        if float(hessian.values.min()) < -FLAT * float(largest):
            raise Unsolved(
                "the lower level's Hessian has a negative eigenvalue at the solution: it is a "
                "saddle, not a minimiser"
            )
        along = float((hessian.vectors.T @ rhs)[hessian.flat].norm() / rhs.norm().clamp_min(1e-300))
        if flat and self.exact is None and along > ACROSS:
            raise Unsolved(
                f"the lower solution is not unique ({_count(flat)} of {len(rhs)}), and f has a "
                "slope along them "
                f"({along:.0e} of ‖∇_x f‖): the formula holds at the best one only, which is not "
                "known. A penalty in g makes it unique"
            )
        mixed = cross_product(
            lambda t, y: problem.g(t, y, below), theta, x, spec.unravel(hessian.solve(rhs))
        )
        return {name: direct[name] - mixed[name] for name in direct}, flat

    def kink(self) -> float:
        """Return the relative deviation of gradient changes of g from its Hessian.

        The steps have the same size as the steps of the differences.
        """
        v = torch.randn(len(self.x), generator=Key(0).fold("kink").generator(), dtype=self.x.dtype)
        step = 1e-5 * (1 + self.x.norm()) / v.norm()
        change = (
            self.level.slope(self.x + step * v)[1] - self.level.slope(self.x - step * v)[1]
        ) / (2 * step)
        product = self.level.products(self.x)(v)
        return float((change - product).norm() / product.norm().clamp_min(1e-30))


def check_task(task: Any, *, seed: int = 0, **options: Any) -> Report:
    """Return the report for a problem of a task, on the CPU in float64.

    A closed form is used if the task has one. The options are those of :func:`check_problem`.
    """
    setting = seed, torch.device("cpu"), torch.float64
    known = find(task, HasClosedForm)
    exact = None if known is None else known.closed_form(*setting)
    return check_problem(task.problem(*setting), exact, seed=seed, **options)


def check_problem(
    problem: Problem,
    exact: Any = None,
    *,
    seed: int = 0,
    points: int = 3,
    directions: int = 5,
    tolerance: float = 1e-4,
) -> Report:
    """Compare at θ0 and at points around it.

    ``exact`` has ``solution(theta)`` and optionally ``hypergradient(theta)``.

    Raises
    ------
    ConfigError
        For a problem of more than 3,000 lower variables.
    """
    size = Ravel.of(problem.x0).size
    if size > LARGEST:
        raise ConfigError(
            "too-large",
            f"the lower level has {size} variables, but the dense Hessian of the check requires at "
            f"most {LARGEST}",
            place=("task",),
            hint="decrease the size of the task with --set task.FIELD=VALUE",
        )
    rows: list[Row] = []
    notes: list[str] = []
    bad = 0
    for number, theta in enumerate(_points(problem, Key(seed).fold("check-gradient"), points)):
        try:
            point = _Point.at(problem, theta, exact)
            formula, flat = point.hypergradient()
            new = list(
                _compare(
                    point,
                    formula,
                    number,
                    directions,
                    Key(seed).fold("directions", number),
                    tolerance,
                )
            )
        except Unsolved as why:
            notes.append(f"point {number}: not checked: {why}")
            continue
        rows += new
        if flat and exact is None:
            notes.append(
                f"point {number}: {_count(flat)} of {size}, along which f has no slope: any "
                "lower solution will do"
            )
        differing = sum(row.verdict == MISMATCH for row in new)
        if differing and (gap := point.kink()) > 1e-3:
            notes.append(
                f"point {number}: g is not twice differentiable at its minimiser (products with "
                f"H are off by {gap:.0e})"
            )
        if hasattr(point.exact, "hypergradient"):
            error = _distance(point.exact.hypergradient(theta), formula)
            agrees = error <= tolerance
            notes.append(
                f"point {number}: closed form {'ok' if agrees else MISMATCH} (relative error "
                f"{error:.1e})"
            )
            differing += not agrees
        bad += differing
    verdict = _verdict(rows, bad, tolerance)
    return Report(tuple(rows), tuple(notes), verdict, agrees=bool(rows) and not bad)


def _verdict(rows: list[Row], bad: int, tolerance: float) -> str:
    if not rows:
        return "nothing could be checked"
    if bad:
        return f"{MISMATCH}: {bad} of {len(rows)} comparisons differ by more than {tolerance:g}"
    largest = max(row.error for row in rows)
    return (
        f"agrees: {len(rows)} directions within {tolerance:g} (largest relative error "
        f"{largest:.1e})"
    )


def _count(flat: int) -> str:
    return f"{flat} flat direction{'s' * (flat != 1)}"


def _points(problem: Problem, key: Key, count: int) -> Iterator[Tree]:
    """Yield θ0, and other points at a distance of about a third of its scale."""
    yield dict(problem.theta0)
    for number in range(1, count):
        draw = key.fold(number).generator()
        moved = {}
        for name, leaf in problem.theta0.items():
            moved[name] = leaf + 0.3 * torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype)
        yield problem.project(moved)


def _compare(
    point: _Point, formula: Tree, number: int, directions: int, key: Key, tolerance: float
) -> Iterator[Row]:
    theta = point.level.theta
    spec = Ravel.of(theta)
    flat = spec.ravel(theta)
    slope = spec.ravel(formula)
    if len(flat) <= directions:
        tried = {f"θ[{i}]": unit for i, unit in enumerate(torch.eye(len(flat), dtype=flat.dtype))}
    else:
        draws = torch.randn(directions, len(flat), generator=key.generator(), dtype=flat.dtype)
        tried = {f"random {i}": draw / draw.norm() for i, draw in enumerate(draws)}
    for name, unit in tried.items():

        def along(shift: float, unit: Tensor = unit) -> float:
            return point.value(spec.unravel(flat + shift * unit))

        difference, doubt = _slope(along, 1e-3)
        formula_slope = float(slope @ unit)
        gap = abs(formula_slope - difference)
        error = gap / max(abs(difference), float(slope.norm()) / len(flat) ** 0.5, 1e-300)
        verdict = (
            "ok" if error <= tolerance else "ok, to rounding" if gap <= 10 * doubt else MISMATCH
        )
        yield Row(number, name, formula_slope, difference, error, verdict)


def _slope(value: Callable[[float], float], step: float) -> tuple[float, float]:
    """Return the derivative at 0 and a bound of its rounding error.

    The derivative combines two central differences, extrapolated to a step of 0.
    """
    ends = {shift: value(shift) for shift in (step, -step, step / 2, -step / 2)}
    wide = (ends[step] - ends[-step]) / (2 * step)
    narrow = (ends[step / 2] - ends[-step / 2]) / step
    rounding = 4 * torch.finfo(torch.float64).eps * max(abs(end) for end in ends.values()) / step
    return (4 * narrow - wide) / 3, rounding


def _distance(other: Tree, formula: Tree) -> float:
    """Return ‖other − h‖ / ‖h‖."""
    spec = Ravel.of(formula)
    h = spec.ravel(formula)
    return float((spec.ravel(other) - h).norm() / h.norm().clamp_min(1e-300))
