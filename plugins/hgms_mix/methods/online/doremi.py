"""DoReMi: increase the weight of sources with a higher loss than a reference, during proxy
training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, final

import torch
from attrs import field
from torch import Tensor

import hgms_mix.lm
from hgms.config import lowering
from hgms_core import Batch, Cost, Key, Problem, Record, State, Tree, component
from hgms_core.validators import positive, share
from hgms_mix.methods.online import training


@final
@component
class DoReMi(training.ProxyMethod):
    """Domain reweighting with minimax optimisation, in three stages::

        x_ref = x0 after ``steps`` AdamW updates at the mixture ``prior``
        λ_s = mean over the rows z of source s in B_t of  max(ℓ(x_t; z) − ℓ(x_ref; z), 0)
        α_t ∝ α_{t−1} e^(η λ),  then  α_t ← (1 − c) α_t + c/S;
            x_{t+1} = AdamW(x_t, Σ_s α_t,s ∇ℓ_s(x_t; B_t))
        ω = mean of α_1 … α_steps;      x from x0 again, ``train_steps`` updates at ω

    B_t has equally many rows of all sources (up to one), α_0 is even. The losses of x_t's rows and
    its gradient come from one pass. Dropout is off. One step is up to ``updates`` updates.
    Validation rows are not used: ω is for all sources, not for a target.

    Use when the model must perform well on all sources, and some are harder than the reference's
    share of training covers. Avoid if validation rows are unlike the pool, or if a source is noise
    that the model can memorise.

    Parameters
    ----------
    steps
        Updates of the reference, and of the proxy.
    updates
        The maximum in one outer step.
    eta, smoothing
        η and c.
    prior
        The reference's mixture, ``uniform`` or the sources' shares of all ``rows`` (of their files,
        if the task keeps fewer).
    lr, weight_decay, betas, eps, batch_size
        AdamW in all stages.
    train_steps
        Updates of a fresh x at the learned mixture; 0: x is the proxy's; None: until the budget is
        spent.

    Raises
    ------
    ConfigError
        For a problem without sources, or with more sources than ``batch_size``.
    NumericalError
        For infinite losses.

    Notes
    -----
    Cost: 2·``steps`` lower gradients and ``steps`` upper values (the reference's losses) before the
    mixture is known. Memory: 4 lower states between steps, 11 within one.

    Source: Xie et al., *DoReMi: optimizing data mixtures speeds up language model pretraining*,
    2023, algorithm 1.

    Examples
    --------
    >>> DoReMi(prior="rows").smoothing
    0.001
    """

    name: ClassVar[str] = "doremi"
    testing: ClassVar[Mapping[str, Any]] = {"steps": 20, "lr": 0.1}
    testing_failures: ClassVar[Mapping[str, str]] = {
        "optimum": "it is blind to validation rows: no weight is better to it"
    }

    eta: float = field(default=1.0, validator=positive)
    smoothing: float = field(default=1e-3, validator=share)
    prior: Literal["uniform", "rows"] = "uniform"

    memory_hints = lowering(other=["batch_size"])

    def init(self, problem: Problem, seed: int) -> State:
        return self.start(problem, seed, "reference", reference={})

    @property
    def phases(self) -> Mapping[str, hgms_mix.lm.Phase]:
        return {"reference": self._reference, "proxy": self._proxy, "train": self.train}

    def _reference(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        sources = self.sources(problem)
        count = min(self.updates, self.steps - state["at"])
        shares = hgms_mix.lm.prior_shares(problem, self.prior)
        prior = torch.tensor([shares[name] for name in sources.names], dtype=torch.float64)
        at = state["at"]
        key = Key(state["seed"]).fold("reference")
        train, record, spent = training.train_on_mixture(
            problem, prior, state, self, key, at, count
        )
        changes: State = {"train": train, "at": at + count}
        if changes["at"] == self.steps:
            reference = hgms_mix.lm.adamw_part(train, "x")
            fresh = hgms_mix.lm.adamw_start(problem.x0)
            changes |= {"phase": "proxy", "at": 0, "reference": reference, "train": fresh}
        return changes, record, spent

    def _proxy(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Run updates of the proxy; each follows an update of its weights."""
        sources = self.sources(problem)
        data = problem.lower_data
        at = state["at"]
        step = state["step"] + 1
        count = min(self.updates, self.steps - at)
        train = state["train"]
        weights = state["weights"]
        total = state["sum"]
        loss = torch.empty(())
        index = data.numbers(Key(state["seed"]).fold("proxy", at), self.batch_size, count)
        excess = torch.empty(0)
        for i in range(count):
            batch = data.rows(index[i])
            with torch.no_grad():
                known = sources.examples(state["reference"], batch)

            def reweighted_loss(
                _theta: Tree, x: Tree, batch: Batch, known: Tensor = known, before: Tensor = weights
            ) -> Tensor:
                nonlocal excess, weights
                rows = sources.examples(x, batch)
                excess = (
                    source_means((rows.detach() - known).clamp_min(0), batch["source"], len(before))
                    .double()
                    .cpu()
                )
                weights = self.reweight(before, excess)
                return (weights.to(rows) * source_means(rows, batch["source"], len(before))).sum()

            train, loss = hgms_mix.lm.adamw(
                reweighted_loss,
                problem.theta0,
                batch,
                train,
                self,
                lr=self.lr,
                count=at + i + 1,
                step=step,
            )
            total = total + weights
        changes = self.proxy_changes(problem, state, train, weights, total)
        if changes.get("phase") == "train":
            changes["reference"] = {}
        record = {
            f"excess.{name}": float(value)
            for name, value in zip(sources.names, excess, strict=True)
        }
        return (
            changes,
            {"lower_loss": loss, **record},
            Cost(lower_gradients=count, upper_values=count, rows=2 * index.numel()),
        )

    def reweight(self, weights: Tensor, excess: Tensor) -> Tensor:
        """Return the next weights from the excess losses of the sources."""
        return (1 - self.smoothing) * training.tilt(
            weights, self.eta * excess
        ) + self.smoothing / len(weights)


def source_means(rows: Tensor, source: Tensor, count: int) -> Tensor:
    """Return the mean of the rows of every source, ``[count]``.

    Examples
    --------
    >>> source_means(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1]), 2)
    tensor([2., 5.])
    """
    member = torch.nn.functional.one_hot(source, count).to(rows)
    return (rows @ member) / member.sum(0)
