"""Compare the implicit hypergradient with finite differences, in float64.

The differences re-solve the lower level.

At a point θ the lower level is solved to high accuracy: by the closed form of the task, else by
SciPy from x0. At the solution, with H = ∇²_xx g and without truncation or regularisation::

    h = ∇_θ f − ∇²_θx g v,  v = H⁺ ∇_x f  against  (F(θ + εu) − F(θ − εu)) / 2ε,  F(θ) = f(θ, x*(θ))

F is followed from x*(θ): each difference re-solves the lower level from this start. A comparison is
meaningless if the lower level was not solved (as at a kink) or has no unique solution. The report
then contains the reason instead of a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from attrs import frozen
from scipy import optimize
from torch import Tensor

from hgms.arguments import require
from hgms_core import Key, Problem, Ravel, Tree, cross_product, curvature, upper_gradients
from hgms_core.capabilities import HasClosedForm, find

LARGEST = 3_000
"""The maximum number of lower variables: H is dense and factored. Larger problems are rejected."""
STATIONARY = 1e-8
"""‖∇_x g‖ / (1 + |g|) at which the lower level counts as solved; SciPy usually reaches 1e-13."""
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
    """The lower level of a problem on flat vectors, and its closed form, if any."""

    problem: Problem
    exact: Any
    spec: Ravel

    def slope(self, theta: Tree, x: Tensor) -> tuple[float, Tensor]:
        """Return g and ∇_x g."""
        leaf = x.detach().requires_grad_()
        batch = self.problem.lower_data.batch(None)
        with torch.enable_grad():
            value = self.problem.g(theta, self.spec.unravel(leaf), batch)
            (gradient,) = torch.autograd.grad(value, leaf, materialize_grads=True)
        return float(value.detach()), gradient

    def hessian(self, theta: Tree, x: Tensor) -> Tensor:
        batch = self.problem.lower_data.batch(None)
        at = curvature(lambda point: self.problem.g(theta, point, batch), self.spec.unravel(x))
        rows = torch.stack([at.matvec(unit) for unit in torch.eye(len(x), dtype=x.dtype)])
        return (rows + rows.T) / 2

    def solution(self, theta: Tree, start: Tensor | None = None) -> Tensor:
        """Return the solution of the closed form, else a minimiser near ``start`` (None: x0).

        Raises
        ------
        Unsolved
            If ∇_x g is not zero there.
        """

        def slope(x: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = self.slope(theta, torch.from_numpy(x))
            return value, gradient.numpy()

        def hessian(x: np.ndarray) -> np.ndarray:
            return self.hessian(theta, torch.from_numpy(x)).numpy()

        if self.exact is not None:
            x = self.spec.ravel(self.exact.solution(theta))
        else:
            point = self.spec.ravel(self.problem.x0).numpy() if start is None else start.numpy()
            if start is None:
                options = {"maxiter": 5_000, "maxfun": 10_000, "maxcor": 50, "ftol": 1e-16}
                point = optimize.minimize(
                    slope, point, jac=True, method="L-BFGS-B", options=options
                ).x
            tight = {"xtol": 1e-15, "ftol": 1e-15}
            root = optimize.root(
                lambda x: slope(x)[1], point, jac=hessian, method="lm", options=tight
            )
            x = torch.from_numpy(root.x)
        value, gradient = self.slope(theta, x)
        size = float(gradient.norm()) / (1 + abs(value))
        if not size <= STATIONARY:
            raise Unsolved(
                f"the lower level was not solved: ‖∇_x g‖ = {size:.1e} (1 + |g|) is left. It may "
                "have a kink at its minimiser, no minimiser, or be too flat, or the closed form "
                "is wrong; a penalty or a smooth activation helps"
            )
        return x

    def value(self, theta: Tree, start: Tensor) -> float:
        """Return F(θ); the lower level is solved from ``start``."""
        x = self.spec.unravel(self.solution(theta, start))
        batch = self.problem.upper_data["differentiate"].batch(None)
        return float(self.problem.f(theta, x, batch))

    def hypergradient(self, theta: Tree, x: Tensor) -> tuple[Tree, int]:
        """Return h and the number of flat directions.

        If f has no slope along the flat directions, the choice of the minimiser has no effect to
        first order: steps along them do not change f. An example is the bias of a softmax without a
        penalty.

        Raises
        ------
        Unsolved
            If x is not an isolated minimiser and not known to be the best minimiser.
        """
        problem = self.problem
        above = problem.upper_data["differentiate"].batch(None)
        below = problem.lower_data.batch(None)
        at = self.spec.unravel(x)
        _, direct, slope = upper_gradients(lambda t, y: problem.f(t, y, above), theta, at)
        rhs = self.spec.ravel(slope)
        hessian = self.hessian(theta, x)
        values = torch.linalg.eigvalsh(hessian)
        least = FLAT * values.abs().max()
        flat = int((values.abs() <= least).sum())
        if float(values.min()) < -least:
            raise Unsolved(
                "the lower level's Hessian has a negative eigenvalue at the solution: it is a "
                "saddle, not a minimiser"
            )
        v = torch.linalg.pinv(hessian, atol=least, hermitian=True) @ rhs
        along = float((rhs - hessian @ v).norm() / rhs.norm().clamp_min(1e-300))
        if flat and self.exact is None and along > ACROSS:
            raise Unsolved(
                f"the lower solution is not unique ({_count(flat)} of {len(rhs)}), and f has a "
                f"slope along them ({along:.0e} of ‖∇_x f‖): the formula holds at the best one "
                "only, which is not known. A penalty in g makes it unique"
            )
        v_tree = self.spec.unravel(v)
        mixed = cross_product(lambda t, y: problem.g(t, y, below), theta, at, v_tree)
        return {name: direct[name] - mixed[name] for name in direct}, flat


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
    level = _Level(problem, exact, Ravel.of(problem.x0))
    size = level.spec.size
    require(
        size <= LARGEST,
        "too-large",
        f"the lower level has {size} variables, but the dense Hessian of the check requires at "
        f"most {LARGEST}",
        hint="decrease the size of the task with --set task.FIELD=VALUE",
        place=("task",),
    )
    rows: list[Row] = []
    notes: list[str] = []
    bad = 0
    for number, theta in enumerate(_points(problem, Key(seed).fold("check-gradient"), points)):
        try:
            x = level.solution(theta)
            formula, flat = level.hypergradient(theta, x)
            tried = _directions(theta, directions, Key(seed).fold("directions", number))
            new = [
                _compare(level, theta, x, formula, number, name, unit, tolerance)
                for name, unit in tried.items()
            ]
        except Unsolved as why:
            notes.append(f"point {number}: not checked: {why}")
            continue
        rows += new
        if flat and exact is None:
            notes.append(
                f"point {number}: {_count(flat)} of {size}, along which f has no slope: any "
                "lower solution will do"
            )
        bad += sum(row.verdict == MISMATCH for row in new)
        if hasattr(exact, "hypergradient"):
            error = _distance(exact.hypergradient(theta), formula)
            agrees = error <= tolerance
            notes.append(
                f"point {number}: closed form {'ok' if agrees else MISMATCH} (relative error "
                f"{error:.1e})"
            )
            bad += not agrees
    verdict = "nothing could be checked"
    if bad:
        verdict = f"{MISMATCH}: {bad} of {len(rows)} comparisons differ by more than {tolerance:g}"
    elif rows:
        largest = max(row.error for row in rows)
        verdict = (
            f"agrees: {len(rows)} directions within {tolerance:g} (largest relative error "
            f"{largest:.1e})"
        )
    return Report(tuple(rows), tuple(notes), verdict, agrees=bool(rows) and not bad)


def _count(flat: int) -> str:
    return f"{flat} flat direction{'s' * (flat != 1)}"


def _points(problem: Problem, key: Key, count: int) -> Iterator[Tree]:
    """Yield θ0, and other points at a distance of about a third of its scale."""
    yield dict(problem.theta0)
    for number in range(1, count):
        draw = key.fold(number).generator()
        yield problem.project(
            {
                name: leaf + 0.3 * torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype)
                for name, leaf in problem.theta0.items()
            }
        )


def _directions(theta: Tree, count: int, key: Key) -> dict[str, Tensor]:
    """Return all coordinates of θ, or random directions if θ has more than ``count``."""
    flat = Ravel.of(theta).ravel(theta)
    if len(flat) <= count:
        return {f"θ[{i}]": unit for i, unit in enumerate(torch.eye(len(flat), dtype=flat.dtype))}
    draws = torch.randn(count, len(flat), generator=key.generator(), dtype=flat.dtype)
    return {f"random {i}": draw / draw.norm() for i, draw in enumerate(draws)}


def _compare(
    level: _Level,
    theta: Tree,
    x: Tensor,
    formula: Tree,
    number: int,
    name: str,
    unit: Tensor,
    tolerance: float,
) -> Row:
    spec = Ravel.of(theta)
    flat = spec.ravel(theta)
    h = spec.ravel(formula)
    difference, doubt = _slope(
        lambda shift: level.value(spec.unravel(flat + shift * unit), x), step=1e-3
    )
    slope = float(h @ unit)
    gap = abs(slope - difference)
    error = gap / max(abs(difference), float(h.norm()) / len(flat) ** 0.5, 1e-300)
    verdict = "ok" if error <= tolerance else "ok, to rounding" if gap <= 10 * doubt else MISMATCH
    return Row(number, name, slope, difference, error, verdict)


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
