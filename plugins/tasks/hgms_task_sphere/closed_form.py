"""The sphere problem's losses and everything about it that is known exactly."""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen
from torch import Tensor

from hgms_core import Tree


@final
@frozen(eq=False)
class SphereClosedForm:
    """The losses of a :class:`Sphere` problem, and x*(θ), F(θ), ∇F(θ), θ* and F* in closed form.

    ``inside`` is E [d, k+1], the frame of the sphere's subspace; ``outside`` is N [d, d−k−1], that of its complement;
    ``tilt`` is B, ``slope`` is w, ``best`` is the unit vector e; the numbers are the task's fields.
    """

    inside: Tensor
    outside: Tensor
    tilt: Tensor
    slope: Tensor
    best: Tensor
    base: Tensor
    radius0: float
    offset: float
    shift: float
    growth: float
    alpha: float

    def center(self, theta: Tree) -> Tensor:
        """c(θ) = c₀ + γθ, in the coordinates of E."""
        return self.base + self.shift * theta["theta"]

    def radius(self, theta: Tree) -> Tensor:
        """r(θ) = r₀ + β eᵀθ."""
        return self.radius0 + self.growth * (self.best @ theta["theta"])

    def lower(self, theta: Tree, x: Tree, batch: Tree) -> Tensor:
        """g(θ, x)."""
        on = self.inside.T @ x["x"] - self.center(theta)
        off = self.outside.T @ x["x"] - self.tilt @ theta["theta"]
        return 0.25 * (on.square().sum() - self.radius(theta).square()).square() + 0.5 * off.square().sum()

    def upper(self, theta: Tree, x: Tree, batch: Tree) -> Tensor:
        """f(θ, x)."""
        t = theta["theta"]
        return t @ (self.inside.T @ x["x"]) + self.slope @ (self.outside.T @ x["x"]) + 0.5 * self.alpha * t.square().sum()

    def point(self, theta: Tree, direction: Tensor) -> Tree:
        """The point of S(θ) in a unit ``direction`` of R^{k+1} from its centre."""
        on = self.center(theta) + self.radius(theta) * direction
        return {"x": self.inside @ on + self.outside @ (self.tilt @ theta["theta"])}

    def solution(self, theta: Tree) -> Tree:
        """x*(θ): the point of S(θ) opposite to θ (unique and non-degenerate for θ ≠ 0)."""
        return self.point(theta, -theta["theta"] / torch.linalg.vector_norm(theta["theta"]))

    def value(self, theta: Tree) -> Tensor:
        """F(θ) = −ω eᵀθ − r(θ)‖θ‖ + (α/2 + γ)‖θ‖²."""
        t = theta["theta"]
        size = torch.linalg.vector_norm(t)
        return -self.offset * (self.best @ t) - self.radius(theta) * size + (0.5 * self.alpha + self.shift) * size.square()

    def hypergradient(self, theta: Tree) -> Tree:
        """∇F(θ) = −ωe − β‖θ‖e − r(θ) θ/‖θ‖ + (α + 2γ) θ."""
        t = theta["theta"]
        size = torch.linalg.vector_norm(t)
        along = (self.offset + self.growth * size) * self.best
        return {"theta": -along - self.radius(theta) * t / size + (self.alpha + 2 * self.shift) * t}

    @property
    def theta_star(self) -> Tree:
        """The unique minimiser of F: t* e with t* = (ω + r₀)/(α + 2γ − 2β)."""
        return {"theta": (self.offset + self.radius0) / (self.alpha + 2 * self.shift - 2 * self.growth) * self.best}

    @property
    def optimum(self) -> float:
        """F* = −(ω + r₀)² / (2(α + 2γ − 2β))."""
        return -((self.offset + self.radius0) ** 2) / (2 * (self.alpha + 2 * self.shift - 2 * self.growth))

    def off_manifold(self, theta: Tree, x: Tree) -> Tensor:
        """The distance from x to S(θ)."""
        on = torch.linalg.vector_norm(self.inside.T @ x["x"] - self.center(theta)) - self.radius(theta)
        off = self.outside.T @ x["x"] - self.tilt @ theta["theta"]
        return (on.square() + off.square().sum()).sqrt()
