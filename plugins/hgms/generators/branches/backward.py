"""The way back through a run of small steps by programs: one of a step, and one of the
derivative of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.autograd.function import once_differentiable

from hgms.compiled import programs_of
from hgms.generators.branches.differentiable import differentiable_step
from hgms.generators.branches.program import SMALL, table
from hgms.generators.branches.rule import Coefficients, Rule
from hgms_core import Loss, Problem, Tree, detach

PATH = "path"
BACK = "way back"
"""The names of the programs."""


@frozen(eq=False)
class Run:
    """A run that was made: [x, m, v] before each step and at the end, each step's batch and
    numbers, and the loss before it.

    Nothing of a graph is kept: on the way back each step is computed again from the state before
    it.
    """

    theta: Tree
    start: Tree
    states: list[list[Tree]]
    steps: list[tuple[Any, Any]]
    losses: list[Tensor]
    back: Callable[..., Any]

    def end(self, steps: int) -> Tree:
        """The iterate after so many steps, as a differentiable function of θ and of where the
        run began.
        """
        point = self.states[steps][0]
        inputs = [*self.theta.values(), *self.start.values()]
        if not any(leaf.requires_grad for leaf in inputs):
            return point
        outputs = _Differentiable.apply(
            partial(self._backward, steps), list(point.values()), *inputs
        )
        return dict(zip(point, cast("tuple[Tensor, ...]", outputs), strict=True))

    def _backward(self, steps: int, grads: Sequence[Tensor]) -> list[Tensor]:
        """What ``grads`` of the iterate after so many steps are in θ, and in the start."""
        theta = detach(self.theta)
        sums = {name: torch.zeros_like(leaf) for name, leaf in theta.items()}
        along = [dict(zip(self.start, grads, strict=True))]
        along += [
            {name: torch.zeros_like(leaf) for name, leaf in moments.items()}
            for moments in self.states[0][1:]
        ]
        for state, step in zip(
            reversed(self.states[:steps]), reversed(self.steps[:steps]), strict=True
        ):
            sums, along = self.back(theta, state, *step, sums, along)
        return [*sums.values(), *along[0].values()]


def compiled_run(
    problem: Problem,
    theta: Tree,
    rule: Rule,
    x: Tree,
    moments: list[Tree],
    index: Tensor | None,
    rates: Sequence[float],
    decay: float,
    rows: int,
) -> Run | None:
    """A run by programs; None where nothing is compiled, or steps are so large that computing them
    again on the way back takes longer than launching them."""
    programs = programs_of(problem)
    work = sum(leaf.numel() for leaf in x.values()) * rows
    if programs is None or work > SMALL:
        return None
    how = (problem.g, evolve(rule, done=0), bool(decay))
    ahead = programs((PATH, *how), partial(_ahead, *how))
    back = programs((BACK, *how), partial(_back, *how))
    run = Run(theta, x, [[detach(x), *moments]], [], [], back)
    numbers = table(rule, [[rate] for rate in rates], [decay], next(iter(x.values())))
    still = detach(theta)
    whole = problem.lower_data.batch(None) if index is None else None
    for step, row in enumerate(numbers.unbind()):
        batch = whole if index is None else problem.lower_data.batch(index[step])
        state, loss = ahead(still, run.states[-1], batch, row)
        run.states.append(state)
        run.steps.append((batch, row))
        run.losses.append(loss)
    return run


def _ahead(
    g: Loss, rule: Rule, decayed: bool, theta: Tree, state: list[Tree], batch: Tree, numbers: Tensor
) -> tuple[list[Tree], Tensor]:
    return differentiable_step(
        g, rule, theta, state, [(1.0, batch)], _coefficients(numbers, decayed), False
    )


def _back(
    g: Loss,
    rule: Rule,
    decayed: bool,
    theta: Tree,
    state: list[Tree],
    batch: Tree,
    numbers: Tensor,
    sums: Tree,
    along: list[Tree],
) -> tuple[Tree, list[Tree]]:
    """``sums`` and what the step's derivative in θ adds to them, and the derivative in the state
    before it, of ``along``.
    """
    upper, *before = (
        {name: leaf.detach().requires_grad_() for name, leaf in tree.items()}
        for tree in (theta, *state)
    )
    after, _ = differentiable_step(
        g, rule, upper, before, [(1.0, batch)], _coefficients(numbers, decayed), True
    )
    inputs = [leaf for tree in (upper, *before) for leaf in tree.values()]
    ends, slopes = [[leaf for tree in trees for leaf in tree.values()] for trees in (after, along)]
    grads = iter(torch.autograd.grad(ends, inputs, slopes, materialize_grads=True))
    summed = {name: leaf + next(grads) for name, leaf in sums.items()}
    return summed, [{name: next(grads) for name in tree} for tree in before]


def _coefficients(row: Tensor, decayed: bool) -> Coefficients:
    rate, kept, scale, correction = row.unbind()
    return Coefficients(rate, kept if decayed else None, scale, correction)


class _Differentiable(torch.autograd.Function):
    """``outputs`` as a function of inputs whose derivative is ``back(grads)``."""

    @staticmethod
    def forward(
        ctx: Any, back: Callable[..., list[Tensor]], outputs: list[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.back(grads)
