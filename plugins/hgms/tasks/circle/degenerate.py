"""Example 2 of the paper: a unique optimistic minimiser, although ∇F is not Hölder continuous."""

from __future__ import annotations

from typing import ClassVar, final

import attrs
import torch
from attrs import field
from torch import Tensor

from hgms.tasks.circle.functions import Circle, bump, bump_slope, radius, wall, well
from hgms_core import Tree, component
from hgms_core.validators import positive


@final
@attrs.frozen
class DegenerateClosedForm:
    """x*(θ), F(θ) and F'(θ) of :class:`CircleDegenerate`."""

    def _height(self, t: Tensor) -> Tensor:
        """t*(θ) = −sign(a) (log 1/|a|)^{−1/2}, and 0 where a(θ) = 0."""
        a = bump(t) / 4
        zero = a == 0
        size = torch.where(zero, torch.full_like(a, 0.5), a.abs())
        return torch.where(zero, torch.zeros_like(a), -a.sign() * (-size.log()).rsqrt())

    def solution(self, theta: Tree) -> Tree:
        """x*(θ) = (√(r(θ)² − t*²), t*)."""
        height = self._height(theta["theta"][0])
        return {
            "x": torch.stack(
                [(radius(theta["theta"][0]).square() - height.square()).sqrt(), height]
            )
        }

    def value(self, theta: Tree) -> Tensor:
        """F(θ) = φ(t*) + a(θ) t*."""
        height = self._height(theta["theta"][0])
        return well(height) + bump(theta["theta"][0]) / 4 * height

    def hypergradient(self, theta: Tree) -> Tree:
        """F'(θ) = a'(θ) t*(θ), by the envelope theorem."""
        return {"theta": bump_slope(theta["theta"]) / 4 * self._height(theta["theta"])}


@final
@component
class CircleDegenerate(Circle):
    """The paper's example of a unique but degenerate optimistic minimiser: F is C¹, ∇F has no
    Hölder exponent.

    With a(θ) = ¼ e^{−1/θ²} sin(10/θ), r(θ)² = 1 + θ², φ(t) = ∫₀ᵗ sign(s) e^{−1/s²} ds and ρ(s) =
    e^{−1/s} for s > 0::

        g(θ, x) = (‖x‖² − r(θ)²)²,        f(θ, x) = φ(x₂) + a(θ) x₂ + ρ(−x₁) + b (‖x‖² − r(θ)²)

    The minimiser over the circle is x* = (√(r² − t*²), t*) with t* = −sign(a)(log 1/|a|)^{−1/2}. F'
    = a' t* behaves like (log 1/|θ − θ_k|)^{−1/2} near a zero θ_k of a. The term in b is zero on the
    circle. It makes the ambient Hessian of f positive along the tangent there, so that only the
    *intrinsic* second derivative shows the degeneracy.

    Use when a step-size rule or a solver must be tested on a hyper-objective without Lipschitz
    gradient. Avoid for judging accuracy in x₂ near ties: f is flat to all orders there.

    Parameters
    ----------
    low, high
        Θ = [low, high], enforced by projection.
    start
        θ0.
    b
        Weight of the vanishing term, > 0.

    Raises
    ------
    ConfigError
        For values outside the ranges of the fields.

    Notes
    -----
    The seed has no effect: the problem contains no random number.

    Source: HG-MS paper, example "Uniqueness does not imply local α-Hölder continuity of ∇F".

    Examples
    --------
    >>> task, cpu, double = CircleDegenerate(), torch.device("cpu"), torch.float64
    >>> problem, exact = task.problem(0, cpu, double), task.closed_form(0, cpu, double)
    >>> bool(
    ...     torch.isclose(
    ...         problem.f(problem.theta0, exact.solution(problem.theta0), {}),
    ...         exact.value(problem.theta0),
    ...     )
    ... )
    True
    """

    name: ClassVar[str] = "circle-degenerate"
    exact: ClassVar[type] = DegenerateClosedForm

    b: float = field(default=1.0, validator=positive)

    def upper(self, theta: Tree, x: Tree, batch: Tree) -> Tensor:
        t = theta["theta"][0]
        first = x["x"][0]
        second = x["x"][1]
        vanishing = x["x"].square().sum() - 1 - t.square()
        return well(second) + bump(t) / 4 * second + wall(-first) + self.b * vanishing
