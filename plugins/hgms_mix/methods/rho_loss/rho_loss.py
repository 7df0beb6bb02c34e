"""RHO-LOSS: select rows that are not yet learned, but easy for a model trained on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal, final

import torch
from attrs import field
from torch import Tensor

import hgms_mix.lm
from hgms.arguments import require
from hgms.config import lowering
from hgms_core import Cost, Data, Key, Problem, Record, State, Tree, component
from hgms_core.validators import not_negative, positive


@final
@component
class Reference:
    """Table ``reference`` of RHO-LOSS: the training of x_ref.

    Parameters
    ----------
    rows
        ``held-out`` rows of the pool, or ``validation`` rows.
    epochs, lr
        Passes over the rows, and the learning rate of AdamW.

    Examples
    --------
    >>> Reference(rows="validation").epochs
    4
    """

    rows: Literal["held-out", "validation"] = "held-out"
    epochs: int = field(default=4, validator=positive)
    lr: float = field(default=1e-4, validator=positive)


@final
@component
class RhoLoss(hgms_mix.lm.RowSelection):
    """Reducible holdout loss: rank rows by the part of their loss that can still be learned::

        score(z) = ℓ(x; z) − ℓ(x_ref; z)

    The reference x_ref is trained without z. The pool is split into two random halves. For each
    half, a reference is trained on it from x0, and computes the irreducible loss ℓ(x_ref; z) of the
    rows of the other half once (the paper's form for data without a holdout set). With
    ``reference.rows = "validation"``, a single reference is trained on the validation rows of the
    role ``differentiate`` instead. Then a low irreducible loss also means that a row is like the
    target. A reference has a state after each epoch, and x0. The state with the lowest mean loss on
    the rows of the role ``stop`` is kept. The test set is not used.

    ``static``: x is x0 after ``target_steps`` updates on random rows of the pool; the ``keep``
    share with the highest scores is kept, and θ has the sources' shares of it. ``online``: every
    update draws ``big_batch`` rows of the pool, scores them at the current x and updates x on the
    ``top`` share of them; θ has the sources' shares of all rows used so far.

    One step is one update, or the losses of ``chunk`` rows. Dropout is off throughout.

    Use when rows differ in their noise. Avoid ``held-out`` if sources are off-target but learnable.
    Avoid ``target_steps = 0`` if sources differ in the level of their losses (long or formal
    texts): then the level decides.

    Parameters
    ----------
    mode
        ``static`` or ``online``.
    reference
        a :class:`Reference`.
    target_steps
        Updates of x before static scores (None: one pass over the pool).
    lr, weight_decay, betas, eps
        AdamW of x (the last three of x_ref too).
    batch_size
        Rows of an update (not online).
    big_batch, top
        Of an online update.
    keep
        Share of all rows that static scores keep, or ``size``: their number.
    chunk
        Rows whose losses are computed at a time.
    train_steps
        Updates of a fresh x on the kept rows (0: x is the scored x); online: of x. None: to the
        budget's end.

    Raises
    ------
    ConfigError
        For a problem without sources or rows of the role ``stop``.
    NumericalError
        For infinite losses.

    Notes
    -----
    Cost: an update of x is 1 lower gradient, and so is an update of x_ref (1 upper gradient on
    validation rows); each pass over rows for their losses is 1 upper value. Memory: at most 4 lower
    states (x, two moments, the best x_ref so far).

    Source: Mindermann et al., *Prioritized training on points that are learnable, worth learning,
    and not yet learnt*, 2022.

    Examples
    --------
    >>> RhoLoss(mode="online", train_steps=1000).top
    0.1
    """

    name: ClassVar[str] = "rho-loss"
    placeholder: ClassVar[str] = "x did not learn from the chosen rows"

    mode: Literal["static", "online"] = "static"
    reference: Reference = Reference()
    target_steps: int | None = field(default=None, validator=hgms_mix.lm.optional_count)
    weight_decay: float = field(default=0.01, validator=not_negative)
    big_batch: int = field(default=320, validator=positive)
    top: float = field(default=0.1, validator=hgms_mix.lm.some_share)

    memory_hints = lowering(same=["chunk"], other=["batch_size"])

    def __attrs_post_init__(self) -> None:
        require(
            self.mode != "online" or self.train_steps != 0,
            "conflicting-options",
            'train_steps=0 is not supported with mode="online", which selects rows during training',
            place=("train_steps",),
            hint='set 1 or more, or "none"',
        )

    def init(self, problem: Problem, seed: int) -> State:
        sources = self.sources(problem)
        for role in ("differentiate", "stop") if self.reference.rows == "validation" else ("stop",):
            hgms_mix.lm.check_role(problem, "the reference of method 'rho-loss' requires", role)
        started = self.start(problem, seed, "reference")
        size = problem.lower_data.size
        return {
            **started,
            "half": 0,
            "order": torch.randperm(size, generator=Key(seed).fold("halves").generator()),
            "best": {"x": dict(problem.x0), "loss": None},
            "irreducible": started["ranking"],
            "used": torch.zeros(len(sources.names), dtype=torch.int64),
        }

    @property
    def phases(self) -> Mapping[str, hgms_mix.lm.Phase]:
        return {
            "reference": partial(train_reference, self),
            "irreducible": partial(score_unseen, self),
            "target": self._target,
            "scores": self._score,
            "online": self._online,
            "train": self.train,
        }

    def is_finished(self, state: State) -> bool:
        """Return whether rows are selected and the training of x is complete."""
        trains = state["phase"] in ("train", "online")
        return trains and self.train_steps is not None and state["at"] >= self.train_steps

    def ranking(self, problem: Problem, state: State) -> Tensor:
        """Return the last computed reducible loss of each row; NaN if it was not computed.

        Static scores are NaN until all rows have a score, because the best of some rows are not the
        best of all.
        """
        ranking: Tensor = state["ranking"]
        is_partial = self.mode == "static" and bool(ranking.isnan().any())
        return torch.full_like(ranking, torch.nan) if is_partial else ranking

    def _target(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        pool = problem.lower_data
        at = state["at"]
        rows = hgms_mix.lm.epoch_rows(
            Key(state["seed"]).fold("target"), pool.size, at, self.batch_size
        )
        changes, record, spent = self.update_on_rows(problem, state, rows)
        over = at + 1 == (self.target_steps or math.ceil(pool.size / self.batch_size))
        changes |= {"at": 0 if over else at + 1, "phase": "scores" if over else "target"}
        return changes, record, spent

    def _score(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        pool = problem.lower_data
        losses, index, spent = next_losses(self, problem, state, torch.arange(pool.size))
        ranking = state["ranking"].index_copy(
            0, index, losses.double() - state["irreducible"][index]
        )
        changes: State = {"ranking": ranking, "at": state["at"] + len(index)}
        if changes["at"] == pool.size:
            changes |= {**self.selection(problem, ranking), "phase": "train", **self.fresh(problem)}
        return changes, {"lower_loss": losses.mean()}, spent

    def _online(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        pool = problem.lower_data
        big = min(self.big_batch, pool.size)
        index = hgms_mix.lm.epoch_rows(
            Key(state["seed"]).fold("online"), pool.size, state["at"], big
        )
        losses = row_losses(
            self, problem, hgms_mix.lm.adamw_part(state["train"], "x"), pool, index, state
        )
        scores = losses.double() - state["irreducible"][index]
        chosen = index[hgms_mix.lm.highest(scores, max(1, int(self.top * len(index))))]
        changes, record, spent = self.update_on_rows(problem, state, chosen)
        used = state["used"] + torch.tensor(list(hgms_mix.lm.source_counts(pool, chosen).values()))
        changes |= {
            "at": state["at"] + 1,
            "ranking": state["ranking"].index_copy(0, index, scores),
            "used": used,
            "theta": self.theta(problem, used),
        }
        return (
            changes,
            record | {"reducible_loss": scores.mean()},
            spent + Cost(upper_values=1, rows=len(index)),
        )


# --- the reference x_ref, with the irreducible losses ℓ(x_ref; z) of the pool's rows


def train_reference(method: RhoLoss, problem: Problem, state: State) -> tuple[State, Record, Cost]:
    """Run one update of the reference.

    At the start and after each epoch, the loss on the rows of the role ``stop`` is computed; the
    state with the lowest loss is kept.
    """
    data, own, _ = _halves(method, problem, state)
    at = state["at"]
    best = state["best"]
    spent = Cost()
    updates = math.ceil(len(own) / method.batch_size)
    if at == 0:
        best, spent = _better(method, problem, state, state["train"], best)
    key = Key(state["seed"]).fold("reference", state["half"])
    rows = own[hgms_mix.lm.epoch_rows(key, len(own), at, method.batch_size)]
    changes, record, cost = method.update_on_rows(
        problem, state, rows, lr=method.reference.lr, data=data
    )
    spent += cost
    if (at + 1) % updates == 0:
        best, cost = _better(method, problem, state, changes["train"], best)
        spent += cost
    changes |= {"best": best, "at": at + 1}
    if at + 1 == updates * method.reference.epochs:
        changes |= {
            "phase": "irreducible",
            "at": 0,
            "train": hgms_mix.lm.adamw_start(best["x"]),
            "best": {},
        }
    return changes, record | {"stop_loss": best["loss"]}, spent


def score_unseen(method: RhoLoss, problem: Problem, state: State) -> tuple[State, Record, Cost]:
    """Compute the losses of some rows that the reference was not trained on.

    After the last rows, the reference of the other half follows, or the training of x.
    """
    *_, rows = _halves(method, problem, state)
    losses, index, spent = next_losses(method, problem, state, rows)
    irreducible = state["irreducible"].index_copy(0, index, losses.double())
    changes: State = {"irreducible": irreducible, "at": state["at"] + len(index)}
    if changes["at"] == len(rows):
        changes |= {"at": 0, "train": hgms_mix.lm.adamw_start(problem.x0)}
        if method.reference.rows == "held-out" and state["half"] == 0:
            changes |= {
                "phase": "reference",
                "half": 1,
                "best": {"x": dict(problem.x0), "loss": None},
            }
        else:
            target = "scores" if method.target_steps == 0 else "target"
            changes["phase"] = "online" if method.mode == "online" else target
    return changes, {"lower_loss": losses.mean()}, spent


def _better(
    method: RhoLoss, problem: Problem, state: State, trained: Tree, best: State
) -> tuple[State, Cost]:
    """Return the reference state with the lower mean loss on the rows of the role ``stop``."""
    data = problem.upper_data["stop"]
    x = hgms_mix.lm.adamw_part(trained, "x")
    loss = float(row_losses(method, problem, x, data, torch.arange(data.size), state).mean())
    better = {"x": x, "loss": loss} if best["loss"] is None or loss < best["loss"] else best
    return better, Cost(upper_values=1, rows=data.size)


def _halves(method: RhoLoss, problem: Problem, state: State) -> tuple[Data, Tensor, Tensor]:
    """Return the training data and rows of the current reference, and the pool rows that it
    scores.
    """
    if method.reference.rows == "validation":
        data = problem.upper_data["differentiate"]
        return data, torch.arange(data.size), torch.arange(problem.lower_data.size)
    halves = torch.tensor_split(state["order"], 2)
    return problem.lower_data, halves[state["half"]], halves[1 - state["half"]]


def next_losses(
    method: RhoLoss, problem: Problem, state: State, rows: Tensor
) -> tuple[Tensor, Tensor, Cost]:
    """Return the losses of the next ``chunk`` of the given pool rows, the row numbers and the
    cost.
    """
    index = rows[state["at"] : state["at"] + method.chunk]
    losses = row_losses(
        method,
        problem,
        hgms_mix.lm.adamw_part(state["train"], "x"),
        problem.lower_data,
        index,
        state,
    )
    return losses, index, Cost(upper_values=1, rows=len(index))


def row_losses(
    method: RhoLoss, problem: Problem, x: Tree, data: Data, index: Tensor, state: State
) -> Tensor:
    """Return the loss of each row, ``[B]`` on the CPU, without a graph and without dropout.

    Rows are processed in pieces of ``chunk``.
    """
    examples = method.sources(problem).examples
    parts = torch.split(index, method.chunk)
    with torch.no_grad():
        losses = torch.cat([examples(x, data.rows(part.to(data.device))) for part in parts])
    hgms_mix.lm.check_finite(
        losses,
        "the loss of a row",
        state["step"] + 1,
        hint="decrease lr and reference.lr, or check the rows",
    )
    return losses.cpu()
