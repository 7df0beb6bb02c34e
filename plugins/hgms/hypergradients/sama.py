"""SAMA: the derivative of one step of the lower optimiser, by first-order gradients only."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal, final

import attrs
import torch
from attrs import field
from torch import Tensor

from hgms.compiled import form
from hgms.config import lowering
from hgms.optim.adam import adam
from hgms_core import (
    Candidates,
    Cost,
    Estimate,
    Key,
    Loss,
    Problem,
    Selection,
    State,
    Tree,
    component,
    cross_product,
    gradient,
    norm,
    upper_gradients,
)
from hgms_core.capabilities import Capabilities, HasTestingInstance
from hgms_core.trees import require_grad
from hgms_core.validators import decay_rate, each, optional_positive, positive


@attrs.frozen
class Step:
    """The settings of the optimiser's step, and of the derivative along v."""

    lr: float
    betas: tuple[float, float]
    eps: float
    derivative: Literal["difference", "exact"]
    displacement: float | None
    precision: torch.dtype | None


@final
@component
class Sama:
    """Implicit differentiation of the optimiser's fixed point u(∇_x g) = 0.

    The identity replaces its Jacobian in x::

        h = ∇_θ f(θ, x̂) − ∇²_θx g(θ, x̂; B) v,      v = D ∇_x f(θ, x̂),      D = ∂u/∂(∇_x g)

    u is the optimiser's next step x̂ − x⁺. If the generator provides Adam's moments m and v
    (``branches`` with ``optimizer = "adamw"``), D is diagonal::

        u = η m⁺/(√v⁺ + ε),   m⁺ = β₁m + (1 − β₁)g,   v⁺ = β₂v + (1 − β₂)g²,   g = ∇_x g(θ, x̂; B)
        D = η [(1 − β₁)β₂ v − β₁(1 − β₂) m g] / (v⁺)^{3/2}                                (at ε = 0)

    With any other generator, D is η·I. The method needs three first-order gradients of g and one of
    f, and no second derivative.

    Use for large models that Adam trains, as a cheap estimator in the units of the optimiser's
    steps. Avoid when the accuracy of ∇F matters: it neglects all curvature.

    Parameters
    ----------
    lr, betas, eps
        The same as in the generator's optimiser. Bias corrections are neglected.
    derivative
        Derivative of ∇_θ g along v: a central ``difference``, or ``exact`` by forward mode.
    displacement
        Length of the difference on each side, in units of ‖x‖ (None: from the floating-point
        precision).
    batch_size, upper_batch_size
        Lower and validation rows (None: all).

    Notes
    -----
    Cost: 1 lower gradient, 1 upper gradient, 1 cross product.

    Source: Choe, Mehta, Ahn, Neiswanger, Xie, Strubell, Xing, *Making scalable meta learning
    practical*, NeurIPS 2023 (arXiv 2310.05674), and its implementation in Betty.

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={"t": torch.tensor([3.0])},
    ...     x0={"x": torch.tensor([3.0])},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: (x["x"] ** 2).sum(),
    ... )
    >>> from hgms_core import Branch
    >>> estimate, _ = Sama(lr=0.5).estimate(
    ...     problem, problem.theta0, *Branch(x=problem.x0).as_candidates(), Key(0), {}
    ... )
    >>> round(estimate.value["t"].item(), 2)  # without moments the step is plain gradient descent's
    6.0
    """

    name: ClassVar[str] = "sama"
    capabilities: ClassVar[Capabilities] = frozenset({HasTestingInstance})
    testing_failures: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("closed-form-ridge", "central-difference"),
        (
            "the identity stands for the base Jacobian: η·I for the inverse Hessian, exact where "
            "H = I/η"
        ),
    )
    lr: float = field(default=1e-3, validator=positive)
    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=each(decay_rate))
    eps: float = field(default=1e-8, validator=positive)
    derivative: Literal["difference", "exact"] = "difference"
    displacement: float | None = field(default=None, validator=optional_positive)
    batch_size: int | None = field(default=None, validator=optional_positive)
    upper_batch_size: int | None = field(default=None, validator=optional_positive)

    memory_hints = lowering(other=["batch_size"])

    @classmethod
    def testing_instance(cls) -> Sama:
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
        below, rows = problem.lower_data.sample(key.fold("lower"), self.batch_size)
        above, upper_rows = problem.upper_data["differentiate"].sample(
            key.fold("upper"), self.upper_batch_size
        )
        step = Step(
            self.lr, self.betas, self.eps, self.derivative, self.displacement, problem.precision
        )
        moments = [
            {
                name: leaf
                for name in branch.x
                if (leaf := branch.aux.get(f"{kind}.{name}")) is not None
            }
            for kind in "mv"
        ]
        run = form(
            problem.compiler,
            (self.name, problem.f, problem.g, step),
            partial(_sama, problem.f, problem.g, step),
        )
        loss, value, length = run(theta, branch.x, moments, below, above)
        passes = 2 if self.derivative == "difference" else 1
        cost = Cost(
            lower_gradients=1,
            upper_gradients=1,
            cross_products=1,
            rows=upper_rows + (1 + passes) * rows,
        )
        return Estimate(value=value, upper_loss=loss, lower_gradient_norm=length, cost=cost), state


def _sama(
    f: Loss,
    g: Loss,
    step: Step,
    theta: Tree,
    x: Tree,
    moments: list[Tree],
    below: Tree,
    above: Tree,
) -> tuple[Tensor, Tree, Tensor]:
    """Return f, h and ‖∇_x g‖."""
    loss, direct, slope = upper_gradients(lambda theta, x: f(theta, x, above), theta, x)
    grads, _ = gradient(g, theta, x, below)
    v = adapt(slope, dict(zip(x, grads, strict=True)), x, moments, step)
    strategy: Literal["vjp", "difference"] = "vjp" if step.derivative == "exact" else "difference"
    lower = partial(_on, g, below)
    mixed = cross_product(lower, theta, x, v, strategy, step.displacement, step.precision)
    length = norm(dict(zip(x, grads, strict=True)))
    return loss, {name: direct[name] - mixed[name] for name in direct}, length


def _on(loss: Loss, batch: Tree, theta: Tree, x: Tree) -> Tensor:
    return loss(theta, x, batch)


def adapt(slope: Tree, grads: Tree, x: Tree, moments: list[Tree], step: Step) -> Tree:
    """Return D · ``slope``: the derivative of the optimiser's step in the gradient, along
    ``slope``.
    """
    if any(len(tree) < len(x) for tree in moments):
        return {name: step.lr * leaf for name, leaf in slope.items()}
    leaves = require_grad(grads)
    with torch.enable_grad():
        m, v = moments
        after, _, _ = adam(x, leaves, m, v, (step.lr, 1.0), betas=step.betas, eps=step.eps)
        through = torch.autograd.grad(
            list(after.values()), list(leaves.values()), [slope[name] for name in after]
        )
    return {name: -leaf for name, leaf in zip(leaves, through, strict=True)}
