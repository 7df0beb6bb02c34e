"""Task `sphere`: a manifold of lower minimisers of any dimension, in closed form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

import attrs
import torch
from attrs import field
from torch import Tensor

from hgms.config import check_memory
from hgms_core import ConfigError, Key, Problem, Tree, component, hookimpl
from hgms_core.capabilities import Capabilities, HasClosedForm
from hgms_core.validators import at_least, not_negative, positive


@final
@attrs.frozen(eq=False)
class SphereClosedForm:
    """The losses of a :class:`Sphere` problem, and x*(θ), F(θ), ∇F(θ), θ* and F* in closed form.

    ``inside``: E [d, k+1]. ``outside``: N [d, d−k−1]. ``tilt``: B. ``slope``: w. ``best``: e.
    ``base``: c₀.
    """

    inside: Tensor
    outside: Tensor
    tilt: Tensor
    slope: Tensor
    best: Tensor
    base: Tensor
    task: Sphere

    def center(self, theta: Tree) -> Tensor:
        """c(θ) = c₀ + γθ, in the coordinates of E."""
        return self.base + self.task.shift * theta["theta"]

    def radius(self, theta: Tree) -> Tensor:
        """r(θ) = r₀ + β eᵀθ."""
        return self.task.radius + self.task.growth * (self.best @ theta["theta"])

    def lower(self, theta: Tree, x: Tree, batch: Tree) -> Tensor:
        """g(θ, x)."""
        on = self.inside.T @ x["x"] - self.center(theta)
        off = self.outside.T @ x["x"] - self.tilt @ theta["theta"]
        return (
            0.25 * (on.square().sum() - self.radius(theta).square()).square()
            + 0.5 * off.square().sum()
        )

    def upper(self, theta: Tree, x: Tree, batch: Tree) -> Tensor:
        """f(θ, x)."""
        t = theta["theta"]
        return (
            t @ (self.inside.T @ x["x"])
            + self.slope @ (self.outside.T @ x["x"])
            + 0.5 * self.task.alpha * t.square().sum()
        )

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
        return (
            -self.task.offset * (self.best @ t)
            - self.radius(theta) * size
            + (0.5 * self.task.alpha + self.task.shift) * size.square()
        )

    def hypergradient(self, theta: Tree) -> Tree:
        """∇F(θ) = −ωe − β‖θ‖e − r(θ) θ/‖θ‖ + (α + 2γ) θ."""
        t = theta["theta"]
        size = torch.linalg.vector_norm(t)
        along = (self.task.offset + self.task.growth * size) * self.best
        return {
            "theta": -along
            - self.radius(theta) * t / size
            + (self.task.alpha + 2 * self.task.shift) * t
        }

    @property
    def theta_star(self) -> Tree:
        """The unique minimiser of F: t* e with t* = (ω + r₀)/(α + 2γ − 2β)."""
        return {"theta": (self.task.offset + self.task.radius) / self.task.curvature * self.best}

    @property
    def optimum(self) -> float:
        """F* = −(ω + r₀)² / (2(α + 2γ − 2β))."""
        return -((self.task.offset + self.task.radius) ** 2) / (2 * self.task.curvature)

    def off_manifold(self, theta: Tree, x: Tree) -> Tensor:
        """The distance from x to S(θ)."""
        on = torch.linalg.vector_norm(self.inside.T @ x["x"] - self.center(theta)) - self.radius(
            theta
        )
        off = self.outside.T @ x["x"] - self.tilt @ theta["theta"]
        return (on.square() + off.square().sum()).sqrt()


@final
@component
class Sphere:
    """Lower minimisers that form a k-sphere in R^d; one point of the sphere is best for the upper
    loss.

    With a seeded orthonormal frame (E, N) of R^d, E of k+1 columns, and θ ∈ R^{k+1}::

        g(θ, x) = ¼ (‖Eᵀx − c(θ)‖² − r(θ)²)² + ½ ‖Nᵀx − Bθ‖²    c(θ) = c₀ + γθ,   r(θ) = r₀ + β eᵀθ
        f(θ, x) = θᵀEᵀx + wᵀNᵀx + (α/2)‖θ‖²
        S(θ)    = {x: ‖Eᵀx − c(θ)‖ = r(θ), Nᵀx = Bθ}
        x*(θ)   = E (c(θ) − r(θ) θ/‖θ‖) + N Bθ
        F(θ)    = −ω eᵀθ − r(θ)‖θ‖ + (α/2 + γ)‖θ‖²,     θ* = e (ω + r₀)/(α + 2γ − 2β)

    c₀ = −ωe − Bᵀw with e a seeded unit vector. For θ ≠ 0 the optimistic minimiser is unique and
    non-degenerate; θ = 0 is a tie and a kink of F. x0 is the *worst* point of S(θ0): a method
    without selection follows it and ends above F*.

    Use when selection, chains or hypergradients on a manifold of any dimension must be compared
    with exact values. Avoid d in the tens of thousands: the frame takes d² numbers.

    Parameters
    ----------
    k, d
        Dimensions of the sphere and of x, 1 ≤ k < d.
    radius
        r₀.
    offset
        ω.
    shift
        γ.
    growth
        β.
    alpha
        α, the weight of the upper penalty; α + 2γ > 2β, and 2βt* < r₀ so that r(θ) > 0 on Θ = {‖θ‖
        ≤ 2t*} (enforced by projection).

    Raises
    ------
    ConfigError
        If these conditions are violated.

    Notes
    -----
    Cost of ``evaluate``: a few products with the frame.

    Source: a construction of this project, after the geometry of the HG-MS paper's assumptions.

    Examples
    --------
    >>> task, cpu, double = Sphere(k=2, d=5), torch.device("cpu"), torch.float64
    >>> problem, exact = task.problem(0, cpu, double), task.closed_form(0, cpu, double)
    >>> abs(
    ...     problem.evaluate(exact.theta_star, exact.solution(exact.theta_star))["upper_gap"]
    ... ) < 1e-12
    True
    """

    name: ClassVar[str] = "sphere"
    capabilities: ClassVar[Capabilities] = frozenset({HasClosedForm})
    version: ClassVar[str] = "1"
    traits: ClassVar[frozenset[str]] = frozenset(
        {"smooth-lower", "direct-upper", "few-upper", "stop-rows", "closed-form"}
    )
    metrics: ClassVar[Mapping[str, bool]] = dict.fromkeys(
        ("upper_gap", "upper_loss", "manifold_distance", "solution_distance"), False
    )

    k: int = field(default=2, validator=at_least(1))
    d: int = field(default=10, validator=at_least(2))
    radius: float = field(default=1.0, validator=positive)
    offset: float = field(default=0.5, validator=positive)
    shift: float = field(default=0.5, validator=not_negative)
    growth: float = field(default=0.2, validator=not_negative)
    alpha: float = field(default=2.0, validator=positive)

    def __attrs_post_init__(self) -> None:
        if self.d <= self.k:
            message = f"d={self.d} must be greater than k={self.k}, the dimension of the sphere"
            raise ConfigError("out-of-range", message, place=("d",))

        if self.curvature <= 0:
            bound = 2 * (self.growth - self.shift)
            message = f"alpha={self.alpha} must be greater than 2 growth - 2 shift = {bound}"
            raise ConfigError("out-of-range", message, place=("alpha",))
        if 2 * self.growth * (self.offset + self.radius) / self.curvature >= self.radius:
            raise ConfigError(
                "out-of-range",
                f"growth={self.growth} lets the radius vanish on Θ",
                place=("growth",),
                hint="decrease growth, or increase alpha",
            )

    @property
    def curvature(self) -> float:
        """α + 2γ − 2β, the second derivative of F along e."""
        return self.alpha + 2 * self.shift - 2 * self.growth

    def closed_form(self, seed: int, device: torch.device, dtype: torch.dtype) -> SphereClosedForm:
        """The losses and exact quantities of ``problem`` with the same arguments."""
        check_memory("d × d", self.d, self.d)
        generator = Key(seed).fold("sphere").generator()

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        # Drawn in float64 on the CPU, so that every device and precision has the same problem.
        size = self.k + 1
        rest = self.d - self.k - 1
        frame = torch.linalg.qr(normal(self.d, self.d)).Q
        tilt = normal(rest, size) / self.d**0.5
        slope = normal(rest) / self.d**0.5
        best = normal(size)
        best = best / torch.linalg.vector_norm(best)
        base = -self.offset * best - tilt.T @ slope
        tensors = (
            frame[:, :size].contiguous(),
            frame[:, size:].contiguous(),
            tilt,
            slope,
            best,
            base,
        )
        inside, outside, tilt, slope, best, base = (tensor.to(device, dtype) for tensor in tensors)
        return SphereClosedForm(inside, outside, tilt, slope, best, base, self)

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        exact = self.closed_form(seed, device, dtype)
        best = exact.best
        reach = float(torch.linalg.vector_norm(exact.theta_star["theta"]))
        # θ0 has the length of θ* and an angle of 53° to it; the worst point of S(θ0) is then also a
        # bad point at θ*.
        across = torch.eye(self.k + 1, dtype=dtype, device=device)[best.abs().argmin()]
        across = across - (across @ best) * best
        theta0 = {"theta": reach * (0.8 * across / torch.linalg.vector_norm(across) + 0.6 * best)}
        worst = exact.point(theta0, theta0["theta"] / torch.linalg.vector_norm(theta0["theta"]))

        def project(theta: Tree) -> Tree:
            size = torch.linalg.vector_norm(theta["theta"])
            return {"theta": theta["theta"] * (2 * reach / size.clamp_min(2 * reach))}

        def evaluate(theta: Tree, x: Tree) -> dict[str, float]:
            gap = torch.linalg.vector_norm(x["x"] - exact.solution(theta)["x"])
            above = exact.value(theta) - exact.optimum, exact.upper(theta, x, {})
            numbers = torch.stack([*above, exact.off_manifold(theta, x), gap])
            return dict(zip(self.metrics, numbers.tolist(), strict=True))

        def fresh(key: Key) -> Tree:
            direction = torch.randn(self.k + 1, generator=key.generator(), dtype=torch.float64).to(
                device, dtype
            )
            return exact.point(theta0, direction / torch.linalg.vector_norm(direction))

        return Problem(
            theta0=theta0,
            x0=worst,
            g=exact.lower,
            f=exact.upper,
            project=project,
            evaluate=evaluate,
            fresh=fresh,
        )


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [Sphere]
