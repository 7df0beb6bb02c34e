"""The reference of RHO-LOSS, x_ref, with the irreducible losses ℓ(x_ref; z) of the pool's rows,
and what x and x_ref share.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import hgms_mix.lm
from hgms_core import Cost, Data, Key, NumericalError, Problem, Record, Sources, State, Tree

if TYPE_CHECKING:
    from hgms_mix.methods.rho_loss.rho_loss import RhoLoss


def train(method: RhoLoss, problem: Problem, state: State) -> tuple[State, Record, Cost]:
    """One update of the reference; at the start and after each epoch its loss on the rows of the
    role ``stop``, by which the best of its states is kept."""
    data, own, _ = _halves(method, problem, state)
    at = state["at"]
    best = state["best"]
    spent = Cost()
    updates = math.ceil(len(own) / method.batch_size)
    if at == 0:
        best, spent = _better(method, problem, state, state["train"], best)
    key = Key(state["seed"]).fold("reference", state["half"])
    rows = own[hgms_mix.lm.epoch_rows(key, len(own), at, method.batch_size)]
    trained, loss, cost = update(method, problem, state, data, rows, method.reference_lr)
    spent += cost
    if (at + 1) % updates == 0:
        best, cost = _better(method, problem, state, trained, best)
        spent += cost
    changes: State = {"train": trained, "best": best, "at": at + 1}
    if at + 1 == updates * method.reference_epochs:
        changes |= {
            "phase": "irreducible",
            "at": 0,
            "train": hgms_mix.lm.adamw_start(best["x"]),
            "best": {},
        }
    kind = "lower_loss" if data is problem.lower_data else "upper_loss"
    return changes, {kind: loss, "stop_loss": best["loss"]}, spent


def score(method: RhoLoss, problem: Problem, state: State) -> tuple[State, Record, Cost]:
    """The losses of some rows that the reference has not seen; after the last of them the other
    half's turn, or x's.
    """
    *_, rows = _halves(method, problem, state)
    losses, index, spent = next_losses(method, problem, state, rows)
    irreducible = state["irreducible"].index_copy(0, index, losses.double())
    changes: State = {"irreducible": irreducible, "at": state["at"] + len(index)}
    if changes["at"] == len(rows):
        changes |= {"at": 0, "train": hgms_mix.lm.adamw_start(problem.x0)}
        if method.reference == "held-out" and state["half"] == 0:
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
    """The better of two states of the reference, by their mean loss on the rows of the role
    ``stop``.
    """
    data = problem.upper_data["stop"]
    x = hgms_mix.lm.adamw_part(trained, "x")
    loss = float(row_losses(method, problem, x, data, torch.arange(data.size), state).mean())
    better = {"x": x, "loss": loss} if best["loss"] is None or loss < best["loss"] else best
    return better, Cost(upper_values=1, rows=data.size)


def _halves(method: RhoLoss, problem: Problem, state: State) -> tuple[Data, Tensor, Tensor]:
    """What the present reference learns from, as data and row numbers, and the rows of the pool
    that it scores.
    """
    if method.reference == "validation":
        data = problem.upper_data["differentiate"]
        return data, torch.arange(data.size), torch.arange(problem.lower_data.size)
    halves = torch.tensor_split(state["order"], 2)
    return problem.lower_data, halves[state["half"]], halves[1 - state["half"]]


def update(
    method: RhoLoss, problem: Problem, state: State, data: Data, rows: Tensor, lr: float
) -> tuple[Tree, Tensor, Cost]:
    """One update of the state's x on some rows, that loss, and the cost: on the pool's rows or
    validation rows.
    """
    lower = data is problem.lower_data
    batch = data.rows(rows.to(data.device))
    count = state["at"] + 1
    step = state["step"] + 1
    loss = sources_of(problem).pooled if lower else problem.f
    trained, value = hgms_mix.lm.adamw(
        loss, problem.theta0, batch, state["train"], method, lr=lr, count=count, step=step
    )
    return (
        trained,
        value,
        Cost(lower_gradients=int(lower), upper_gradients=int(not lower), rows=len(rows)),
    )


def next_losses(
    method: RhoLoss, problem: Problem, state: State, rows: Tensor
) -> tuple[Tensor, Tensor, Cost]:
    """The losses of the next ``chunk`` of some rows of the pool, and their numbers."""
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
    """The loss of each row, ``[B]`` on the CPU, without a graph and without dropout, ``chunk``
    rows at a time.
    """
    examples = sources_of(problem).examples
    parts = torch.split(index, method.chunk)
    with torch.no_grad():
        losses = torch.cat([examples(x, data.rows(part.to(data.device))) for part in parts])
    if not torch.isfinite(losses).all():
        raise NumericalError(
            f"step {state['step'] + 1}: the loss of a row is not finite; lower the learning "
            "rates, or check the rows"
        )
    return losses.cpu()


def sources_of(problem: Problem) -> Sources:
    return hgms_mix.lm.sources_of(problem, "method 'rho-loss' chooses among the rows of")
