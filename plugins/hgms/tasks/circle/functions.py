"""The functions of both examples of the paper: the circle, and flat smooth functions.

Each flat function is exactly 0 in float64 in the range where its cut-off applies (exp(−1/0.03²) <
10⁻³²⁰), so the cut-off is not an approximation. The argument is replaced *before* the division, and
the value after it. Otherwise the unused branch of ``torch.where`` would add 0·inf = NaN to the
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from attrs import Attribute, field
from torch import Tensor

from hgms_core import ConfigError, Problem, Tree, component
from hgms_core.capabilities import Capabilities, HasClosedForm
from hgms_core.validators import at_least, at_most

FLAT = 0.03
"""Below this, exp(−1/t²) and all its derivatives are 0 in float64."""


def bump(theta: Tensor) -> Tensor:
    """e^{−1/θ²} sin(10/θ), and 0 at θ = 0: the paper's a(θ) up to its factor."""
    flat = theta.abs() < FLAT
    t = torch.where(flat, torch.ones_like(theta), theta)
    return torch.where(
        flat, torch.zeros_like(theta), torch.exp(-1 / t.square()) * torch.sin(10 / t)
    )


def bump_slope(theta: Tensor) -> Tensor:
    """The derivative of :func:`bump`: e^{−1/θ²} ((2/θ³) sin(10/θ) − (10/θ²) cos(10/θ))."""
    flat = theta.abs() < FLAT
    t = torch.where(flat, torch.ones_like(theta), theta)
    slope = torch.exp(-1 / t.square()) * (
        2 / t**3 * torch.sin(10 / t) - 10 / t.square() * torch.cos(10 / t)
    )
    return torch.where(flat, torch.zeros_like(theta), slope)


def well(t: Tensor) -> Tensor:
    """φ(t) = ∫₀ᵗ sign(s) e^{−1/s²} ds = |t| e^{−1/t²} − √π erfc(1/|t|): convex, with all
    derivatives 0 at its minimiser 0.

    (Differentiate the right side for t > 0: e^{−1/t²}(1 + 2/t²) − (2/t²) e^{−1/t²} = e^{−1/t²}, and
    both sides vanish at 0.)

    Examples
    --------
    >>> t = torch.tensor([0.0, 0.5], dtype=torch.float64, requires_grad=True)
    >>> well(t).sum().backward()
    >>> bool((t.grad - torch.tensor([0.0, math.exp(-4)], dtype=torch.float64)).abs().max() < 1e-15)
    True
    """
    flat = t.abs() < FLAT
    s = torch.where(flat, torch.ones_like(t), t.abs())
    value = s * torch.exp(-1 / s.square()) - math.sqrt(math.pi) * torch.erfc(1 / s)
    return torch.where(flat, torch.zeros_like(t), value)


def wall(s: Tensor) -> Tensor:
    """ρ(s) = e^{−1/s} for s > 0 and 0 for s ≤ 0."""
    flat = s < FLAT**2
    safe = torch.where(flat, torch.ones_like(s), s)
    return torch.where(flat, torch.zeros_like(s), torch.exp(-1 / safe))


def lower(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    """g(θ, x) = (‖x‖² − (1 + θ²))²: zero exactly on the circle of radius r(θ) = √(1 + θ²)."""
    return (x["x"].square().sum() - 1 - theta["theta"].square().sum()).square()


def radius(theta: Tensor) -> Tensor:
    """r(θ) = √(1 + θ²)."""
    return (1 + theta.square()).sqrt()


def above_low(task: Any, attribute: Attribute[float], value: float) -> None:
    """The validator of the upper end of Θ."""
    if not value > task.low:
        message = f"{attribute.name}={value} must be greater than low={task.low}"
        raise ConfigError("out-of-range", message, place=(attribute.name,))


def in_interval(task: Any, attribute: Attribute[float], value: float) -> None:
    """The validator of a point of Θ = [low, high]."""
    at_least(task.low)(task, attribute, value)
    at_most(task.high)(task, attribute, value)


@component
class Circle:
    """The circle problem; x0 is its worst point at θ0, opposite to x*(θ0).

    A subclass defines the upper loss, and the class of the closed form (``exact``).
    """

    exact: ClassVar[type]
    capabilities: ClassVar[Capabilities] = frozenset({HasClosedForm})
    version: ClassVar[str] = "1"
    traits: ClassVar[frozenset[str]] = frozenset(
        {"smooth-lower", "direct-upper", "few-upper", "stop-rows", "closed-form"}
    )
    metrics: ClassVar[Mapping[str, bool]] = dict.fromkeys(
        ("value", "upper_loss", "manifold_distance", "solution_distance"), False
    )

    low: float = 0.2
    high: float = field(default=3.0, validator=above_low)
    start: float = field(default=1.8, validator=in_interval)

    def upper(self, theta: Tree, x: Tree, batch: Tree) -> Tensor:
        """Return f(θ, x), which each subclass defines."""
        raise NotImplementedError

    def closed_form(self, seed: int, device: torch.device, dtype: torch.dtype) -> Any:
        """Return the exact solution, value and derivative.

        They need no data: the arguments have no effect and match ``problem``.
        """
        return self.exact()

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        exact = self.closed_form(seed, device, dtype)

        def evaluate(theta: Tree, x: Tree) -> dict[str, float]:
            gap = torch.linalg.vector_norm(x["x"] - exact.solution(theta)["x"])
            off = (torch.linalg.vector_norm(x["x"]) - radius(theta["theta"][0])).abs()
            numbers = torch.stack([exact.value(theta), self.upper(theta, x, {}), off, gap])
            return dict(zip(self.metrics, numbers.tolist(), strict=True))

        theta0 = {"theta": torch.tensor([self.start], dtype=dtype, device=device)}
        return Problem(
            theta0=theta0,
            x0={"x": -exact.solution(theta0)["x"]},
            g=lower,
            f=self.upper,
            project=lambda theta: {"theta": theta["theta"].clamp(self.low, self.high)},
            evaluate=evaluate,
        )
