"""Is a hypergradient right? The implicit formula against finite differences of the re-solved lower level, in float64.

At a point θ the lower level is solved to high accuracy (by the task's closed form, else by L-BFGS and Newton's method from
x0); there, with H = ∇²_xx g and nothing truncated or regularised::

    h = ∇_θ f − ∇²_θx g v,   v = H⁺ ∇_x f          against          (F(θ + εu) − F(θ − εu)) / 2ε,   F(θ) = f(θ, x*(θ))

F is followed from x*(θ): each difference re-solves the lower level starting there. Whatever keeps the comparison from meaning
anything (a lower level that was not solved, is not unique, or has a kink at its solution) is said instead of a verdict.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from hgms_core import Branch, ConfigError, Key, Problem, Ravel, Tree, cross_product, curvature, upper_gradients

LARGEST = 3_000
"""Lower variables up to which H is made dense and factored; more are refused."""
STATIONARY = 1e-8
"""‖∇_x g‖ / (1 + |g|) at which the lower level counts as solved. Newton's method usually gets to 1e-13."""
FLAT = 1e-7
"""Eigenvalues of H below this share of the largest count as 0: directions along the manifold of minimisers."""


ACROSS = 1e-6
"""The share of ‖∇_x f‖ along flat directions that counts as none."""


class Unsolved(Exception):
    """Why the lower level gives nothing to compare with."""


@frozen(kw_only=True)
class Row:
    """One direction at one point. ``error`` is the difference over the larger of |finite difference| and ‖h‖/√dim θ."""

    point: int
    direction: str
    hypergradient: float
    difference: float
    error: float
    verdict: str


@frozen(kw_only=True)
class Report:
    """All comparisons, what is to be known about them, and the sentence they come to."""

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

    def hessian(self, x: Tensor) -> Tensor:
        at = curvature(lambda tree: self.value(self.spec.ravel(tree)), self.spec.unravel(x))
        rows = torch.stack([at.matvec(column) for column in torch.eye(len(x), dtype=x.dtype)])
        return 0.5 * (rows + rows.T)

    def solve(self, start: Tensor, far: bool) -> Tensor:
        """A minimiser next to ``start``: L-BFGS where it may be far, then Newton steps within the curved directions."""
        x = self._descend(start) if far else start
        value, gradient = self.slope(x)
        for _ in range(50):
            size = float(gradient.norm())
            if size <= 1e-14 * (1 + abs(value)):
                break
            step = _pseudo_solve(self.hessian(x), gradient)[0]
            moved = [(x - length * step, *self.slope(x - length * step)) for length in (1.0, 0.5, 0.1)]
            after, value_after, gradient_after = min(moved, key=lambda trial: float(trial[2].norm()))
            if not float(gradient_after.norm()) < size:
                break
            x, value, gradient = after, value_after, gradient_after
        size = float(gradient.norm()) / (1 + abs(value))
        if not size <= STATIONARY:
            raise Unsolved(
                f"the lower level was not solved: ‖∇_x g‖ = {size:.1e} (1 + |g|) is left. It may have a kink at its minimiser, "
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


def _pseudo_solve(hessian: Tensor, b: Tensor) -> tuple[Tensor, Tensor, int, float, float]:
    """(|H|⁺ b, H⁺ b, number of flat directions, the most negative eigenvalue over the largest, the share of ‖b‖ in the flat
    directions). |H| makes a step descend."""
    values, vectors = torch.linalg.eigh(hessian)
    largest = float(values.abs().max().clamp_min(torch.finfo(values.dtype).tiny))
    curved = values.abs() > FLAT * largest
    parts = vectors.T @ b
    safe = torch.where(curved, values, torch.ones_like(values))
    inverse = [torch.where(curved, parts / eigenvalues, torch.zeros_like(parts)) for eigenvalues in (safe.abs(), safe)]
    along = float(parts[~curved].norm() / b.norm().clamp_min(1e-300))
    return vectors @ inverse[0], vectors @ inverse[1], int((~curved).sum()), float(values.min()) / largest, along


@frozen
class _Point:
    """θ and its solved lower level. ``solve`` gives x*(θ') for θ' near θ."""

    problem: Problem
    theta: Tree
    spec: Ravel
    x: Tensor
    exact: Any

    @classmethod
    def at(cls, problem: Problem, theta: Tree, exact: Any) -> _Point:
        spec = Ravel.of(problem.x0)
        level = _Level(problem, theta, spec)
        if exact is None:
            return cls(problem, theta, spec, level.solve(spec.ravel(problem.x0), far=True), None)
        x = spec.ravel(exact.solution(theta))
        value, gradient = level.slope(x)
        if not float(gradient.norm()) <= 1e-6 * (1 + abs(value)):
            raise Unsolved(f"the closed form's solution does not solve the lower level: ‖∇_x g‖ = {float(gradient.norm()):.1e}")
        return cls(problem, theta, spec, x, exact)

    def upper(self, theta: Tree, x: Tensor) -> Tensor:
        return self.problem.f(theta, self.spec.unravel(x), self.problem.upper_data["differentiate"].batch(None))

    def value(self, theta: Tree) -> float:
        """F near θ."""
        if self.exact is not None:
            return float(self.upper(theta, self.spec.ravel(self.exact.solution(theta))))
        return float(self.upper(theta, _Level(self.problem, theta, self.spec).solve(self.x, far=False)))

    def hypergradient(self) -> tuple[Tree, int]:
        """h and the number of flat directions; Unsolved where x is no isolated minimiser and not known to be the best of them.

        Where f has no slope along the flat directions it does not matter which minimiser was found, to first order: moving
        along them leaves f as it is, as with the bias of a softmax that no penalty holds.
        """
        above, below = self.problem.upper_data["differentiate"].batch(None), self.problem.lower_data.batch(None)
        _, direct, slope = upper_gradients(lambda t, y: self.problem.f(t, y, above), self.theta, self.spec.unravel(self.x))
        rhs = self.spec.ravel(slope)
        _, v, flat, lowest, along = _pseudo_solve(_Level(self.problem, self.theta, self.spec).hessian(self.x), rhs)
        if lowest < -FLAT:
            raise Unsolved(
                "the lower level's Hessian has a negative eigenvalue at the solution: it is a saddle, not a minimiser"
            )
        if flat and self.exact is None and along > ACROSS:
            raise Unsolved(
                f"the lower solution is not unique ({flat} flat directions of {len(rhs)}), and f has a slope along them "
                f"({along:.0e} of ‖∇_x f‖): the formula holds at the best one only, which is not known. A penalty in g "
                "makes it unique"
            )
        mixed = cross_product(
            lambda t, y: self.problem.g(t, y, below), self.theta, self.spec.unravel(self.x), self.spec.unravel(v)
        )
        return {name: direct[name] - mixed[name] for name in direct}, flat

    def kink(self) -> float:
        """By how much the gradient of g changes otherwise than its Hessian says, on steps like those of the differences."""
        level = _Level(self.problem, self.theta, self.spec)
        generator = Key(0).fold("kink").generator()
        v = torch.randn(len(self.x), generator=generator, dtype=self.x.dtype)
        step = 1e-5 * (1 + self.x.norm()) / v.norm()
        change = (level.slope(self.x + step * v)[1] - level.slope(self.x - step * v)[1]) / (2 * step)
        at = curvature(lambda tree: level.value(self.spec.ravel(tree)), self.spec.unravel(self.x))
        product = at.matvec(v)
        return float((change - product).norm() / product.norm().clamp_min(1e-30))


def check_task(
    task: Any, *, seed: int = 0, points: int = 3, directions: int = 5, tolerance: float = 1e-4, method: Any = None
) -> Report:
    """The report for a task's problem on the CPU in float64, with its closed form where it has one."""
    cpu = torch.device("cpu")
    problem = task.problem(seed, cpu, torch.float64)
    exact = task.closed_form(seed, cpu, torch.float64) if hasattr(task, "closed_form") else None
    return check_problem(problem, exact, seed=seed, points=points, directions=directions, tolerance=tolerance, method=method)


def check_problem(
    problem: Problem,
    exact: Any = None,
    *,
    seed: int = 0,
    points: int = 3,
    directions: int = 5,
    tolerance: float = 1e-4,
    method: Any = None,
) -> Report:
    """Compares at θ0 and at points around it. ``exact`` has ``solution(theta)`` and, if it can, ``hypergradient(theta)``;
    ``method`` is a pipeline whose estimator is compared too, as a whole vector.

    Errors: ConfigError for a problem of more than 3,000 lower variables, or a method without an estimator.
    """
    size = Ravel.of(problem.x0).size
    if size > LARGEST:
        raise ConfigError(
            f"the lower level has {size} variables, but the check makes its Hessian dense: {LARGEST} at most\n"
            "  shrink the task with --set task.FIELD=VALUE"
        )
    if method is not None and not hasattr(method, "hypergradient"):
        raise ConfigError(f"method {method.name!r} has no hypergradient estimator of its own to compare")
    rows: list[Row] = []
    notes: list[str] = []
    for number, theta in enumerate(_points(problem, Key(seed).fold("check-gradient"), points)):
        try:
            point = _Point.at(problem, theta, exact)
            formula, flat = point.hypergradient()
            new = list(_compare(point, formula, number, directions, Key(seed).fold("directions", number), tolerance))
        except Unsolved as why:
            notes.append(f"point {number}: not checked: {why}")
            continue
        rows += new
        if flat and exact is None:
            notes.append(
                f"point {number}: {flat} flat directions of {size}, along which f has no slope: any lower solution will do"
            )
        if any(row.verdict == "MISMATCH" for row in new) and (gap := point.kink()) > 1e-3:
            notes.append(
                f"point {number}: g is not twice differentiable at its minimiser (products with H are off by {gap:.0e})"
            )
        notes += _compare_others(point, formula, number, tolerance, method, seed)
    bad = [row for row in rows if row.verdict == "MISMATCH"] + [note for note in notes if "MISMATCH" in note]
    if not rows:
        verdict = "nothing could be checked"
    elif bad:
        verdict = f"MISMATCH: {len(bad)} of {len(rows)} comparisons differ by more than {tolerance:g}"
    else:
        verdict = (
            f"agrees: {len(rows)} directions within {tolerance:g} (largest relative error {max(row.error for row in rows):.1e})"
        )
    return Report(rows=tuple(rows), notes=tuple(notes), verdict=verdict, agrees=bool(rows) and not bad)


def _points(problem: Problem, key: Key, count: int) -> Iterator[Tree]:
    """θ0, and others at a distance of about a third of its scale."""
    yield dict(problem.theta0)
    for number in range(1, count):
        generator = key.fold(number).generator()
        yield problem.project(
            {
                name: leaf + 0.3 * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
                for name, leaf in problem.theta0.items()
            }
        )


def _compare(point: _Point, formula: Tree, number: int, directions: int, key: Key, tolerance: float) -> Iterator[Row]:
    spec = Ravel.of(point.theta)
    flat, slope = spec.ravel(point.theta), spec.ravel(formula)
    if len(flat) <= directions:
        tried = {f"θ[{i}]": unit for i, unit in enumerate(torch.eye(len(flat), dtype=flat.dtype))}
    else:
        draws = torch.randn(directions, len(flat), generator=key.generator(), dtype=flat.dtype)
        tried = {f"random {i}": draw / draw.norm() for i, draw in enumerate(draws)}
    for name, unit in tried.items():
        along = functools.partial(_shifted, point, spec, flat, unit)
        difference, doubt = _slope(along, 1e-3)
        formula_slope = float(slope @ unit)
        scale = max(abs(difference), float(slope.norm()) / len(flat) ** 0.5, 1e-300)
        error = abs(formula_slope - difference) / scale
        verdict = (
            "ok" if error <= tolerance else "ok, to rounding" if abs(formula_slope - difference) <= 10 * doubt else "MISMATCH"
        )
        yield Row(
            point=number, direction=name, hypergradient=formula_slope, difference=difference, error=error, verdict=verdict
        )


def _shifted(point: _Point, spec: Ravel, flat: Tensor, unit: Tensor, shift: float) -> float:
    return point.value(spec.unravel(flat + shift * unit))


def _slope(value: Callable[[float], float], step: float) -> tuple[float, float]:
    """(the derivative at 0, how far rounding can have moved it): two central differences, extrapolated to a step of 0."""
    ends = {shift: value(shift) for shift in (step, -step, step / 2, -step / 2)}
    wide, narrow = (ends[step] - ends[-step]) / (2 * step), (ends[step / 2] - ends[-step / 2]) / step
    rounding = 4 * torch.finfo(torch.float64).eps * max(abs(end) for end in ends.values()) / step
    return (4 * narrow - wide) / 3, rounding


def _compare_others(point: _Point, formula: Tree, number: int, tolerance: float, method: Any, seed: int) -> list[str]:
    """Notes on the closed form's hypergradient and on a method's estimator, each as a whole vector."""
    spec = Ravel.of(formula)
    slope = spec.ravel(formula)

    def off(other: Tree) -> float:
        return float((spec.ravel(other) - slope).norm() / slope.norm().clamp_min(1e-300))

    notes = []
    if hasattr(point.exact, "hypergradient"):
        error = off(point.exact.hypergradient(point.theta))
        notes.append(f"point {number}: closed form {'ok' if error <= tolerance else 'MISMATCH'} (relative error {error:.1e})")
    if method is not None:
        branch = Branch(x=point.spec.unravel(point.x), replay=_no_path)
        estimator = method.hypergradient
        try:
            estimate, _ = estimator.estimate(point.problem, point.theta, branch, Key(seed), estimator.init(point.problem))
        except _NeedsPath:
            notes.append(f"estimator {estimator.name!r}: it differentiates a path, and there is none at a solved lower level")
        else:
            error, ended = off(estimate.value), estimate.outcome.label
            notes.append(f"point {number}: estimator {estimator.name!r} is off by {error:.1e} of ‖h‖ ({ended})")
    return notes


class _NeedsPath(Exception):
    pass


def _no_path(theta: Tree, last: int | None) -> Any:
    raise _NeedsPath
