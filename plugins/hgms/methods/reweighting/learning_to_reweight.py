"""Weights of a batch's rows by the alignment of their gradients with the validation gradient."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms.compiled import Numbers, launch
from hgms.methods.reweighting import base
from hgms.rows import weighted_rows
from hgms_core import Batch, Cost, Loss, Problem, Record, Rows, State, Tree, component, gradient
from hgms_core.hypergrad import twice_differentiable_attention
from hgms_core.trees import require_grad
from hgms_core.validators import decay_rate, optional_positive


@final
@component
class LearningToReweight(base.Reweighting):
    """Recompute the weights of a batch's rows in each lower step, with a look-ahead step of SGD
    from weights ε = 0::

        x̂(ε) = x − α ∇_x Σ_i ε_i ℓ_i(x)
        w̃_i = max(0, −∂f(x̂(ε))/∂ε_i at ε = 0) = max(0, α ⟨∇f(x), ∇ℓ_i(x)⟩),  w = w̃ / Σ w̃
            (0 where no row helps)
        x ← x − η ∇_x [Σ_i w_i ℓ_i(x) + r(x)]    (with momentum, or Adam's step)

    At ε = 0 the look-ahead is x, so its derivative is an inner product of gradients. A product in
    forward mode computes it for all rows at once; α cancels. No θ is learned. θ reports the average
    weight of each row, a_i, a running mean over the batches that contain row i, in units of equal
    weights (B·w_i)::

        σ(θ_i) = a_i / (1 + a_i),  θ_i = log a_i within ±10
            (0: an average weight, or not seen yet)

    Use as the reference of methods that learn a weight for each row, on ``Problem.rows``. Avoid
    with few validation rows: each weight is as noisy as the validation gradient of one step.

    Cost of a lower step: 1 lower gradient, 1 upper gradient, 1 cross product (∇²_εx v, in forward
    mode). Memory: a graph of a gradient.

    Parameters
    ----------
    steps
        Lower steps in one outer step.
    optimizer, lr, momentum
        The update of x.
    schedule
        Lr over the budget, to 0 as a cosine, or constant.
    batch_size, upper_batch_size
        Lower rows, and validation rows of the role ``differentiate`` (``None``: all).
    memory
        Decay of the running mean of a row's weights: 0.95 averages over about twenty batches that
        contain the row.
    keep
        ``best`` returns the state of the lowest upper loss on rows of the role ``stop``; ``last``
        returns the last.

    Notes
    -----
    Source: Ren, Zeng, Yang, Urtasun, *Learning to reweight examples for robust deep learning*, ICML
    2018 (arXiv 1803.09050), algorithm 1.

    Examples
    --------
    >>> data = {"a": torch.tensor([1.0, -1.0])}
    >>> rows = Rows(losses=lambda x, batch: 0.5 * (x["x"] - batch["a"]).square())
    >>> from hgms.adapters import from_losses
    >>> problem = from_losses(
    ...     theta0={"logits": torch.zeros(2)},
    ...     x0={"x": torch.zeros(1)},
    ...     extensions=(rows,),
    ...     lower_data=data,
    ...     upper_data={"a": torch.ones(2)},
    ...     f=lambda t, x, batch: 0.5 * (x["x"] - batch["a"]).square().mean(),
    ...     g=lambda t, x, batch: (t["logits"].sigmoid() * rows.losses(x, batch)).mean(),
    ... )
    >>> method = LearningToReweight(steps=1, optimizer="sgd", lr=0.5, memory=0.9)
    >>> state, record = method.step(problem, method.init(problem, 0), 0.0)
    >>> state["x"]["x"], state["averages"]  # only the first row's gradient points where f falls
    (tensor([0.5000]), tensor([1.1000, 0.9000]))
    """

    name: ClassVar[str] = "learning-to-reweight"

    upper_batch_size: int | None = field(default=None, validator=optional_positive)
    memory: float = field(default=0.95, validator=decay_rate)

    @classmethod
    def testing_instance(cls) -> LearningToReweight:
        return cls(steps=4, lr=0.03)  # for problems of size 1

    def init(self, problem: Problem, seed: int) -> State:
        ones = torch.ones_like(problem.theta0[weighted_rows(problem, self.name).leaf])
        return base.begin(
            self, problem, seed, moments=base.no_moments(self.optimizer, problem.x0), averages=ones
        )

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        rows = weighted_rows(problem, self.name)
        theta = state["theta"]
        x = state["x"]
        moments = state["moments"]
        averages = state["averages"]
        cost = Cost()
        rate = self.rate(progress)
        settings = (self.name, self, rows, problem.f)
        function = partial(self._lower_step, (rows, problem.f))
        size = problem.lower_data.count(self.batch_size)
        for number, below, above, upper_size in self.batches(problem, state):
            trees = (x, moments, theta, below, above)
            numbers = base.numbers(rate, number + 1)
            x, moments, weights, lower, upper = launch(
                problem.compiler, settings, function, numbers, *trees
            )
            index = below["index"]
            mean = self.memory * averages[index] + (1 - self.memory) * len(index) * weights
            averages = averages.index_copy(0, index, mean.to(averages))
            cost += Cost(
                lower_gradients=1, upper_gradients=1, cross_products=1, rows=2 * size + upper_size
            )
        changes = {
            "x": x,
            "moments": moments,
            "averages": averages,
            "lower_steps": state["lower_steps"] + self.steps,
            "theta": base.as_theta(problem, rows, averages.clamp_min(1e-30).log()),
        }
        record: Record = {
            "upper_loss": upper,
            "lower_loss": lower,
            "kept": (weights > 0).double().mean(),
        }
        return base.end_step(self, problem, state, changes, [x], cost, record)

    def _lower_step(
        self,
        losses: tuple[Rows, Loss],
        numbers: Numbers,
        x: Tree,
        moments: Tree,
        theta: Tree,
        below: Batch,
        above: Batch,
    ) -> tuple[Tree, Tree, Tensor, Tensor, Tensor]:
        """One lower step as a function of tensors.

        Return x and its moments, the weights, and the weighted loss and f before the step.
        """
        rows, f = losses
        slopes, upper = gradient(f, theta, x, above)
        weights = alignments(rows, x, dict(zip(x, slopes, strict=True)), below).clamp_min(0)
        total = weights.sum()
        weights = weights / torch.where(total > 0, total, torch.ones_like(total))
        leaves = require_grad(x)
        with torch.enable_grad():
            loss = (weights * rows.losses(leaves, below)).sum() + rows.regulariser(
                theta, leaves, below
            )
            slope = base.gradient_of(loss, leaves)
        x, moments = base.step_of_x(self.optimizer, self.momentum, numbers, x, slope, moments)
        return x, moments, weights, loss.detach(), upper


def alignments(rows: Rows, x: Tree, direction: Tree, batch: Batch) -> Tensor:
    """⟨∇ℓ_i(x), direction⟩ for each row of the batch, ``[B]``, as one product in forward mode."""
    with twice_differentiable_attention():
        products: Tensor = torch.func.jvp(
            lambda leaves: rows.losses(leaves, batch), (x,), (direction,)
        )[1]
    return products.detach()
