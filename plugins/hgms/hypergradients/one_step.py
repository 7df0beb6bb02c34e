"""The derivative of one additional SGD step from the selected state: first order, exact, cheap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, final

from attrs import field

from hgms.config import lowering
from hgms.hypergradients.step import through
from hgms_core import (
    Candidates,
    Estimate,
    Key,
    LastStep,
    Problem,
    Selection,
    State,
    Tree,
    component,
)
from hgms_core.capabilities import Capabilities, HasTestingInstance
from hgms_core.validators import optional_positive, positive


@final
@component
class OneStep:
    """∇_θ of f(θ, x⁺) with x⁺ = x̂ − η ∇_x g(θ, x̂), one SGD step from the selected state x̂::

        h = ∇_θ f(θ, x⁺) − η ∇²_θx g(θ, x̂) ∇_x f(θ, x⁺)

    No Hessian is needed: along one step, the hypergradient needs only the mixed derivative,
    computed as one directional derivative. It equals double backward through the step. It replaces
    the Hessian's inverse by η·I, so the length of h has little meaning: combine it with an
    optimiser that normalises (``adam``).

    Use when Hessian products are expensive or impossible (flash attention, sharded models). Avoid
    when the accuracy of ∇F matters.

    Parameters
    ----------
    lr
        η, the step size of the virtual step.
    derivative
        ``exact`` by forward mode, or ``difference``: two evaluations of ∇_θ g along ±∇f (the finite
        difference of DARTS).
    batch_size, upper_batch_size
        Lower and validation rows (None: all).

    Notes
    -----
    Cost: 1 lower gradient, 1 upper gradient, 1 cross product.

    Source: Liu, Simonyan, Yang, *DARTS* (2019), second-order approximation; the exact form:
    one-step unrolling.

    Examples
    --------
    >>> import torch
    >>> problem = Problem(
    ...     theta0={"t": torch.tensor([3.0])},
    ...     x0={"x": torch.tensor([3.0])},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: (x["x"] ** 2).sum(),
    ... )
    >>> from hgms_core import Branch
    >>> estimate, _ = OneStep(lr=0.5).estimate(
    ...     problem, problem.theta0, *Branch(x=problem.x0).as_candidates(), Key(0), {}
    ... )
    >>> estimate.value["t"]  # η = 1/L: one step solves this lower level
    tensor([6.])
    """

    name: ClassVar[str] = "one-step"
    capabilities: ClassVar[Capabilities] = frozenset({HasTestingInstance})
    testing_failures: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("closed-form-ridge", "central-difference"),
        "one lower step stands for the solution: η·I for the inverse Hessian, exact where H = I/η",
    )
    lr: float = field(default=0.1, validator=positive)
    derivative: Literal["exact", "difference"] = "exact"
    batch_size: int | None = field(default=None, validator=optional_positive)
    upper_batch_size: int | None = field(default=None, validator=optional_positive)

    memory_hints = lowering(other=["batch_size"])

    @classmethod
    def testing_instance(cls) -> OneStep:
        """For ``hgms check``: η = 1 is exact at the minimum of its test problem, H = I."""
        return cls(lr=1.0)

    def init(self, problem: Problem) -> State:
        return {}

    def estimate(
        self,
        problem: Problem,
        theta: Tree,
        candidates: Candidates,
        selection: Selection,
        key: Key,
        state: State,
    ) -> tuple[Estimate, State]:
        branch = candidates.branch(selection.index)
        batch, rows = problem.lower_data.sample(key.fold("lower"), self.batch_size)
        step = LastStep(x=branch.x, batch=batch, rows=rows, rate=self.lr)
        above, upper_rows = problem.upper_data["differentiate"].sample(
            key.fold("upper"), self.upper_batch_size
        )
        return through(problem, theta, step, above, upper_rows, self.derivative), state
