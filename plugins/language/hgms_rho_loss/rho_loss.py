"""RHO-LOSS: rows that are not yet learned, but that a model trained on held-out rows finds easy."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, final

import torch
from attrs import Attribute, field, frozen, validators
from torch import Tensor

from hgms_core import ConfigError, Cost, Data, Key, Problem, Record, Sources, State, Tree
from hgms_llm import adamw, adamw_part, adamw_start
from hgms_rho_loss.training import counts_of, epoch_rows, highest, on_host, row_losses

positive: Any = validators.gt(0)
whole: Any = [validators.instance_of(int), validators.gt(0)]
optional_whole: Any = validators.optional(whole)
count: Any = [validators.instance_of(int), validators.ge(0)]
optional_count: Any = validators.optional(count)
not_negative: Any = validators.ge(0)
share: Any = [validators.gt(0), validators.le(1)]


def _decay_rates(instance: object, attribute: object, value: tuple[float, float]) -> None:
    if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
        raise ValueError(f"'betas' must be two numbers in [0, 1): {value}")


@final
@frozen(kw_only=True)
class RhoLoss:
    """Reducible holdout loss: rank rows by what can still be learned of them::

        score(z) = ℓ(x; z) − ℓ(x_ref; z)

    x_ref has not seen z. The pool is split in two random halves; a reference is trained from x0 on each of them, and says
    ℓ(x_ref; z), the irreducible loss, of the rows of the other half, once (the paper's form for data without a holdout set).
    ``reference = "validation"`` trains a single one on the validation rows of the role ``differentiate`` instead: then a low
    irreducible loss also means that a row is like the target. Of its states after each epoch (x0 among them) the one with the
    lowest mean loss on the rows of the role ``stop`` is kept. The test set plays no part.

    ``static``: x is x0 after ``target_steps`` updates on random rows of the pool; the ``keep`` share with the highest scores is
    kept, and θ has the sources' shares of it. ``online``: every update draws ``big_batch`` rows of the pool, scores
    them at the present x and moves x on the ``top`` share of them; θ has the sources' shares of all rows used so far.

    One step is one update, or the losses of ``chunk`` rows. Dropout is off throughout.

    Use when rows differ in how noisy they are. Held-out rows of the pool say nothing of the target: avoid ``held-out`` where
    sources are off-target but learnable. Avoid ``target_steps = 0`` where sources differ in the level of their losses (long or
    formal texts): then the level decides.

    Arguments:
        mode: ``static`` or ``online``.
        reference: what x_ref learns from, ``held-out`` rows or ``validation`` rows. ``reference_epochs``, ``reference_lr``: of
            x_ref. ``target_steps``: before static scores (None: one pass over the pool).
        lr, weight_decay, betas, eps: AdamW of x (the last three of x_ref too). ``batch_size``: rows of an update, but for
            online ones.
        big_batch, top: of an online update. ``keep``: share of all rows that static scores keep, or ``size``: their number.
        chunk: rows whose losses are computed at a time.
        train_steps: static: updates of a fresh x on the kept rows afterwards, online: updates in all. 0: x stays the one that
            was scored; None: until the budget is spent.

    Errors: ConfigError for a problem without sources, or without rows of the role ``stop``; NumericalError for losses that are
    not finite.

    Cost: an update of x is 1 lower gradient, one of x_ref too (1 upper gradient on validation rows); each pass over rows for
    their losses is 1 upper value. Memory: 4 lower states while x_ref is trained (x, two moments, the best so far), else at
    most 3.

    >>> RhoLoss(mode="online", train_steps=1000).top
    0.1

    Source: Mindermann et al., *Prioritized training on points that are learnable, worth learning, and not yet learnt*, 2022.
    """

    name: ClassVar[str] = "rho-loss"
    needs: ClassVar[frozenset[str]] = frozenset({"sources", "per-example-losses"})

    mode: Literal["static", "online"] = field(default="static", validator=validators.in_(["static", "online"]))
    reference: Literal["held-out", "validation"] = field(
        default="held-out", validator=validators.in_(["held-out", "validation"])
    )
    reference_epochs: int = field(default=4, validator=whole)
    reference_lr: float = field(default=1e-4, validator=positive)
    target_steps: int | None = field(default=None, validator=optional_count)
    lr: float = field(default=1e-4, validator=positive)
    weight_decay: float = field(default=0.01, validator=not_negative)
    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=_decay_rates)
    eps: float = field(default=1e-8, validator=positive)
    batch_size: int = field(default=32, validator=whole)
    big_batch: int = field(default=320, validator=whole)
    top: float = field(default=0.1, validator=share)
    keep: float = field(default=0.05, validator=share)
    size: int | None = field(default=None, validator=optional_whole)
    chunk: int = field(default=32, validator=whole)
    train_steps: int | None = field(default=0, validator=optional_count)

    @train_steps.validator
    def _long_enough(self, attribute: Attribute[int | None], value: int | None) -> None:
        if self.mode == "online" and value == 0:
            raise ValueError("'train_steps' must be > 0, or none, where mode is 'online': rows are chosen while x is trained")

    def init(self, problem: Problem, seed: int) -> State:
        sources, pool = _sources(problem), problem.lower_data
        for role in ("differentiate", "stop") if self.reference == "validation" else ("stop",):
            if role not in problem.upper_data or problem.upper_data[role].size == 0:
                raise ConfigError(f"method 'rho-loss' needs validation rows for its reference, and the role {role!r} has none")
        if self.size is not None and self.size > pool.size:
            raise ConfigError(f"'size' must be at most the number of rows, {pool.size}: {self.size}")
        missing = torch.full((pool.size,), torch.nan, dtype=torch.float64)
        return {
            "seed": seed,
            "step": 0,
            "phase": "reference",
            "at": 0,
            "half": 0,
            "order": torch.randperm(pool.size, generator=Key(seed).fold("halves").generator()),
            "train": adamw_start(problem.x0),
            "best": {"x": dict(problem.x0), "loss": None},
            "irreducible": missing,
            "ranking": missing,
            "kept": torch.empty(0, dtype=torch.int64),
            "used": torch.zeros(len(sources.names), dtype=torch.int64),
            "theta": sources.theta(dict.fromkeys(sources.names, 1.0)),
            "cost": Cost().numbers(),
        }

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        phases = {
            "reference": self._reference,
            "irreducible": self._irreducible,
            "target": self._target,
            "scores": self._score,
            "online": self._online,
            "train": self._train,
        }
        record: Record = {"step": state["step"] + 1, "phase": state["phase"]}
        spent = Cost()
        changes: State = {}
        if not self.finished(state):
            changes, seen, spent = phases[state["phase"]](problem, on_host(state))
            record |= seen
        cost = Cost(**state["cost"]) + spent
        record |= {**{f"cost_{name}": number for name, number in cost.numbers().items()}, "oracle_calls": cost.calls}
        return {**state, **changes, "step": state["step"] + 1, "cost": cost.numbers()}, record

    def finished(self, state: State) -> bool:
        """Whether rows are chosen and x is trained as long as asked."""
        return state["phase"] in ("train", "online") and self.train_steps is not None and state["at"] >= self.train_steps

    def result(self, state: State) -> tuple[Tree, Tree]:
        """(θ, x); x is the reference's until there is another."""
        return state["theta"], adamw_part(state["train"], "x")

    @property
    def untrained(self) -> str:
        """Why x is not one that was trained on the mixture; empty where it is."""
        return "x did not learn from the chosen rows (train_steps = 0)" if self.train_steps == 0 else ""

    def ranking(self, problem: Problem, state: State) -> Tensor:
        """Each row's reducible loss when it was last computed; NaN where it was not, and everywhere until a static score is
        known of every row: the best of some rows are not the best."""
        ranking: Tensor = state["ranking"]
        if self.mode == "static" and bool(ranking.isnan().any()):
            return torch.full_like(ranking, torch.nan)
        return ranking

    def _update(self, problem: Problem, state: State, data: Data, rows: Tensor, lr: float) -> tuple[Tree, Tensor]:
        loss = _sources(problem).pooled if data is problem.lower_data else problem.f
        return adamw(
            loss, problem.theta0, data.rows(rows.to(data.device)), state["train"], step=state["step"] + 1,
            count=state["at"] + 1, lr=lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay,
        )  # fmt: skip

    def _halves(self, problem: Problem, state: State) -> tuple[Data, Tensor, Tensor]:
        """What the present reference learns from, as data and row numbers, and the rows of the pool that it scores."""
        if self.reference == "validation":
            data = problem.upper_data["differentiate"]
            return data, torch.arange(data.size), torch.arange(problem.lower_data.size)
        halves = torch.tensor_split(state["order"], 2)
        return problem.lower_data, halves[state["half"]], halves[1 - state["half"]]

    def _reference(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """One update of the reference; at the start and after each epoch its loss on rows set apart for stopping."""
        data, own, _ = self._halves(problem, state)
        held_out, at = problem.upper_data["stop"], state["at"]
        best, spent = state["best"], Cost()
        everything = torch.arange(held_out.size)

        def better(x: Tree) -> State:
            losses = row_losses(problem, x, held_out, everything, state["step"] + 1, self.chunk)
            loss = float(losses.mean())
            return {"x": x, "loss": loss} if best["loss"] is None or loss < best["loss"] else best

        looked = Cost(upper_values=1, rows=held_out.size)
        if at == 0:
            best, spent = better(adamw_part(state["train"], "x")), looked
        rows = own[epoch_rows(Key(state["seed"]).fold("reference", state["half"]), len(own), at, self.batch_size)]
        trained, loss = self._update(problem, state, data, rows, self.reference_lr)
        lower = data is problem.lower_data
        spent += Cost(lower_gradients=int(lower), upper_gradients=int(not lower), rows=len(rows))
        updates = math.ceil(len(own) / self.batch_size)
        if (at + 1) % updates == 0:
            best, spent = better(adamw_part(trained, "x")), spent + looked
        changes: State = {"train": trained, "best": best, "at": at + 1}
        if at + 1 == updates * self.reference_epochs:
            changes |= {"phase": "irreducible", "at": 0, "train": adamw_start(best["x"]), "best": {}}
        return changes, {"lower_loss" if lower else "upper_loss": loss, "stop_loss": best["loss"]}, spent

    def _losses(self, problem: Problem, state: State, rows: Tensor) -> tuple[Tensor, Tensor, Cost]:
        """The losses of the next of some rows of the pool, and their numbers."""
        pool, index = problem.lower_data, rows[state["at"] : state["at"] + self.chunk]
        losses = row_losses(problem, adamw_part(state["train"], "x"), pool, index, state["step"] + 1, self.chunk)
        return losses, index, Cost(upper_values=1, rows=len(index))

    def _irreducible(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        *_, rows = self._halves(problem, state)
        losses, index, spent = self._losses(problem, state, rows)
        irreducible = state["irreducible"].index_copy(0, index, losses.double())
        changes: State = {"irreducible": irreducible, "at": state["at"] + len(index)}
        if changes["at"] == len(rows):
            changes |= {"at": 0, "train": adamw_start(problem.x0)}
            if self.reference == "held-out" and state["half"] == 0:
                changes |= {"phase": "reference", "half": 1, "best": {"x": dict(problem.x0), "loss": None}}
            else:
                target = "scores" if self.target_steps == 0 else "target"
                changes["phase"] = "online" if self.mode == "online" else target
        return changes, {"lower_loss": losses.mean()}, spent

    def _target(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        size = problem.lower_data.size
        steps = self.target_steps or math.ceil(size / self.batch_size)
        rows = epoch_rows(Key(state["seed"]).fold("target"), size, state["at"], self.batch_size)
        trained, loss = self._update(problem, state, problem.lower_data, rows, self.lr)
        over = state["at"] + 1 == steps
        changes: State = {"train": trained, "at": 0 if over else state["at"] + 1, "phase": "scores" if over else "target"}
        return changes, {"lower_loss": loss}, Cost(lower_gradients=1, rows=len(rows))

    def _score(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        losses, index, spent = self._losses(problem, state, torch.arange(problem.lower_data.size))
        ranking = state["ranking"].index_copy(0, index, losses.double() - state["irreducible"][index])
        changes: State = {"ranking": ranking, "at": state["at"] + len(index)}
        if changes["at"] == problem.lower_data.size:
            kept = highest(ranking, self.size or max(1, round(self.keep * len(ranking))))
            changes |= {"phase": "train", "at": 0, "kept": kept, "theta": self._mixture(problem, kept)}
            if self.train_steps != 0:
                changes["train"] = adamw_start(problem.x0)
        return changes, {"lower_loss": losses.mean()}, spent

    def _train(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """One update on the kept rows, whose epochs go round."""
        kept, at = state["kept"], state["at"]
        epoch, place = divmod(at, math.ceil(len(kept) / self.batch_size))
        order = torch.randperm(len(kept), generator=Key(state["seed"]).fold("train", epoch).generator())
        rows = kept[order[place * self.batch_size : (place + 1) * self.batch_size]]
        trained, loss = self._update(problem, state, problem.lower_data, rows, self.lr)
        return {"train": trained, "at": at + 1}, {"lower_loss": loss}, Cost(lower_gradients=1, rows=len(rows))

    def _online(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        pool = problem.lower_data
        index = epoch_rows(Key(state["seed"]).fold("online"), pool.size, state["at"], min(self.big_batch, pool.size))
        losses = row_losses(problem, adamw_part(state["train"], "x"), pool, index, state["step"] + 1, self.chunk)
        scores = losses.double() - state["irreducible"][index]
        chosen = index[highest(scores, max(1, int(self.top * len(index))))]
        trained, loss = self._update(problem, state, pool, chosen, self.lr)
        used = state["used"] + counts_of(pool, chosen)
        names = _sources(problem).names
        changes: State = {
            "train": trained,
            "at": state["at"] + 1,
            "ranking": state["ranking"].index_copy(0, index, scores),
            "used": used,
            "theta": _sources(problem).theta(dict(zip(names, used.tolist(), strict=True))),
        }
        spent = Cost(lower_gradients=1, upper_values=1, rows=len(index) + len(chosen))
        return changes, {"lower_loss": loss, "reducible_loss": scores.mean()}, spent

    def _mixture(self, problem: Problem, rows: Tensor) -> Tree:
        sources = _sources(problem)
        return sources.theta(dict(zip(sources.names, counts_of(problem.lower_data, rows).tolist(), strict=True)))


def _sources(problem: Problem) -> Sources:
    if problem.sources is None or problem.lower_data.strata is None:
        raise ConfigError("method 'rho-loss' chooses among the rows of data sources, and this problem has none")
    return problem.sources
