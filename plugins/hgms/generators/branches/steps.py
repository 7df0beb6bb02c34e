"""Lower steps of one branch or of a stack, in place: their plan, their gradients, the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import frozen
from torch import Tensor

from hgms.optim.rule import Coefficients, Rule, move_
from hgms.optim.torch_rule import TorchRule
from hgms_core import Data, Group, Mode, Problem, Tree, gradient


@frozen(kw_only=True, eq=False)
class Plan:
    """The steps of N branches.

    ``index`` contains the row numbers of each step (all if absent). With ``own``, a branch axis
    comes first. ``rates`` has one rate per step and branch, ``decays`` one per branch. With a torch
    optimiser, both are factors on the optimiser's settings. A step uses ``rows`` rows, in
    ``accumulate`` batches.
    """

    rule: Rule | TorchRule
    index: Tensor | None
    own: bool
    rates: list[list[float]]
    decays: list[float]
    rows: int
    accumulate: int
    mode: Mode
    chunk: int | None


@frozen(eq=False)
class Slope:
    """(∇_x g, g) on the batch of each step, evaluated at the leaves ``x`` of the group."""

    x: Tree
    at: Callable[[int], tuple[list[Tensor], Tensor]]


def pieces(data: Data, numbers: Tensor | None, count: int) -> list[tuple[float, Tree]]:
    """Split rows into ``count`` batches, each with its share of the rows.

    ``numbers`` contains the row numbers, along the last axis (all if absent).
    """
    if count == 1 or not data.size:
        return [(1.0, data.batch(numbers))]
    if numbers is None:
        numbers = torch.arange(data.size, device=data.device)
    parts = numbers.tensor_split(min(count, numbers.shape[-1]), -1)
    return [(part.shape[-1] / numbers.shape[-1], data.batch(part)) for part in parts]


def slope_of(
    problem: Problem, theta: Tree, group: Group, index: Tensor | None, accumulate: int = 1
) -> Slope:
    """Return the gradients of a group on the rows ``index``, ``[steps, batch]`` (all if absent).

    A member axis comes first if each member has separate rows. ``accumulate`` is the number of
    batches per step.
    """
    data = problem.lower_data
    loss = group.loss

    def at(theta: Tree, x: Tree, numbers: Tensor | None) -> tuple[list[Tensor], Tensor]:
        if accumulate == 1:
            return gradient(loss, theta, x, data.batch(numbers))
        total = [torch.zeros_like(leaf) for leaf in x.values()]
        value = torch.zeros(())
        for share, batch in pieces(data, numbers, accumulate):
            grads, part = gradient(loss, theta, x, batch)
            torch._foreach_add_(total, grads, alpha=share)
            value = value.to(part) + share * part
        return total, value

    def numbers(step: int) -> Tensor | None:
        return None if index is None else index[..., step, :]

    return Slope(group.x, lambda step: at(theta, group.x, numbers(step)))


def of_part(part: slice | int, numbers: list[float], like: Tensor) -> float | Tensor:
    """Return the numbers of the branches in ``part``.

    The result is one number if all are equal (the usual and faster case), else one per member.
    """
    own = numbers[part] if isinstance(part, slice) else [numbers[part]]
    if all(number == own[0] for number in own):
        return own[0]
    return torch.tensor(own, dtype=like.dtype).to(like.device, non_blocking=True)


def advance(
    rule: Rule,
    group: Group,
    moments: Tree,
    slope: Slope,
    rates: Sequence[float | Tensor],
    decay: float | Tensor,
) -> Tensor:
    """Move ``group.x`` and ``moments`` in place, one step per rate; return the last lower
    losses.
    """
    leaves = list(slope.x.values())
    loss = torch.empty(())
    for step, rate in enumerate(rates):
        grads, loss = slope.at(step)
        numbers = Coefficients.of(rule, rule.done + step + 1, rate, decay)
        move_(rule, leaves, list(moments.values()), grads, numbers, isinstance(group.part, slice))
    return loss
