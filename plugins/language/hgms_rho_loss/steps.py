"""What the phases of RHO-LOSS do with a model: an update of x, and the losses of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

import hgms_llm
from hgms_core import Cost, Data, NumericalError, Problem, Sources, State, Tree

if TYPE_CHECKING:
    from hgms_rho_loss.rho_loss import RhoLoss


def update(method: RhoLoss, problem: Problem, state: State, data: Data, rows: Tensor, lr: float) -> tuple[Tree, Tensor, Cost]:
    """One update of the state's x on some rows, that loss, and the cost: on the pool's rows or validation rows."""
    lower = data is problem.lower_data
    batch, count, step = data.rows(rows.to(data.device)), state["at"] + 1, state["step"] + 1
    loss = sources_of(problem).pooled if lower else problem.f
    trained, value = hgms_llm.adamw(loss, problem.theta0, batch, state["train"], method, lr=lr, count=count, step=step)
    return trained, value, Cost(lower_gradients=int(lower), upper_gradients=int(not lower), rows=len(rows))


def next_losses(method: RhoLoss, problem: Problem, state: State, rows: Tensor) -> tuple[Tensor, Tensor, Cost]:
    """The losses of the next ``chunk`` of some rows of the pool, and their numbers."""
    index = rows[state["at"] : state["at"] + method.chunk]
    losses = row_losses(method, problem, hgms_llm.adamw_part(state["train"], "x"), problem.lower_data, index, state)
    return losses, index, Cost(upper_values=1, rows=len(index))


def row_losses(method: RhoLoss, problem: Problem, x: Tree, data: Data, index: Tensor, state: State) -> Tensor:
    """The loss of each row, ``[B]`` on the CPU, without a graph and without dropout, ``chunk`` rows at a time."""
    examples, parts = sources_of(problem).examples, torch.split(index, method.chunk)
    with torch.no_grad():
        losses = torch.cat([examples(x, data.rows(part.to(data.device))) for part in parts])
    if not torch.isfinite(losses).all():
        raise NumericalError(
            f"step {state['step'] + 1}: the loss of a row is not finite; lower the learning rates, or check the rows"
        )
    return losses.cpu()


def sources_of(problem: Problem) -> Sources:
    return hgms_llm.sources_of(problem, "method 'rho-loss' chooses among the rows of")
