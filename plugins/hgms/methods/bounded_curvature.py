"""Fixed rates for a steep lower level: a multiple of the lower loss with bounded curvature."""

from __future__ import annotations

from typing import Any, ClassVar, cast, final

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from hgms.facts import around_a_pipeline, innermost
from hgms.methods.inner_pipeline import Wrapper, another
from hgms_core import (
    Batch,
    Cost,
    Key,
    Loss,
    Method,
    Problem,
    Record,
    Rows,
    State,
    Tree,
    component,
    curvature,
    hookimpl,
)
from hgms_core.capabilities import Capabilities, HasOutputs, StacksCandidates, capabilities_of
from hgms_core.validators import positive

PRODUCTS = 20
"""Products of the power iteration."""
ROWS = 256
"""Rows of its batch at most: the memory of a step of the generator suffices."""


@final
@component
class BoundedCurvature(Wrapper):
    """A pipeline with the lower loss c·g, where c ≤ 1 bounds the curvature at the start::

        c = min(1, max_curvature / L),      L = λ_max(∇²_xx g(θ0, x0; batch))

    c·g has the minimisers and the hypergradient of g. Steps of gradient descent with the rate η
    diverge if ηL > 2. With ``max_curvature`` below 2/η, a fixed rate suits problems of any scale.
    If L is at most ``max_curvature``, nothing changes. In a configuration, set the field in the
    table of the pipeline: ``max_curvature = 15.0``.

    Use with fixed rates, for the lower level or a linear solver. Avoid if θ changes the curvature
    by orders of magnitude, because c is computed once. Quantities in the units of g refer to c·g:
    a ridge, a temperature, a penalty, and the residual and curvature in the record.

    Parameters
    ----------
    method
        a pipeline, or a wrapper around one.
    max_curvature
        The largest eigenvalue of the lower Hessian at the start, > 0, in the units of g / x².

    Notes
    -----
    Cost: 40 lower gradients at the start, for 20 steps of a power iteration with central
    differences, on a batch of the generator's ``batch_size``, at most 256 rows.

    Source: the classical bound on the rate of gradient descent, as in Nesterov, *Lectures on convex
    optimization* (2018), section 2.1.5.

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={"t": torch.zeros(1)},
    ...     x0={"x": torch.ones(1)},
    ...     g=lambda t, x, _: 50 * (x["x"] ** 2).sum(),
    ...     f=lambda t, x, _: x["x"].sum(),
    ... )
    >>> round(largest_curvature(problem, seed=0)[0])
    100
    >>> float(scaled_problem(problem, 0.1).g({}, {"x": torch.ones(1)}, {}))
    5.0
    """

    name: ClassVar[str] = "bounded-curvature"

    method: Method = field(metadata={"flat": True}, validator=around_a_pipeline)
    max_curvature: float = field(validator=positive)

    def init(self, problem: Problem, seed: int) -> State:
        rows = getattr(innermost(self.method).generator, "batch_size", None) or ROWS
        largest, cost = largest_curvature(problem, seed, min(rows, ROWS))
        scale = self.max_curvature / largest if largest > self.max_curvature else 1.0
        state = self.method.init(scaled_problem(problem, scale), seed)
        counts = (Cost(**state["cost"]) + cost).numbers()
        return {**state, "lower_scale": scale, "cost": counts}

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        scale = state["lower_scale"]
        following, record = self.method.step(scaled_problem(problem, scale), state, progress)
        measured = {
            name: record[name] / scale
            for name in ("lower_loss", "lower_gradient_norm")
            if scale != 1.0 and record[name] is not None
        }
        return following, {**record, **measured}


def largest_curvature(problem: Problem, seed: int, rows: int = ROWS) -> tuple[float, Cost]:
    """Return the largest absolute eigenvalue of ∇²_xx g at (θ0, x0) on ``rows`` rows, and the cost.

    A power iteration approaches it from below. The value is infinite or NaN if g is.
    """
    key = Key(seed).fold("curvature")
    batch, used = problem.lower_data.sample(key.fold("rows"), rows)
    at = curvature(
        lambda x: problem.g(problem.theta0, x, batch),
        problem.x0,
        "difference",
        precision=problem.precision,
    )
    leaf = next(iter(problem.x0.values()))
    size = sum(leaf.numel() for leaf in problem.x0.values())
    v = torch.randn(size, generator=key.generator()).to(leaf)
    length = torch.linalg.vector_norm(v)
    for _ in range(PRODUCTS):
        v = at.matvec(v / length.clamp_min(torch.finfo(v.dtype).tiny))
        length = torch.linalg.vector_norm(v)
    gradients = 2 * PRODUCTS
    return float(length), Cost(lower_gradients=gradients, rows=gradients * used)


def scaled_problem(problem: Problem, scale: float) -> Problem:
    """Return the same problem with the lower loss scale·g."""
    if scale == 1.0:
        return problem
    key = ("bounded-curvature", scale)
    return another(problem, key, lambda: _scale(problem, problem.g, scale))


def _scale(problem: Problem, g: Loss, scale: float) -> Problem:
    changed = evolve(problem, g=Scaled(g, scale))
    rows = problem.find(Rows)
    if rows is None:
        return changed
    scaled = evolve(
        rows,
        losses=lambda x, batch: scale * rows.losses(x, batch),
        regulariser=lambda theta, x, batch: scale * rows.regulariser(theta, x, batch),
    )
    return changed.with_extensions(scaled)


@frozen(eq=False)
class Scaled:
    """The loss scale·g, with the abilities of g."""

    loss: Any
    scale: float

    @property
    def capabilities(self) -> Capabilities:
        return capabilities_of(self.loss)

    def __call__(self, theta: Tree, x: Tree, batch: Batch) -> Tensor:
        return cast(Tensor, self.scale * self.loss(theta, x, batch))

    def stacked_losses(self, theta: Tree, x: Tree, batch: Batch, own_batch: bool) -> Tensor:
        stacked: StacksCandidates = self.loss
        return self.scale * stacked.stacked_losses(theta, x, batch, own_batch)

    def outputs(self, x: Tree, batch: Batch) -> Any:
        loss: HasOutputs = self.loss
        return loss.outputs(x, batch)

    def criterion(self, theta: Tree, x: Tree, z: Any, batch: Batch) -> Tensor:
        loss: HasOutputs = self.loss
        return self.scale * loss.criterion(theta, x, z, batch)


@hookimpl
def hgms_register_methods() -> list[type]:
    return [BoundedCurvature]
