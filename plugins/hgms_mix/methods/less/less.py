"""LESS: warm up, compare gradients with validation rows, keep the most influential rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, final

import torch
from attrs import field
from torch import Tensor

import hgms_mix.lm
from hgms.config import lowering
from hgms_core import Cost, Key, Problem, Record, State, component
from hgms_core.validators import less_than, not_negative, positive
from hgms_mix.methods.less.gradients import GradientProjection as GradientProjection
from hgms_mix.methods.less.gradients import adam_steps, row_gradients


@final
@component
class Warmup:
    """Table ``warmup`` of LESS: training on a random part of all rows.

    Parameters
    ----------
    share
        Of the pool's rows.
    epochs
        Passes over them; gradients are compared after each.
    rising
        Share of the updates over which lr rises; then it falls linearly to (almost) 0.

    Examples
    --------
    >>> rates = [Warmup().average_rate(2e-5, 1000, epoch) for epoch in range(4)]
    >>> [f"{rate:.2e}" for rate in rates]  # what the LESS authors report, to two digits
    ['1.68e-05', '1.29e-05', '7.73e-06', '2.58e-06']
    """

    share: float = field(default=0.05, validator=hgms_mix.lm.some_share)
    epochs: int = field(default=4, validator=positive)
    rising: float = field(default=0.03, validator=[not_negative, less_than(1)])

    def rate(self, lr: float, updates: int, update: int) -> float:
        """Return the learning rate of an update; ``updates`` is their number per epoch."""
        total = self.epochs * updates
        rising = math.ceil(self.rising * total)
        if update < rising:
            return lr * (update + 1) / rising
        return lr * (total - update) / (total - rising)

    def average_rate(self, lr: float, updates: int, epoch: int) -> float:
        """Return the mean learning rate of an epoch."""
        rates = (self.rate(lr, updates, epoch * updates + i) for i in range(updates))
        return sum(rates) / updates


@final
@component
class Less(hgms_mix.lm.RowSelection):
    """Low-rank gradient similarity search: the rows with the largest decrease of the
    validation loss by an Adam step, to first order::

        score(z) = max over validation sets p of mean over z′ in p of Σ_t w_t ⟨Γ_t(z), ∇ℓ(x_t; z′)⟩
        Γ_t(z) = m′/√(v′ + ε),  m′ = β1 m_t + (1 − β1) ∇ℓ(x_t; z),
            v′ = β2 v_t + (1 − β2) ∇ℓ(x_t; z)²

    with both vectors projected at random and scaled to length 1. (x_t, m_t, v_t) is the state of
    Adam after epoch t of a warm-up on a random part of all rows. w_t is the average learning rate
    of that epoch, normalised to Σ w_t = 1. The rows with the highest scores are kept, from any
    source; θ has the shares of the sources in the kept rows.

    One step is an update of the warm-up or a pass over ``chunk`` rows. Validation rows have the
    role ``differentiate``.

    Use when validation rows look like the task and single rows matter. Avoid if a mixture of
    homogeneous sources is required: the gradient of every row costs as much as training on it.

    Parameters
    ----------
    warmup
        a :class:`Warmup`.
    batch_size, lr, weight_decay, betas, eps
        Of its updates by AdamW.
    eps_placement
        In Γ, ``inside`` the root as in the authors' program, or ``outside``.
    projection
        a :class:`GradientProjection`; None: no projection.
    chunk
        Number of rows with gradients in memory at a time.
    keep
        Share of all rows to keep, or ``size``: their number.
    train_steps
        Updates of a fresh x on the kept rows (constant ``lr``); 0: x is the warm-up's; None: to the
        budget's end.

    Raises
    ------
    ConfigError
        For a problem without sources.
    NumericalError
        For infinite losses.

    Notes
    -----
    Cost: 1 lower gradient per update of the warm-up; in each epoch 1 for each row of the pool and 1
    upper gradient for each validation row. Memory: 3 lower states, 3·``chunk`` more during scoring.

    Source: Xia, Malladi, Gururangan, Arora, Chen, *LESS: selecting influential data for targeted
    instruction tuning*, 2024.

    Examples
    --------
    >>> Less(warmup=Warmup(epochs=2), projection=None).keep
    0.05
    """

    name: ClassVar[str] = "less"
    placeholder: ClassVar[str] = "x is the warm-up's"

    warmup: Warmup = Warmup()
    lr: float = field(default=2e-5, validator=positive)
    eps_placement: Literal["inside", "outside"] = "inside"
    projection: GradientProjection | None = GradientProjection()
    chunk: int = field(default=8, validator=positive)

    memory_hints = lowering(same=["chunk"], other=["batch_size"])

    def init(self, problem: Problem, seed: int) -> State:
        pool = problem.lower_data
        started = self.start(problem, seed, "warmup")
        count = max(1, round(self.warmup.share * pool.size))
        chosen = torch.randperm(pool.size, generator=Key(seed).fold("warmup").generator())[:count]
        parts = len(self.sources(problem).parts)
        return {
            **started,
            "epoch": 0,
            "warmup": chosen,
            "val": {},
            "scores": torch.zeros(parts, pool.size, dtype=torch.float64),
        }

    @property
    def phases(self) -> Mapping[str, hgms_mix.lm.Phase]:
        return {
            "warmup": self._warm_up,
            "validation": self._validate,
            "pool": self._score,
            "train": self.train,
        }

    def record_entries(self, state: State) -> dict[str, Any]:
        return {"epoch": state["epoch"] + 1}

    def _warm_up(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        updates = self._updates(state)
        at = state["at"]
        done = state["epoch"] * updates + at
        key = Key(state["seed"]).fold("order")
        warmup = state["warmup"]
        rows = warmup[hgms_mix.lm.epoch_rows(key, len(warmup), done, self.batch_size)]
        lr = self.warmup.rate(self.lr, updates, done)
        trained, record, cost = self.update_on_rows(problem, state, rows, lr=lr, count=done + 1)
        over = at + 1 == updates
        return (
            {**trained, "at": 0 if over else at + 1, "phase": "validation" if over else "warmup"},
            {**record, "lr": lr},
            cost,
        )

    def _validate(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Add the directions of some validation rows to the sums of their sets."""
        data = problem.upper_data["differentiate"]
        parts = len(self.sources(problem).parts)
        index = torch.arange(state["at"], min(state["at"] + self.chunk, data.size))
        grads, losses, batch = row_gradients(problem.f, problem, state, data, index, "validation")
        features = self._directions(grads, state)
        val = state["val"] or {
            "sums": features.new_zeros(parts, features.shape[1]),
            "counts": features.new_zeros(parts),
        }
        ones = torch.ones_like(features[:, 0])
        val = {
            "sums": val["sums"].index_add(0, batch["source"].reshape(-1), features),
            "counts": val["counts"].index_add(0, batch["source"].reshape(-1), ones),
        }
        over = int(index[-1]) + 1 == data.size
        changes: State = {"val": val, "at": 0 if over else state["at"] + len(index)}
        if over:
            changes["phase"] = "pool"
        return (
            changes,
            {"upper_loss": losses.mean()},
            Cost(upper_gradients=len(index), rows=len(index)),
        )

    def _score(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Add w_t ⟨Γ_t, mean validation direction⟩ to the scores of some rows.

        After the last rows of an epoch, its ranking is computed.
        """
        pool = problem.lower_data
        first = state["at"]
        epoch = state["epoch"]
        last = min(first + self.chunk, pool.size)
        index = torch.arange(first, last)
        pooled = self.sources(problem).pooled
        grads, losses, _ = row_gradients(pooled, problem, state, pool, index, "pool")
        m, v = (list(hgms_mix.lm.adamw_part(state["train"], part).values()) for part in "mv")
        steps = adam_steps(
            grads, m, v, betas=self.betas, eps=self.eps, eps_placement=self.eps_placement
        )
        features = self._directions(steps, state)
        updates = self._updates(state)
        val = state["val"]
        rates = [
            self.warmup.average_rate(self.lr, updates, number)
            for number in range(self.warmup.epochs)
        ]
        weight = rates[epoch] / sum(rates)
        scores = state["scores"].clone()
        scores[:, first:last] += (
            weight * (val["sums"] / val["counts"][:, None] @ features.T).double().cpu()
        )
        changes: State = {"scores": scores, "at": last}
        if last == pool.size:
            # A validation set without rows of this role has no mean.
            ranking = scores[val["counts"].cpu() > 0].amax(0)
            changes |= {**self.selection(problem, ranking), "val": {}}
            if epoch + 1 < self.warmup.epochs:
                changes |= {"phase": "warmup", "epoch": epoch + 1}
            else:
                changes |= {"phase": "train", **self.fresh(problem)}
        return (
            changes,
            {"lower_loss": losses.mean()},
            Cost(lower_gradients=last - first, rows=last - first),
        )

    def _updates(self, state: State) -> int:
        """Return the number of updates of an epoch of the warm-up."""
        return math.ceil(len(state["warmup"]) / self.batch_size)

    def _directions(self, vectors: Sequence[Tensor], state: State) -> Tensor:
        """Return the projected vectors, scaled to length 1; zero vectors stay zero."""
        projected = (
            torch.cat([leaf.flatten(1) for leaf in vectors], dim=1)
            if self.projection is None
            else self.projection.apply(vectors, Key(state["seed"]))
        )
        return torch.nn.functional.normalize(projected, dim=1)
