"""Task `quadratic`: ridge regression with a closed-form hypergradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, final

import torch
from attrs import field
from torch import Tensor

from hgms.config import check_memory
from hgms.tasks.ridge_closed_form import RidgeClosedForm, squared_loss
from hgms_core import ConfigError, Data, Key, Problem, Tree, component, hookimpl
from hgms_core.capabilities import Capabilities, HasClosedForm
from hgms_core.validators import at_least, not_negative


def _lower(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    residual = batch["a"] @ x["x"] - batch["b"]
    return (
        0.5 * residual.square().mean() + 0.5 * (theta["log_penalty"].exp() * x["x"].square()).sum()
    )


def _upper(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    return squared_loss(x, batch)


@final
@component
class Quadratic:
    """Ridge regression: the log-penalties are the upper variable, the validation error is the upper
    loss.

    ::

        g(θ, x) = (1/2n) Σ_i (a_iᵀx − b_i)² + ½ Σ_j e^{θ_j} x_j²,
            f(x) = (1/2m) Σ_i (a'_iᵀx − b'_i)²

    AᵀA/n has the given condition number (eigenvalues log-spaced from 1 down to 1/condition), and b
    = A x° + noise. The validation rows are drawn from the same distribution. x*(θ), F(θ) and ∇F(θ)
    come from :meth:`closed_form`.

    Use when a hypergradient, a linear solver or a step size must be checked against exact values.
    Avoid for comparing the effect of selection: the lower minimiser is unique (``sphere`` has a
    manifold of minimisers).

    Parameters
    ----------
    rows, validation_rows
        n and m.
    features
        d ≤ n.
    noise
        Standard deviation of the targets' noise.
    condition
        Of AᵀA/n (the lower Hessian's is smaller because of the penalty).
    penalty
        One θ per ``feature``, or one ``shared`` by all.

    Raises
    ------
    ConfigError
        For values outside the ranges of the fields.

    Notes
    -----
    Cost of ``evaluate``: three d × d solves.

    Source: standard; the closed form is the implicit function theorem applied to the normal
    equations.

    Examples
    --------
    >>> task, cpu, double = Quadratic(features=5), torch.device("cpu"), torch.float64
    >>> problem, exact = task.problem(0, cpu, double), task.closed_form(0, cpu, double)
    >>> round(
    ...     problem.evaluate(problem.theta0, exact.solution(problem.theta0))["lower_distance"], 12
    ... )
    0.0
    """

    name: ClassVar[str] = "quadratic"
    capabilities: ClassVar[Capabilities] = frozenset({HasClosedForm})
    version: ClassVar[str] = "1"
    traits: ClassVar[frozenset[str]] = frozenset(
        {
            "smooth-lower",
            "few-upper",
            "per-example-losses",
            "stop-rows",
            "validation-rows",
            "closed-form",
        }
    )
    metric_rows: ClassVar[Mapping[str, str]] = {"upper_loss": "validation"}
    metrics: ClassVar[Mapping[str, bool]] = dict.fromkeys(
        ("value", "upper_loss", "lower_distance", "hypergradient_norm"), False
    )

    rows: int = field(default=200, validator=at_least(1))
    validation_rows: int = field(default=100, validator=at_least(1))
    features: int = field(default=20, validator=at_least(1))
    noise: float = field(default=0.5, validator=not_negative)
    condition: float = field(default=10.0, validator=at_least(1))
    penalty: Literal["feature", "shared"] = "feature"

    def __attrs_post_init__(self) -> None:
        if self.features > self.rows:
            raise ConfigError(
                "out-of-range",
                f"features={self.features} must be at most rows={self.rows}, so that AᵀA/n has a "
                "condition number",
                place=("features",),
            )

    def closed_form(self, seed: int, device: torch.device, dtype: torch.dtype) -> RidgeClosedForm:
        """The exact solution, value and hypergradient of ``problem`` with the same arguments."""
        check_memory("rows × features", self.rows, self.features)
        check_memory("validation_rows × features", self.validation_rows, self.features)
        generator = Key(seed).fold("quadratic").generator()

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        # Drawn and factored in float64 on the CPU, so that every device and precision has the same
        # problem.
        basis = torch.linalg.qr(normal(self.features, self.features)).Q
        spread = torch.logspace(0, -0.5, self.features, base=self.condition, dtype=torch.float64)
        a = self.rows**0.5 * torch.linalg.qr(normal(self.rows, self.features)).Q * spread @ basis.T
        validation_a = normal(self.validation_rows, self.features) * spread @ basis.T
        truth = normal(self.features)
        b = a @ truth + self.noise * normal(self.rows)
        validation_b = validation_a @ truth + self.noise * normal(self.validation_rows)
        return RidgeClosedForm(
            *(leaf.to(device, dtype) for leaf in (a, b, validation_a, validation_b))
        )

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        exact = self.closed_form(seed, device, dtype)
        validation = Data.of({"a": exact.validation_a, "b": exact.validation_b})

        def evaluate(theta: Tree, x: Tree) -> dict[str, float]:
            gap = torch.linalg.vector_norm(x["x"] - exact.solution(theta)["x"])
            slope = torch.linalg.vector_norm(exact.hypergradient(theta)["log_penalty"])
            numbers = torch.stack(
                [exact.value(theta), _upper(theta, x, validation.whole), gap, slope]
            )
            return dict(zip(self.metrics, numbers.tolist(), strict=True))

        size = self.features if self.penalty == "feature" else 1
        return Problem(
            theta0={"log_penalty": torch.zeros(size, dtype=dtype, device=device)},
            x0={"x": torch.zeros(self.features, dtype=dtype, device=device)},
            g=_lower,
            f=_upper,
            lower_data=Data.of({"a": exact.a, "b": exact.b}),
            # F is a function of all validation rows, so every role uses all rows.
            upper_data=dict.fromkeys(("differentiate", "select", "stop"), validation),
            evaluate=evaluate,
        )


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [Quadratic]
