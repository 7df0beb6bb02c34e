"""Task `toy-penalty`: the numerical example of the paper on penalty methods, with many starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

import attrs
import torch
from attrs import field
from torch import Tensor

from hgms_core import Key, Problem, Tree, component, hookimpl
from hgms_core.capabilities import Capabilities, HasClosedForm
from hgms_core.validators import at_least, at_most

LOW = 0.0
HIGH = 3.0
"""The bounds of Θ, the same for every start."""


def lower(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    """g = Σ (θ + x)² + θ sin²(θ + x) over the starts."""
    both = theta["theta"] + x["x"]
    return (both.square() + theta["theta"] * both.sin().square()).sum()


def upper(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    """f = Σ cos(4x + 2)/(1 + e^{2 − 4θ}) + ½ ln((4θ − 2)² + 1) over the starts."""
    return each_upper(theta["theta"], x["x"]).sum()


def each_upper(theta: Tensor, x: Tensor) -> Tensor:
    """Return f of each start, ``[starts]``."""
    slow = 4 * theta - 2
    return (4 * x + 2).cos() * slow.sigmoid() + 0.5 * (slow.square() + 1).log()


@final
@attrs.frozen
class ToyClosedForm:
    """x*(θ) = −θ, F(θ) = Σ f(θ, −θ) and ∇F(θ)."""

    def solution(self, theta: Tree) -> Tree:
        """Return −θ: g ≥ 0 for θ ≥ 0, and g = 0 only at θ + x = 0."""
        return {"x": -theta["theta"]}

    def value(self, theta: Tree) -> Tensor:
        """F(θ) = Σ cos(2 − 4θ) σ(4θ − 2) + ½ ln((4θ − 2)² + 1)."""
        return each_upper(theta["theta"], -theta["theta"]).sum()

    def hypergradient(self, theta: Tree) -> Tree:
        """With s = 4θ − 2: F'(θ) = 4 [−sin(s) σ(s) + cos(s) σ(s)(1 − σ(s)) + s/(s² + 1)]."""
        s = 4 * theta["theta"] - 2
        share = s.sigmoid()
        return {
            "theta": 4 * (-s.sin() * share + s.cos() * share * (1 - share) + s / (s.square() + 1))
        }


@final
@component
class ToyPenalty:
    """The first published example of V-PBGD, from ``starts`` independent starting points::

        f(θ, x) = cos(4x + 2)/(1 + e^{2 − 4θ}) + ½ ln((4θ − 2)² + 1),
            g(θ, x) = (θ + x)² + θ sin²(θ + x)
        Θ = [0, 3],  θ0 uniform in [0, 3.5], then projected,  x0 uniform in [−5, 8.5]
            (both are sums over the starts)

    g is not convex in x but satisfies the Polyak–Łojasiewicz inequality; its only minimiser is x =
    −θ. F(θ) = f(θ, −θ) has several local minima in Θ, so the result of a method depends on its
    start.

    Metrics, as means over the starts: ``value`` F(θ); ``upper_loss`` f(θ, x); ``residual`` |θ + x|,
    the distance to the lower minimiser; ``slope``, the length of the projected hypergradient |θ −
    P(θ − F'(θ))|.

    Use when the steps to convergence of a penalty method must be counted. Avoid for comparing final
    values of methods: the problem has two numbers per start.

    Parameters
    ----------
    starts
        The number of starts, drawn from the seed. θ and x contain one number per start.

    Raises
    ------
    ConfigError
        For values outside the range of the field.

    Notes
    -----
    Source: Shen and Chen, *On penalty-based bilevel gradient descent method* (2023), section 5.1.

    Examples
    --------
    >>> task, cpu, double = ToyPenalty(starts=3), torch.device("cpu"), torch.float64
    >>> problem, exact = task.problem(0, cpu, double), task.closed_form(0, cpu, double)
    >>> float(problem.g(problem.theta0, exact.solution(problem.theta0), {}))
    0.0
    """

    name: ClassVar[str] = "toy-penalty"
    capabilities: ClassVar[Capabilities] = frozenset({HasClosedForm})
    version: ClassVar[str] = "1"
    traits: ClassVar[frozenset[str]] = frozenset(
        {"smooth-lower", "direct-upper", "few-upper", "stop-rows", "closed-form"}
    )
    metrics: ClassVar[Mapping[str, bool]] = dict.fromkeys(
        ("value", "upper_loss", "residual", "slope"), False
    )

    starts: int = field(default=1000, validator=[at_least(1), at_most(1000)])

    def closed_form(self, seed: int, device: torch.device, dtype: torch.dtype) -> ToyClosedForm:
        """Return the exact solution, value and derivative, which need no data."""
        return ToyClosedForm()

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        exact = ToyClosedForm()
        unit = torch.rand(
            2, self.starts, generator=Key(seed).fold(self.name).generator(), dtype=torch.float64
        )

        def project(theta: Tree) -> Tree:
            return {"theta": theta["theta"].clamp(LOW, HIGH)}

        def evaluate(theta: Tree, x: Tree) -> dict[str, float]:
            moved = project({"theta": theta["theta"] - exact.hypergradient(theta)["theta"]})[
                "theta"
            ]
            numbers = torch.stack(
                [
                    exact.value(theta) / self.starts,
                    upper(theta, x, {}) / self.starts,
                    (theta["theta"] + x["x"]).abs().mean(),
                    (theta["theta"] - moved).abs().mean(),
                ]
            )
            return dict(zip(self.metrics, numbers.tolist(), strict=True))

        return Problem(
            theta0=project({"theta": (3.5 * unit[0]).to(device, dtype)}),
            x0={"x": (13.5 * unit[1] - 5).to(device, dtype)},
            g=lower,
            f=upper,
            project=project,
            evaluate=evaluate,
        )


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [ToyPenalty]
