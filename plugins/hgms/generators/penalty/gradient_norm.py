"""G-PBGD: the lower level as a penalty on ‖∇_y g‖²."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms.compiled import Numbers
from hgms.generators.penalty import base
from hgms.generators.penalty.compositions import single_loop
from hgms.generators.penalty.ramp import Ramp
from hgms_core import Composition, Cost, Key, Loss, Problem, State, Tree, component, hookimpl
from hgms_core.hypergrad import twice_differentiable_attention
from hgms_core.trees import require_grad
from hgms_core.validators import decay_rate, positive


@final
@component
class GradientNorm(base.PenaltyStep):
    """The lower state y of G-PBGD, and the upper gradient of the pass that moves it.

    At outer step k::

        L = c_k [f(θ, y) + ½ γ_k ‖∇_y g(θ, y)‖²]
        y ← y − η ∇_y L            (with momentum: its running sum),   h = ∇_θ L at the old y
        γ_k = min(γ, γ_0 + (γ − γ_0) k / K),   c_k = min(1/γ_k, 1)

    ∇L needs one Hessian product and one product with the mixed derivative, both along ∇_y g: one
    backward pass through the gradient's graph computes both. Combine with hypergradient ``carried``
    and an outer ``sgd``.

    With mini-batches, ‖∇_y g‖² becomes ⟨∇_y g_A, ∇_y g_B⟩ for two independently drawn batches A and
    B. Its gradient in θ and y is unbiased. The square of one batch's gradient is larger on average,
    by the variance of that gradient. Its gradient in θ pushes down the weights of all examples,
    even at the solution.

    Use when g is twice differentiable and its stationary points are its minima (the
    Polyak–Łojasiewicz inequality). Avoid when g has saddle points or maxima near y, because ‖∇_y g‖
    vanishes there too. Avoid when Hessian products are expensive.

    Parameters
    ----------
    lr
        η.
    momentum
        Of y.
    gamma
        γ.
    ramp
        γ_0 and K (:class:`Ramp`).
    normalise
        Multiply by c_k, which keeps the step bounded as γ grows; else c_k = 1.
    batch_size, upper_batch_size
        Rows of each of the two lower batches and of the upper batch (None: all).
    count, noise, carry_rule
        N states on separate batches, as in ``value-gap``.

    Raises
    ------
    ConfigError
        If all N candidates would be equal.

    Notes
    -----
    Cost: for each of N: 1 lower gradient, 1 product, 1 cross product, 1 upper gradient; with
    mini-batches 2 of each, except for the upper gradient. Memory: N lower states (2N with momentum)
    and the graph of one gradient (of two with mini-batches).

    Source: Shen and Chen, *On penalty-based bilevel gradient descent method* (2023), G-PBGD.

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={"t": torch.ones(1)},
    ...     x0={"x": torch.zeros(1)},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: (x["x"] ** 2).sum(),
    ... )
    >>> generator = GradientNorm(lr=0.25, gamma=2.0, ramp=Ramp(steps=0))
    >>> candidates = generator.propose(
    ...     problem, problem.theta0, generator.init(problem, Key(0)), Key(0)
    ... )
    >>> (
    ...     candidates.x["x"],
    ...     candidates.aux["theta.t"],
    ... )  # ∇_y g = −2;  c = 1/2:  ∇_y L = H ∇_y g = −4,  h = 4
    (tensor([[1.]]), tensor([[4.]]))
    """

    name: ClassVar[str] = "gradient-norm"
    needs: ClassVar[frozenset[str]] = frozenset({"smooth-lower"})

    lr: float = field(default=0.1, validator=positive)
    momentum: float = field(default=0.0, validator=decay_rate)
    gamma: float = field(default=37.0, validator=positive)
    ramp: Ramp = field(factory=Ramp)
    normalise: bool = True

    def init(self, problem: Problem, key: Key) -> State:
        start = super().init(problem, key)
        return start | {"aux": base.no_moments(start["x"]) if self.momentum else {}}

    def numbers(self, step: int) -> tuple[float, ...]:
        """Return c_k and ½ c_k γ_k."""
        gamma, scale = self.ramp.weights(self.gamma, step, self.normalise)
        return scale, 0.5 * scale * gamma

    def draw(self, problem: Problem, key: Key) -> tuple[list[Tree], list[Tree]]:
        # Each batch has a separate key: batches from one shuffled epoch would not be independent.
        below = [
            problem.lower_data.sample(key.fold("lower", batch), self.batch_size)[0]
            for batch in range(self._passes(problem))
        ]
        return below, [self.upper_batch(problem, key)]

    def cost(self, problem: Problem) -> Cost:
        rows, upper_rows = self.rows(problem)
        passes = self._passes(problem)
        return Cost(
            lower_gradients=passes,
            products=passes,
            cross_products=passes,
            upper_gradients=1,
            rows=3 * passes * rows + upper_rows,
        )

    def _passes(self, problem: Problem) -> int:
        return 1 if base.is_full(problem.lower_data, self.batch_size) else 2

    def move(
        self,
        losses: tuple[Loss, Loss],
        numbers: Numbers,
        y: Tree,
        aux: Tree,
        theta: Tree,
        below: list[Tree],
        above: list[Tree],
    ) -> tuple[Tree, Tree, Tensor]:
        g, f = losses
        scale, penalty = numbers
        upper = require_grad(theta)
        lower = require_grad(y)
        leaves = list(lower.values())
        with torch.enable_grad(), twice_differentiable_attention():
            values = [g(upper, lower, batch) for batch in below]
            grads = [
                torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True)
                for value in values
            ]
            square = torch.stack(
                [(a * b).sum() for a, b in zip(grads[0], grads[-1], strict=True)]
            ).sum()
            value = f(upper, lower, above[0])
            to_theta, to_y = base.gradients(scale * value + penalty * square, upper, lower)

        to_y, kept = base.with_momentum(to_y, base.untag("m", aux), self.momentum)
        mean = [(a.detach() + b.detach()) / 2 for a, b in zip(grads[0], grads[-1], strict=True)]
        size = torch.stack([leaf.square().sum() for leaf in mean]).sum().sqrt()
        kept |= {
            **base.tag("theta", to_theta),
            "upper_loss": value.detach(),
            "lower_gradient_norm": size,
        }
        return base.descend(y, to_y, self.lr), kept, torch.stack(values).detach().mean()


G_PBGD = single_loop(
    "g-pbgd",
    "Penalty on ‖∇_y g‖²: y and θ move together, one Hessian product a step.",
    "Shen and Chen 2023, G-PBGD.",
    {"name": "gradient-norm", "lr": 0.1, "gamma": 5.0, "ramp": {"steps": 1000}},
)


@hookimpl
def hgms_register_generators() -> list[type]:
    return [GradientNorm]


@hookimpl
def hgms_register_methods() -> list[Composition]:
    return [G_PBGD]
