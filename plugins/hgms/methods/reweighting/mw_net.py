"""A network that maps the loss of a row to its weight, learned through a virtual step of x."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms.compiled import Numbers, launch
from hgms.methods.reweighting import base
from hgms.methods.reweighting.learning_to_reweight import alignments
from hgms.rows import weighted_rows
from hgms_core import (
    Batch,
    Cost,
    Key,
    Loss,
    Problem,
    Record,
    Rows,
    State,
    Tree,
    component,
    gradient,
)
from hgms_core.trees import require_grad
from hgms_core.validators import positive


@final
@component
class MwNet(base.Reweighting):
    """Learn the weight of a row as a function of its loss, V(ℓ; Θ) ∈ (0, 1), together with x.

    On one batch of B lower rows, with ℓ_i at x, which are constant inputs of V::

        V(ℓ; Θ) = σ(a + uᵀ relu(p ℓ + q)),    Θ = (a, u, p, q)    100 hidden units
        x̂(Θ) = x − α ∇_x [1/B Σ_i V(ℓ_i; Θ) ℓ_i(x) + r(x)]                           virtual step
        Θ ← Adam(Θ, ∇_Θ f(x̂(Θ))),   ∇_Θ f = −α/B Σ_i ⟨∇f(x̂), ∇ℓ_i(x)⟩ ∂V(ℓ_i)/∂Θ      meta step
        x ← x − η ∇_x [1/B Σ_i V(ℓ_i; Θ) ℓ_i(x) + r(x)]    actual step, at the new Θ

    θ reports the logits of V(ℓ_i; Θ) for each lower row, at the x and Θ after the outer step.

    Use as the reference of methods that learn a weight for each row, on ``Problem.rows``: about 300
    numbers instead of n. Avoid if a row's loss does not indicate whether the row helps.

    Cost of a lower step: 2 lower gradients (one forward pass, two backward), 1 upper gradient, 1
    cross product (in forward mode). An outer step also computes every lower row's loss. Memory: a
    graph of a gradient.

    Parameters
    ----------
    steps
        Lower steps in one outer step.
    optimizer, lr, momentum
        The actual step.
    schedule
        Lr over the budget, to 0 as a cosine or constant.
    look_ahead
        α.
    meta_lr
        Adam's rate for Θ. The default is that of the source; at 1e-2, all weights of a run can
        become 0.
    hidden
        Units of V.
    batch_size, upper_batch_size
        Lower rows, and validation rows of the role ``differentiate`` (``None``: all).
    keep
        ``best`` returns the state of the lowest upper loss on rows of the role ``stop``; ``last``
        returns the last.

    Notes
    -----
    Source: Shu, Xie, Yi, Zhao, Zhou, Xu, Meng, *Meta-Weight-Net: learning an explicit mapping for
    sample weighting*, NeurIPS 2019 (arXiv 1902.07379), algorithm 1.

    Examples
    --------
    >>> net = first_net(100, Key(0), torch.zeros(1))
    >>> weight_logits(net, torch.tensor([0.1, 2.0])).sigmoid()
    tensor([0.5845, 0.7137])
    """

    name: ClassVar[str] = "mw-net"

    look_ahead: float = field(default=1.0, validator=positive)
    meta_lr: float = field(default=1e-3, validator=positive)
    hidden: int = field(default=100, validator=positive)

    @classmethod
    def testing_instance(cls) -> MwNet:
        return cls(steps=4, lr=0.05, meta_lr=0.05)  # for problems of size 1

    def init(self, problem: Problem, seed: int) -> State:
        like = problem.theta0[weighted_rows(problem, self.name).leaf]
        net = first_net(self.hidden, Key(seed).fold("net"), like)
        moments = base.no_moments(self.optimizer, problem.x0)
        return base.begin(
            self, problem, seed, moments=moments, net=net, net_moments=base.no_moments("adam", net)
        )

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        rows = weighted_rows(problem, self.name)
        theta = state["theta"]
        x, moments, net, net_moments = (
            state[name] for name in ("x", "moments", "net", "net_moments")
        )
        cost = Cost()
        rate = self.rate(progress)
        settings = (self.name, self, rows, problem.f)
        function = partial(self._lower_step, rows, problem.f)
        size = problem.lower_data.count(self.batch_size)
        for number, below, above, upper_size in self.batches(problem, state):
            trees = (x, moments, net, net_moments, theta, below, above)
            numbers = [*base.numbers(rate, number + 1), *base.numbers(self.meta_lr, number + 1)]
            outcome = launch(problem.compiler, settings, function, numbers, *trees)
            x, moments, net, net_moments, lower, upper = outcome
            cost += Cost(
                lower_gradients=2, upper_gradients=1, cross_products=1, rows=3 * size + upper_size
            )
        losses, spent = base.all_losses(problem, rows, x)
        logits = weight_logits(net, losses)
        changes = {
            "x": x,
            "moments": moments,
            "net": net,
            "net_moments": net_moments,
            "lower_steps": state["lower_steps"] + self.steps,
            "theta": base.as_theta(problem, rows, logits),
        }
        record: Record = {
            "upper_loss": upper,
            "lower_loss": lower,
            "kept": logits.sigmoid().double().mean(),
        }
        return base.end_step(self, problem, state, changes, [x], cost + spent, record)

    def _lower_step(
        self,
        rows: Rows,
        f: Loss,
        numbers: Numbers,
        x: Tree,
        moments: Tree,
        net: Tree,
        net_moments: Tree,
        theta: Tree,
        below: Batch,
        above: Batch,
    ) -> tuple[Tree, Tree, Tree, Tree, Tensor, Tensor]:
        """One lower step as a function of tensors.

        Return x, V, their moments, the weighted loss at x, and f after the virtual step.
        """
        leaves = require_grad(x)
        with torch.enable_grad():
            losses = rows.losses(leaves, below)
            regulariser = rows.regulariser(theta, leaves, below)
            inputs = losses.detach()
            virtual = (weight_logits(net, inputs).sigmoid() * losses).mean() + regulariser
            slope = base.gradient_of(virtual, leaves, retain=True)
        ahead = {name: leaf - self.look_ahead * slope[name] for name, leaf in x.items()}
        upper_slopes, upper = gradient(f, theta, ahead, above)
        gains = self.look_ahead * alignments(
            rows, x, dict(zip(x, upper_slopes, strict=True)), below
        )
        net_slope = meta_gradient(net, inputs, gains)
        net, net_moments = base.step_of_x("adam", 0.0, numbers[3:], net, net_slope, net_moments)
        with torch.enable_grad():
            actual = (weight_logits(net, inputs).sigmoid() * losses).mean() + regulariser
            slope = base.gradient_of(actual, leaves)
        x, moments = base.step_of_x(self.optimizer, self.momentum, numbers[:3], x, slope, moments)
        return x, moments, net, net_moments, actual.detach(), upper


def first_net(hidden: int, key: Key, like: Tensor) -> Tree:
    """Draw Θ like the layers of ``torch.nn.Linear``, U(±1/√fan_in)."""
    draw = key.generator()

    def uniform(fan_in: int, *shape: int) -> Tensor:
        return ((2 * torch.rand(*shape, generator=draw, dtype=torch.float64) - 1) / fan_in**0.5).to(
            like
        )

    return {
        "hidden.weight": uniform(1, hidden),
        "hidden.bias": uniform(1, hidden),
        "output.weight": uniform(hidden, hidden),
        "output.bias": uniform(hidden, 1),
    }


def weight_logits(net: Tree, losses: Tensor) -> Tensor:
    """Return V before its sigmoid for each loss."""
    inside = torch.relu(losses[:, None] * net["hidden.weight"] + net["hidden.bias"])
    return inside @ net["output.weight"] + net["output.bias"]


def meta_gradient(net: Tree, losses: Tensor, gains: Tensor) -> Tree:
    """∇_Θ f(x̂(Θ)) = −1/B Σ_i gains_i ∂V(ℓ_i; Θ)/∂Θ.

    An increase of row i's weight decreases f by ``gains`` / B per unit of weight.
    """
    leaves = require_grad(net)
    with torch.enable_grad():
        return base.gradient_of(-(gains * weight_logits(leaves, losses).sigmoid()).mean(), leaves)
