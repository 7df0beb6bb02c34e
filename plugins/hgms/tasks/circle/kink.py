"""Example 1 of the paper: the optimistic minimiser jumps across a circle; F has infinitely many
kinks.
"""

from __future__ import annotations

from typing import ClassVar, final

import attrs
import torch
from torch import Tensor

from hgms.tasks.circle.functions import Circle, bump, bump_slope, radius
from hgms_core import Tree, component


@final
@attrs.frozen
class KinkClosedForm:
    """x*(θ), F(θ) and F'(θ) of :class:`CircleKink`.

    At a tie, a(θ) = 0, both ends of the diameter minimise f, and F has no derivative. The solution
    and derivative of the branch x⁺ = (r, 0) are returned there.
    """

    def solution(self, theta: Tree) -> Tree:
        """x*(θ) = (−sign(a(θ)) r(θ), 0)."""
        t = theta["theta"][0]
        first = torch.where(bump(t) > 0, -radius(t), radius(t))
        return {"x": torch.stack([first, torch.zeros_like(first)])}

    def value(self, theta: Tree) -> Tensor:
        """F(θ) = −r(θ) |a(θ)|."""
        t = theta["theta"][0]
        return -radius(t) * bump(t).abs()

    def hypergradient(self, theta: Tree) -> Tree:
        """F'(θ) = −sign(a) (r'(θ) a(θ) + r(θ) a'(θ)) with r' = θ/r."""
        t = theta["theta"]
        branch = t / radius(t) * bump(t) + radius(t) * bump_slope(t)
        return {"theta": torch.where(bump(t) > 0, -branch, branch)}


@final
@component
class CircleKink(Circle):
    """The paper's example of a non-differentiable hyper-objective with smooth f, g and S(θ).

    With a(θ) = e^{−1/θ²} sin(10/θ) and r(θ)² = 1 + θ²::

        g(θ, x) = (‖x‖² − r(θ)²)²,        f(θ, x) = a(θ) x₁ + x₂²,        F(θ) = −r(θ) |a(θ)|

    S(θ) is a circle. The optimistic minimiser x*(θ) = (−sign(a) r, 0) changes side at θ_k =
    10/(kπ), a kink of F (a local maximum). The start x0 is the worst point of the circle at θ0.
    Without selection, x stays on that side, follows the branch +r|a| downhill through the kink at
    1.59 and ends at F(1.31) = −0.898. With selection, it ends at F(2.25) = −1.949, the minimum.

    Use when the effect of selection must be visible on two numbers. Avoid for convergence rates: F
    has several local minima in Θ.

    Parameters
    ----------
    low, high
        Θ = [low, high], enforced by projection (the kinks below 3.2 are at 3.18, 1.59, 1.06, 0.80,
        0.64, …).
    start
        θ0.

    Raises
    ------
    ConfigError
        For values outside the ranges of the fields.

    Notes
    -----
    The seed has no effect: the problem contains no random number.

    Source: HG-MS paper, example "Non-unique minima-selection can create kinks in the
    hyper-objective".

    Examples
    --------
    >>> task, cpu, double = CircleKink(), torch.device("cpu"), torch.float64
    >>> problem, exact = task.problem(0, cpu, double), task.closed_form(0, cpu, double)
    >>> bool(
    ...     torch.isclose(
    ...         problem.f(problem.theta0, exact.solution(problem.theta0), {}),
    ...         exact.value(problem.theta0),
    ...     )
    ... )
    True
    """

    name: ClassVar[str] = "circle-kink"
    exact: ClassVar[type] = KinkClosedForm

    def upper(self, theta: Tree, x: Tree, batch: Tree) -> Tensor:
        return bump(theta["theta"][0]) * x["x"][0] + x["x"][1].square()
