"""The derivative through the selected branch's own last SGD step: exact, first order, without a training pass more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, final

import torch
from attrs import field, frozen, validators

from hgms_core import (
    Branch,
    ConfigError,
    Cost,
    Hypergradient,
    Key,
    LastStep,
    Problem,
    State,
    Tree,
    cross_product,
    upper_gradients,
)
from hgms_hypergradients.upper import upper_batch


@final
@frozen(kw_only=True)
class ThroughStep:
    """∇_θ of f(θ, x⁺(θ)), where x⁺ = x − η ∇_x g(θ, x; B) is the step that the selected branch ended with::

        h = ∇_θ f(θ, x⁺) − η ∇²_θx g(θ, x; B) v,      v = ∇_x f(θ, x⁺)

    With one lower step a branch this is the hypergradient of what was done, not an approximation: it equals double backward.
    For g = Σ_s ω_s(θ) ℓ_s it reads ∂F/∂ω_s = −η⟨v, ∇ℓ_s(x; B)⟩, and no second derivative of the model appears. With K > 1 steps
    it is the derivative through the last one (truncation to one step).

    Use for language models: it works with flash attention, activation checkpointing and quantised bases. Avoid when many lower
    steps lie between θ and the state that is scored.

    Arguments:
        derivative: how ∇²_θx g·v is taken. ``difference``: two forward passes of the branch's batch, at x ± τv, for all
            sources at once; ``exact``: one forward pass with tangents (not through flash attention or a quantised base);
            ``per-source``: one backward pass a source, ⟨v, ∇ℓ_s⟩ (only where g mixes named sources).
        displacement: τ‖v‖ of ``difference`` (None: from x's precision, fit for a base in float32; with one in bfloat16 the
            losses carry noise of about 1e-3 and a longer one, such as 1.0, is better).
        upper_batch_size: validation rows of the role ``differentiate`` for f (None: all).

    Errors: ConfigError from a generator whose last step is not linear in ∇g, and from ``per-source`` without sources.

    Cost: 1 upper gradient, 1 cross product (``per-source``: S lower gradients instead), with K > 1 steps another K − 1 lower
    gradients.

    >>> problem = Problem(theta0={"t": torch.tensor([1.0])}, x0={"x": torch.tensor([3.0])},
    ...                   g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(), f=lambda t, x, _: (x["x"] ** 2).sum())
    >>> def last_step():                          # from x = 3 with η = 1/4: x⁺ = 3 − ¼·2·(3 − 1) = 2
    ...     return LastStep(x=problem.x0, batch={}, rows=1, rate=0.25)
    >>> branch = Branch(x={"x": torch.tensor([2.0])}, replay=None, last_step=last_step)
    >>> h = ThroughStep(derivative="exact").estimate(problem, problem.theta0, branch, Key(0), {})[0].value["t"]
    >>> h                                         # dF/dt = 2x⁺ · ∂x⁺/∂t = 4 · ½
    tensor([2.])

    Source: HG-MS paper, experiments on language models (the hypergradient "through the selected branch"; its form is this
    project's, since the paper does not give one).
    """

    name: ClassVar[str] = "through-step"
    testing_failures: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("closed-form-ridge", "central-difference"),
        "one lower step stands for the solution: η·I for the inverse Hessian, exact where H = I/η",
    )
    derivative: Literal["difference", "exact", "per-source"] = field(
        default="difference", validator=validators.in_(["difference", "exact", "per-source"])
    )
    displacement: float | None = field(default=None, validator=validators.optional(validators.gt(0)))
    upper_batch_size: int | None = field(
        default=None, validator=validators.optional([validators.instance_of(int), validators.gt(0)])
    )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"sources"} if self.derivative == "per-source" else ())

    def init(self, problem: Problem) -> State:
        return {}

    def estimate(self, problem: Problem, theta: Tree, branch: Branch, key: Key, state: State) -> tuple[Hypergradient, State]:
        if branch.last_step is None:
            raise ConfigError(
                "hypergradient 'through-step' differentiates through the last step of a branch, and this generator tells none\n"
                "  use it with generator 'branches' and optimizer = \"sgd\", or take 'one-step'"
            )
        above, upper_rows = upper_batch(problem, key, self.upper_batch_size)
        loss, direct, v = upper_gradients(lambda t, x: problem.f(t, x, above), theta, branch.x)
        last = branch.last_step()
        if self.derivative == "per-source":
            mixed, cost = _per_source(problem, theta, last, v)
        else:
            mixed = cross_product(
                lambda t, x: problem.g(t, x, last.batch),
                theta,
                last.x,
                v,
                "vjp" if self.derivative == "exact" else "difference",
                self.displacement,
            )
            passes = 1 if self.derivative == "exact" else 2
            cost = Cost(cross_products=1, rows=passes * last.rows)
        value = {name: direct[name] - last.rate * mixed[name] for name in direct}
        cost = cost + last.cost + Cost(upper_gradients=1, rows=upper_rows)
        return Hypergradient(value=value, upper_loss=loss, cost=cost), state


def _per_source(problem: Problem, theta: Tree, last: LastStep, v: Tree) -> tuple[Tree, Cost]:
    """∂_θ Σ_s ω_s(θ) a_s with a_s = ⟨v, ∇ℓ_s(x; B)⟩: one graph, a backward pass a source."""
    sources = problem.sources
    if sources is None:
        raise ConfigError('derivative = "per-source" needs a lower loss that mixes named sources; use "difference" or "exact"')
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in last.x.items()}
    with torch.enable_grad():
        losses = sources.losses(leaves, last.batch)
        slopes = []
        for loss in losses.unbind():
            grads = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, materialize_grads=True)
            slopes.append(torch.stack([(grad * v[name]).sum() for name, grad in zip(leaves, grads, strict=True)]).sum())
        upper = {name: leaf.detach().requires_grad_() for name, leaf in theta.items()}
        value = (sources.weights(upper) * torch.stack(slopes).detach()).sum()
        mixed = torch.autograd.grad(value, list(upper.values()), materialize_grads=True)
    count = len(sources.names)
    return dict(zip(upper, mixed, strict=True)), Cost(lower_gradients=count, rows=count * last.rows)
