"""Lower steps of one branch or of a stack of branches: one function takes a step."""

from __future__ import annotations

from typing import Any, Self

import torch
from attrs import evolve, frozen
from torch import Tensor

from hgms.generators.branches.torch_branches import advance_torch
from hgms.optim.rule import Rule, clipped
from hgms.optim.torch_rule import TorchRule
from hgms_core import Loss, Problem, Tree, gradient

Point = tuple[Tree, Tree]
"""The lower state and the state of the optimiser: x and the moments."""


@frozen
class LowerStep:
    """A step of an optimiser on a loss: of one branch, or of a stack with a loss for stacks."""

    loss: Loss
    rule: Rule | TorchRule
    stacked: bool = False

    def take(
        self, theta: Tree, point: Point, batch: Tree, numbers: Any, graph: bool = False
    ) -> tuple[Point, Tensor]:
        """Return (x and moments after the step, loss before it).

        With ``graph``, they are differentiable functions of ``theta`` and of ``point``.
        """
        assert isinstance(self.rule, Rule)
        x, moments = point
        grads, value = gradient(self.loss, theta, x, batch, graph)
        with torch.set_grad_enabled(graph):
            return self.rule.step(x, grads, moments, numbers, stacked=self.stacked), value


@frozen(kw_only=True, eq=False)
class Course(LowerStep):
    """A run of a branch or of a stack: its start, its moments, its batches and its rates.

    ``index`` contains the row numbers, ``[steps, batch]`` (all rows if absent); a member axis comes
    first if members have separate rows. A step uses ``rows`` rows.
    ``rates`` has one rate per step and member, ``decays`` one per member. With a torch optimiser,
    both are factors on the optimiser's settings.
    """

    problem: Problem
    x: Tree
    moments: Tree
    index: Tensor | None
    rates: list[list[float]]
    decays: list[float]
    rows: int

    def part(self, part: slice | int, loss: Loss, own: bool) -> Self:
        """Return the run of some members, or of one member, with its ``loss``.

        x and the moments share memory. ``own``: each member has separate rows.
        """
        chosen = part if isinstance(part, slice) else slice(part, part + 1)
        return evolve(
            self,
            loss=loss,
            stacked=isinstance(part, slice),
            x={name: leaf[part] for name, leaf in self.x.items()},
            moments={name: leaf[part] for name, leaf in self.moments.items()},
            index=self.index[part] if own and self.index is not None else self.index,
            rates=[step[chosen] for step in self.rates],
            decays=self.decays[chosen],
        )

    def batch(self, step: int) -> Tree:
        """Return the batch of a step."""
        numbers = None if self.index is None else self.index[..., step, :]
        return self.problem.lower_data.batch(numbers)

    def numbers(self, step: int) -> Any:
        """Return the coefficients of a step."""
        assert isinstance(self.rule, Rule)
        rate = one_or_each(self.rates[step], self.x)
        return self.rule.numbers(step, rate, one_or_each(self.decays, self.x))

    def advance(
        self, theta: Tree, first: int, last: int, remember: bool = False
    ) -> tuple[Tensor, list[Tree]]:
        """Move x and the moments in place from step ``first`` to step ``last``, without a graph.

        Return (losses before the last step, memory of each member's torch optimiser if
        ``remember``).
        """

        steps = range(first, last)
        if isinstance(self.rule, TorchRule):

            def slopes(step: int) -> tuple[list[Tree], Tensor]:
                grads, loss = gradient(self.loss, theta, self.x, self.batch(step))
                grads = clipped(grads, self.rule.clip, self.stacked)
                return self._members(dict(zip(self.x, grads, strict=True))), loss

            x = self._members(self.x)
            memories = self._members(self.moments)
            factors = [(self.rates[step], self.decays) for step in steps]
            return advance_torch(self.rule, x, memories, slopes, first, factors, remember)
        loss = torch.empty(())
        for step in steps:
            grads, loss = gradient(self.loss, theta, self.x, self.batch(step))
            self.rule.step(
                self.x, grads, self.moments, self.numbers(step), stacked=self.stacked, in_place=True
            )
        return loss, []

    def _members(self, tree: Tree) -> list[Tree]:
        """Return the rows of a stack."""
        if not self.stacked:
            return [tree]
        return [{name: leaf[i] for name, leaf in tree.items()} for i in range(len(self.decays))]


def one_or_each(numbers: list[float], x: Tree) -> float | Tensor:
    """Return one number if all are equal (the usual and faster case), else one per member."""
    if numbers.count(numbers[0]) == len(numbers):
        return numbers[0]
    like = next(iter(x.values()))
    return torch.tensor(numbers, dtype=like.dtype).to(like.device, non_blocking=True)
