"""DoGE: increase the weight of sources with gradients close to the target's, in a proxy run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, final

import torch
from attrs import field
from torch import Tensor

import hgms_mix.lm
from hgms.arguments import require
from hgms.config import lowering
from hgms_core import Cost, Key, Problem, Record, State, Tree, component
from hgms_core.validators import optional_positive, positive
from hgms_mix.methods.online import gradients, training


@final
@component
class DoGE(training.ProxyMethod):
    """Domain reweighting with generalisation estimation: mirror descent on the agreement of
    gradients::

        W_s = ⟨∇ℓ_s(x_t), ∇ℓ*(x_t)⟩ / mean_r ‖∇ℓ_r(x_t)‖,  clipped to ``bounds``
        α_t = argmin over the simplex of  −rate ⟨α, W⟩ + KL(α ‖ α_{t−1})   ∝  α_{t−1} e^(rate·W)
        x_{t+1} = AdamW(x_t, Σ_s α_t,s ∇ℓ_s(x_t));  ω = mean of α_1 … α_steps;
            x from x0, ``train_steps`` at ω

    The target ℓ* is ``validation``: f on the rows of the role ``differentiate`` (the paper's
    out-of-domain variant), or ``sources``: for source s the sum of all other ℓ_r (its general
    variant: good at all sources). The S gradients come from one pass with S copies of x if this is
    faster; they also train x. Dropout is off. One step is up to ``updates`` updates.

    Use with a few sources and a separate target, at the cost of one training run. Avoid if lr is so
    small that x does not change: W then depends on the first state only. W is proportional to ∇ℓ*:
    if it is small (small adapters, a target learned before), weights hardly change at the authors'
    ``rate``. A gradient shows the current effect, not the effect on a long run.

    Parameters
    ----------
    steps
        Updates of the proxy.
    updates
        The maximum in one outer step.
    target
        ``validation`` or ``sources``.
    rate
        η/μ of the paper (the authors': 5e-4 and 0.01).
    bounds
        Of W.
    max_norm
        Of a gradient (None: any).
    lr, weight_decay, betas, eps
        AdamW of x.
    batch_size
        Lower rows of an update, equally many of all sources (rounded down).
    validation_batch_size
        Validation rows of an update (None: all).
    train_steps
        Updates of a fresh x at the learned mixture; 0: x is the proxy's; None: until the budget is
        spent.

    Raises
    ------
    ConfigError
        For a problem without sources, with more sources than ``batch_size``, or without validation
        rows for the target.
    NumericalError
        For infinite losses.

    Notes
    -----
    Cost: S lower gradients per update, each on its share of the batch, and with validation rows 1
    upper gradient. Memory: 3 lower states between steps, at most 2S + 10 within one.

    Source: Fan, Pagliardini, Jaggi, *DoGE: domain reweighting with generalization estimation*,
    2024, algorithm 1.

    Examples
    --------
    >>> DoGE(target="sources").bounds
    (0.0, 5.0)
    """

    name: ClassVar[str] = "doge"
    testing: ClassVar[Mapping[str, Any]] = {"steps": 200, "updates": 20, "rate": 0.5, "lr": 0.1}

    target: Literal["validation", "sources"] = "validation"
    rate: float = field(default=0.05, validator=positive)
    bounds: tuple[float, float] = (0.0, 5.0)
    max_norm: float | None = field(default=5.0, validator=optional_positive)
    validation_batch_size: int | None = field(default=32, validator=optional_positive)

    memory_hints = lowering(other=["batch_size", "validation_batch_size"])

    def __attrs_post_init__(self) -> None:
        require(
            len(self.bounds) == 2 and self.bounds[0] < self.bounds[1],
            "wrong-value",
            f"bounds={self.bounds} must be two numbers (low, high) with low < high",
            place=("bounds",),
        )

    def init(self, problem: Problem, seed: int) -> State:
        started = self.start(problem, seed, "proxy")
        if self.target == "validation":
            hgms_mix.lm.check_role(problem, "method 'doge' takes its target from", "differentiate")
        return started

    @property
    def phases(self) -> Mapping[str, hgms_mix.lm.Phase]:
        return {"proxy": self._proxy, "train": self.train}

    def _proxy(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Run updates of the proxy; each follows an update of its weights."""
        sources = self.sources(problem)
        at = state["at"]
        key = Key(state["seed"]).fold("proxy", state["at"])
        count = min(self.updates, self.steps - at)
        share = self.batch_size // len(sources.names)
        index = gradients.even_rows(problem.lower_data, sources, key, share, count)
        train = state["train"]
        weights = state["weights"]
        total = state["sum"]
        scores = torch.empty(0)
        record = dict[str, object]()
        spent = Cost()
        for i in range(count):
            x = hgms_mix.lm.adamw_part(train, "x")
            grads, losses = gradients.source_gradients(problem, x, index[i], state["step"] + 1)
            grads = gradients.at_most(grads, self.max_norm)
            target, record, cost = self._target(
                problem, x, key.fold("validation", i), grads, state["step"] + 1
            )
            scores = (
                (target / (gradients.norms(grads).mean() + 1e-6)).clamp(*self.bounds).double().cpu()
            )
            weights = training.tilt(weights, self.rate * scores)
            total = total + weights
            train = hgms_mix.lm.adamw_moved(
                gradients.mix(grads, weights), train, self, lr=self.lr, count=at + i + 1
            )
            record |= {"lower_loss": weights.to(losses) @ losses}
            spent += Cost(lower_gradients=len(losses), rows=index[i].numel()) + cost
        changes = self.proxy_changes(problem, state, train, weights, total)
        record |= {
            f"score.{name}": float(value) for name, value in zip(sources.names, scores, strict=True)
        }
        return changes, record, spent

    def _target(
        self, problem: Problem, x: Tree, key: Key, grads: list[Tensor], step: int
    ) -> tuple[Tensor, Record, Cost]:
        """Return ⟨∇ℓ_s, ∇ℓ*⟩ of all sources, the record of the target, and the cost."""
        if self.target == "sources":
            products = gradients.products(grads, grads)
            return products.sum(1) - products.diagonal(), {}, Cost()
        leaves, loss, cost = hgms_mix.lm.upper_gradient(
            problem, x, key, self.validation_batch_size, step
        )
        leaves = gradients.at_most([leaf[None] for leaf in leaves], self.max_norm)
        return gradients.products(grads, leaves)[:, 0], {"upper_loss": loss}, cost
