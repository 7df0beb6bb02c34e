"""LESS: warm up, compare gradients with those of validation rows, keep the most influential rows."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch
from attrs import field, frozen, validators
from torch import Tensor

from hgms_core import ConfigError, Cost, Key, NumericalError, Problem, Ravel, Record, State, Tree
from hgms_less.features import Preconditioner, directions, row_gradients
from hgms_less.projection import Projector
from hgms_less.selection import highest, on_host, shares, sources_of
from hgms_less.store import FeatureStore, fingerprint, tree_digest
from hgms_less.training import Schedule, epoch_rows
from hgms_llm import adamw, adamw_part, adamw_start

positive: Any = validators.gt(0)
whole: Any = [validators.instance_of(int), validators.gt(0)]
not_negative: Any = validators.ge(0)
optional_whole: Any = validators.optional(whole)
optional_count: Any = validators.optional([validators.instance_of(int), validators.ge(0)])
share: Any = [validators.gt(0), validators.le(1)]
FEW_UPDATES = 100
"""Below this many updates of the warm-up a word is said."""


def _decay_rates(instance: object, attribute: object, value: tuple[float, float]) -> None:
    if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
        raise ValueError(f"'betas' must be two numbers in [0, 1): {value}")


@final
@frozen(kw_only=True)
class Less:
    """Low-rank gradient similarity search: the rows whose Adam step lowers validation loss most, to first order::

        score(z) = max over validation sets p of  mean over z′ in p of  Σ_t w_t ⟨Γ_t(z), ∇ℓ(x_t; z′)⟩
        Γ_t(z) = m′/√(v′ + ε),   m′ = β1 m_t + (1 − β1) ∇ℓ(x_t; z),   v′ = β2 v_t + (1 − β2) ∇ℓ(x_t; z)²

    with both vectors projected at random and scaled to length 1. (x_t, m_t, v_t) is the state of Adam after epoch t of a
    warm-up on a random part of all rows, w_t the average learning rate of that epoch, normalised to Σ w_t = 1. The rows with
    the highest scores are kept, whatever their source; θ has the sources' shares of them.

    An epoch's scores are added up right after it, so that one copy of (x, m, v) is all there ever is. One step is one update of
    the warm-up, or one pass over ``chunk`` rows. Validation rows are those of the role ``differentiate``; rows of ``select``,
    ``stop`` and the test set are not looked at. Dropout is off.

    Use when validation rows look like the task and single rows matter. Avoid where a mixture is wanted from sources that are
    all alike inside: the gradient of every row costs as much as training on it.

    Arguments:
        warmup_share: of the pool's rows (the cached ones, where a task caches some); under 100 updates in all it is said that
            they are few. ``epochs``, ``batch_size``, ``lr``, ``weight_decay``, ``betas``, ``eps``: of the warm-up
            (AdamW; ``lr`` rises over the ``rising`` share of its updates, then falls linearly to 0).
        eps_placement: in Γ, ``inside`` the root as in the authors' program, or ``outside``.
        projection: dimensions (None: no projection). ``projector``: ``sparse``, or the dense ``rademacher`` (the authors') and
            ``gaussian``, 2000 times the work at 8192 dimensions. ``projection_seed``: for another projection of the same run.
        chunk: rows whose gradients are in memory at a time. ``keep``: share of all rows to keep, or ``size``: their number.
        store: a folder for the projected features of all rows, memory-mapped and reused; None keeps scores only.
        train_steps: updates of a fresh x on the kept rows afterwards (constant ``lr``); 0: x is the warm-up's; None: until the
            budget is spent.

    Errors: ConfigError for a problem without sources, and for a ``store`` of something else; NumericalError for losses that are
    not finite.

    Cost: a warm-up update is 1 lower gradient; then in each epoch 1 lower gradient for each row of the pool (also where the
    store has them already) and 1 upper gradient for each validation row. Memory: 3 lower states, 3·``chunk`` more during
    scoring, and (without projection) one for each validation set.

    >>> Less(epochs=2, projection=None).keep
    0.05

    Source: Xia, Malladi, Gururangan, Arora, Chen, *LESS: selecting influential data for targeted instruction tuning*, 2024.
    """

    name: ClassVar[str] = "less"
    needs: ClassVar[frozenset[str]] = frozenset({"sources", "per-example-losses"})

    warmup_share: float = field(default=0.05, validator=share)
    epochs: int = field(default=4, validator=whole)
    batch_size: int = field(default=32, validator=whole)
    lr: float = field(default=2e-5, validator=positive)
    rising: float = field(default=0.03, validator=[not_negative, validators.lt(1)])
    weight_decay: float = field(default=0.0, validator=not_negative)
    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=_decay_rates)
    eps: float = field(default=1e-8, validator=positive)
    eps_placement: Literal["inside", "outside"] = field(default="inside", validator=validators.in_(["inside", "outside"]))
    projection: int | None = field(default=8192, validator=optional_whole)
    projector: Literal["rademacher", "gaussian", "sparse"] = field(
        default="sparse", validator=validators.in_(["rademacher", "gaussian", "sparse"])
    )
    projection_seed: int = 0
    chunk: int = field(default=8, validator=whole)
    keep: float = field(default=0.05, validator=share)
    size: int | None = field(default=None, validator=optional_whole)
    store: str | None = None
    train_steps: int | None = field(default=0, validator=optional_count)

    def init(self, problem: Problem, seed: int) -> State:
        sources, pool = sources_of(problem), problem.lower_data
        if self.size is not None and self.size > pool.size:
            raise ConfigError(f"'size' must be at most the number of rows, {pool.size}: {self.size}")
        count = max(1, round(self.warmup_share * pool.size))
        self._check_warm_up(count, pool.size)
        chosen = torch.randperm(pool.size, generator=Key(seed).fold("warmup").generator())[:count]
        return {
            "seed": seed,
            "step": 0,
            "phase": "warmup",
            "epoch": 0,
            "at": 0,
            "warmup": chosen,
            "train": adamw_start(problem.x0),
            "val": {},
            "scores": torch.zeros(len(sources.parts), pool.size, dtype=torch.float64),
            "ranking": torch.full((pool.size,), torch.nan, dtype=torch.float64),
            "theta": sources.theta(dict.fromkeys(sources.names, 1.0)),
            "pool": fingerprint(pool) if self.store is not None else "",
            "digest": "",
            "kept": torch.empty(0, dtype=torch.int64),
            "cost": Cost().numbers(),
        }

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        phases = {"warmup": self._warm_up, "validation": self._validate, "pool": self._score, "train": self._train}
        record: Record = {"step": state["step"] + 1, "phase": state["phase"], "epoch": state["epoch"] + 1}
        spent = Cost()
        changes: State = {}
        if not self.finished(state):
            changes, seen, spent = phases[state["phase"]](problem, on_host(state))
            record |= seen
        cost = Cost(**state["cost"]) + spent
        record |= {**{f"cost_{name}": number for name, number in cost.numbers().items()}, "oracle_calls": cost.calls}
        return {**state, **changes, "step": state["step"] + 1, "cost": cost.numbers()}, record

    def finished(self, state: State) -> bool:
        """Whether all rows are scored and x is trained as long as asked."""
        return state["phase"] == "train" and self.train_steps is not None and state["at"] >= self.train_steps

    def result(self, state: State) -> tuple[Tree, Tree]:
        return state["theta"], adamw_part(state["train"], "x")

    @property
    def untrained(self) -> str:
        """Why x is not one that was trained on the mixture; empty where it is."""
        return "x is the warm-up's (train_steps = 0)" if self.train_steps == 0 else ""

    def ranking(self, problem: Problem, state: State) -> Tensor:
        """Each row's score over the epochs scored so far; NaN before the first of them."""
        ranking: Tensor = state["ranking"]
        return ranking

    def _check_warm_up(self, count: int, size: int) -> None:
        """Says so where Adam's moments will be little more than their start: the authors' 5 % are some 420 updates."""
        updates = self.epochs * math.ceil(count / self.batch_size)
        if updates < FEW_UPDATES:
            needed = math.ceil(FEW_UPDATES / self.epochs) * self.batch_size
            share = math.ceil(100 * needed / size) / 100
            advice = f"set warmup_share = {share:g}" if share <= 1 else f"lower batch_size ({self.batch_size})"
            logging.getLogger("hgms").warning(
                f"less: the warm-up takes {updates} updates on {count} of the pool's {size} rows, the authors' some 420; "
                "gradients are compared at a model that has hardly begun to learn\n"
                f"  for {FEW_UPDATES} updates {advice}, or widen the pool"
            )

    def _schedule(self, state: State) -> Schedule:
        updates = math.ceil(len(state["warmup"]) / self.batch_size)
        return Schedule(lr=self.lr, warmup=self.rising, epochs=self.epochs, updates=updates)

    def _update(self, problem: Problem, state: State, rows: Tensor, count: int, lr: float) -> tuple[Tree, Record, Cost]:
        data = problem.lower_data
        trained, loss = adamw(
            sources_of(problem).pooled, problem.theta0, data.rows(rows.to(data.device)), state["train"],
            step=state["step"] + 1, count=count, lr=lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay,
        )  # fmt: skip
        return trained, {"lower_loss": loss, "lr": lr}, Cost(lower_gradients=1, rows=len(rows))

    def _warm_up(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        schedule, epoch, at = self._schedule(state), state["epoch"], state["at"]
        rows = epoch_rows(Key(state["seed"]).fold("order"), state["warmup"], epoch, at, self.batch_size)
        done = epoch * schedule.updates + at
        trained, seen, spent = self._update(problem, state, rows, done + 1, schedule.rate(done))
        over = at + 1 == schedule.updates
        return {"train": trained, "at": 0 if over else at + 1, "phase": "validation" if over else "warmup"}, seen, spent

    def _validate(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Adds the directions of some validation rows to their sets' sums."""
        data, parts = problem.upper_data["differentiate"], len(sources_of(problem).parts)
        index = torch.arange(state["at"], min(state["at"] + self.chunk, data.size))
        grads, losses, batch = row_gradients(problem.f, problem.theta0, adamw_part(state["train"], "x"), data, index)
        _refuse_nonfinite(losses, state, "validation")
        found = directions(grads, self._projector(state))
        if state["at"]:
            sums, counts = state["val"]["sums"], state["val"]["counts"]
        else:
            sums, counts = found.new_zeros(parts, found.shape[1]), found.new_zeros(parts)
        part = batch["source"].reshape(-1)
        val = {"sums": sums.index_add(0, part, found), "counts": counts.index_add(0, part, torch.ones_like(found[:, 0]))}
        over = int(index[-1]) + 1 == data.size
        changes: State = {"val": val, "at": 0 if over else state["at"] + len(index)}
        if over:
            changes |= {"phase": "pool", "digest": self._digest(state, found.device.type)}
        return changes, {"upper_loss": losses.mean()}, Cost(upper_gradients=len(index), rows=len(index))

    def _score(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Adds w_t ⟨Γ_t, mean validation direction⟩ to the scores of some rows of the pool."""
        pool, first = problem.lower_data, state["at"]
        last = min(first + self.chunk, pool.size)
        found, seen = self._features(problem, state, first, last)
        schedule, val = self._schedule(state), state["val"]
        weight = schedule.average(state["epoch"]) / sum(schedule.average(epoch) for epoch in range(self.epochs))
        means = val["sums"] / val["counts"][:, None]
        scores = state["scores"].clone()
        scores[:, first:last] += weight * (means @ found.T).double().cpu()
        changes: State = {"scores": scores, "at": last}
        if last == pool.size:
            changes |= self._epoch_over(problem, state, scores, val["counts"].cpu())
        return changes, seen, Cost(lower_gradients=last - first, rows=last - first)

    def _features(self, problem: Problem, state: State, first: int, last: int) -> tuple[Tensor, Record]:
        """The directions of Γ of consecutive rows: from the store, or computed."""
        projector, x = self._projector(state), adamw_part(state["train"], "x")
        store = None
        if self.store is not None:
            store = FeatureStore(
                folder=Path(self.store), epoch=state["epoch"] + 1, digest=state["digest"], rows=problem.lower_data.size,
                dims=projector.size(Ravel.of(x).size),
            )  # fmt: skip
            stored = store.read(first, last, state["val"]["sums"])
            if stored is not None:
                return stored, {"lower_loss": None}
        index = torch.arange(first, last)
        grads, losses, _ = row_gradients(sources_of(problem).pooled, problem.theta0, x, problem.lower_data, index)
        _refuse_nonfinite(losses, state, "pool")
        m, v = (list(adamw_part(state["train"], part).values()) for part in "mv")
        found = directions(self._gamma()(grads, m, v), projector)
        return store.write(first, found) if store is not None else found, {"lower_loss": losses.mean()}

    def _epoch_over(self, problem: Problem, state: State, scores: Tensor, counts: Tensor) -> State:
        """The ranking and mixture after an epoch's scores are complete; the next epoch, or the end."""
        sources = sources_of(problem)
        # A validation set with no row of this role has no mean.
        ranking = scores[counts > 0].amax(0)
        kept = highest(ranking, self.keep, self.size)
        last = state["epoch"] + 1 == self.epochs
        changes: State = {
            "ranking": ranking,
            "kept": kept,
            "theta": sources.theta(shares(problem.lower_data, kept)),
            "at": 0,
            "val": {},
            "phase": "train" if last else "warmup",
            "epoch": state["epoch"] + (not last),
        }
        if last and self.train_steps != 0:
            changes["train"] = adamw_start(problem.x0)
        return changes

    def _train(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        kept, at = state["kept"], state["at"]
        updates = math.ceil(len(kept) / self.batch_size)
        rows = epoch_rows(Key(state["seed"]).fold("train"), kept, at // updates, at % updates, self.batch_size)
        trained, seen, spent = self._update(problem, state, rows, at + 1, self.lr)
        return {"train": trained, "at": at + 1}, seen, spent

    def _projector(self, state: State) -> Projector:
        key = Key(state["seed"]).fold("projection", self.projection_seed)
        return Projector(key=key, dims=self.projection, kind=self.projector)

    def _gamma(self) -> Preconditioner:
        return Preconditioner(betas=self.betas, eps=self.eps, eps_placement=self.eps_placement)

    def _digest(self, state: State, device: str) -> str:
        """What the features of an epoch depend on: its checkpoint (and with it the model), the rows, Γ and the projection."""
        if self.store is None:
            return ""
        return " ".join([tree_digest(state["train"]), state["pool"], repr((self._gamma(), self._projector(state), device))])


def _refuse_nonfinite(losses: Tensor, state: State, what: str) -> None:
    if not torch.isfinite(losses).all():
        raise NumericalError(
            f"step {state['step'] + 1}: the loss of a {what} row is not finite after {state['epoch'] + 1} epochs of warm-up\n"
            "  lower lr, or check the rows and the model"
        )
