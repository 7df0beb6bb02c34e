"""Fixed rates for a steep lower level: a multiple of the lower loss with bounded curvature."""

from __future__ import annotations

import math
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
GROWTH = 2.0
"""The curvature is measured again if ‖∇_x g‖ exceeds its smallest value by this factor."""
FLOOR = 1e-3
"""Smaller norms than this share of the first one count as equal to it."""
TOLERANCE = 1.1
"""The excess over the bound that changes c: estimates are not exact."""
RESERVE = 2.0
"""The factor by which the curvature may grow after it was above the bound."""
ROWS = 256
"""Rows of its batch at most: the memory of a step of the generator suffices."""


@final
@component
class BoundedCurvature(Wrapper):
    """A pipeline with the lower loss c·g, where c ≤ 1 bounds the curvature::

        c = min(1, max_curvature / L),      L = λ_max(∇²_xx g(θ0, x0; batch))

    c·g has the minimisers and the hypergradient of g. Steps of gradient descent with the rate η
    diverge if ηL > 2. With ``max_curvature`` below 2/η, a fixed rate suits problems of any scale.
    If L is at most ``max_curvature``, c = 1. In a configuration, set the field in the table of the
    pipeline: ``max_curvature = 15.0``.

    θ can change the curvature: a penalty that grows, for example. If ``lower_gradient_norm`` in the
    record is more than twice its smallest value, L is measured again at (θ, x). If cL is above
    1.1 ``max_curvature``, c becomes max_curvature / (2L), and a compiled step is compiled again.
    Otherwise, the next limit is twice as large.

    Use with fixed rates, for the lower level or a linear solver. Quantities in the units of g refer
    to c·g: a ridge, a temperature, a penalty, and the residual and curvature in the record. After
    a change of c, a kept solution of a linear system is that of the earlier c until it converges.

    Parameters
    ----------
    method
        a pipeline, or a wrapper around one.
    max_curvature
        The largest eigenvalue of the lower Hessian, > 0, in the units of g / x².

    Notes
    -----
    Cost: 40 lower gradients per measurement, for 20 steps of a power iteration with central
    differences, on a batch of the generator's ``batch_size``, at most 256 rows. One measurement is
    at the start, the only one if the method does not record ``lower_gradient_norm``. On an
    accelerator, each step reads one number.

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
    >>> round(largest_curvature(problem, problem.theta0, problem.x0, Key(0))[0])
    100
    >>> float(scaled_problem(problem, 0.1).g({}, {"x": torch.ones(1)}, {}))
    5.0
    """

    name: ClassVar[str] = "bounded-curvature"

    method: Method = field(metadata={"flat": True}, validator=around_a_pipeline)
    max_curvature: float = field(validator=positive)

    def init(self, problem: Problem, seed: int) -> State:
        largest, cost = self._measure(problem, problem.theta0, problem.x0, seed)
        scale = self.max_curvature / largest if largest > self.max_curvature else 1.0
        state = self.method.init(scaled_problem(problem, scale), seed)
        counts = (Cost(**state["cost"]) + cost).numbers()
        norms = {"lower_norm": None, "smallest_norm": None, "norm_floor": None, "growth": GROWTH}
        return {**state, "lower_scale": scale, **norms, "cost": counts}

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        if state["lower_norm"] is not None:
            state = self._bounded(problem, state)
        scale = state["lower_scale"]
        following, record = self.method.step(scaled_problem(problem, scale), state, progress)
        measured = {
            name: record[name] / scale
            for name in ("lower_loss", "lower_gradient_norm")
            if scale != 1.0 and record[name] is not None
        }
        record = {**record, **measured}
        return {**following, "lower_norm": record["lower_gradient_norm"]}, record

    def _bounded(self, problem: Problem, state: State) -> State:
        """Return the state with a smaller c if the last step shows that cL is above the bound."""
        last = torch.as_tensor(state["lower_norm"])
        if state["smallest_norm"] is None:
            return {**state, "smallest_norm": last, "norm_floor": FLOOR * last}
        smallest = torch.maximum(torch.minimum(last, state["smallest_norm"]), state["norm_floor"])
        if bool(last <= state["growth"] * smallest):
            return {**state, "smallest_norm": smallest}
        theta, x = self.method.result(state)
        largest, cost = self._measure(problem, theta, x, state["seed"])
        counts = (Cost(**state["cost"]) + cost).numbers()
        state = {**state, "cost": counts, "smallest_norm": smallest}
        excess = state["lower_scale"] * largest / self.max_curvature
        if not TOLERANCE < excess < math.inf:
            return {**state, "growth": GROWTH * state["growth"]}
        scale = self.max_curvature / (RESERVE * largest)
        return {**state, "lower_scale": scale, "smallest_norm": last}

    def _measure(self, problem: Problem, theta: Tree, x: Tree, seed: int) -> tuple[float, Cost]:
        rows = getattr(innermost(self.method).generator, "batch_size", None) or ROWS
        return largest_curvature(problem, theta, x, Key(seed).fold("curvature"), min(rows, ROWS))


def largest_curvature(
    problem: Problem, theta: Tree, x: Tree, key: Key, rows: int = ROWS
) -> tuple[float, Cost]:
    """Return the largest absolute eigenvalue of ∇²_xx g at (θ, x) on ``rows`` rows, and the cost.

    A power iteration approaches it from below. The value is infinite or NaN if g is.
    """
    batch, used = problem.lower_data.sample(key.fold("rows"), rows)
    at = curvature(
        lambda x: problem.g(theta, x, batch), x, "difference", precision=problem.precision
    )
    leaf = next(iter(x.values()))
    size = sum(leaf.numel() for leaf in x.values())
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
