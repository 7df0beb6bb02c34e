"""Compiled backward pass through a run of small steps.

One compiled function takes a step; another computes the derivative of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.autograd.function import once_differentiable

from hgms.generators.branches.course import Course, differentiable_step
from hgms.generators.branches.program import SMALL, table
from hgms.optim.rule import Coefficients, Rule
from hgms_core import Loss, Tree, detach
from hgms_core.trees import require_grad

PATH = "path"
BACK = "backward pass"
"""The names of the compiled functions."""


@frozen(eq=False)
class Run:
    """A finished run: states, each step's batch and numbers, and the loss before it.

    The states are [x, m, v] before each step and at the end. The run keeps no graph. The backward
    pass recomputes each step from the state before it.
    """

    theta: Tree
    start: Tree
    states: list[list[Tree]]
    steps: list[tuple[Any, Any]]
    losses: list[Tensor]
    back: Callable[..., Any]

    def end(self, steps: int) -> Tree:
        """Return the iterate after ``steps`` steps.

        It is a differentiable function of θ and of the start.
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
        """Return the gradients in θ and in the start.

        ``grads`` are the gradients in the iterate after ``steps`` steps.
        """
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


@frozen
class StepForm:
    """What a compiled step depends on: the loss, the rule, and whether weights decay."""

    g: Loss
    rule: Rule
    decayed: bool


def compiled_run(course: Course, rule: Rule, theta: Tree) -> Run | None:
    """Run compiled steps. Return None if compilation is off or steps exceed SMALL.

    For larger steps, the recomputation in the backward pass takes longer than the launches that it
    saves.
    """
    problem = course.problem
    programs = problem.compiler
    work = sum(leaf.numel() for leaf in course.x.values()) * course.rows
    if programs is None or work > SMALL:
        return None
    form = StepForm(problem.g, evolve(rule, done=0), bool(course.decay))
    ahead = programs((PATH, form), partial(_ahead, form))
    back = programs((BACK, form), partial(_back, form))
    x, *moments = course.state()
    run = Run(theta, x, [[detach(x), *moments]], [], [], back)
    rates = [[rate] for rate in course.rates]
    numbers = table(rule, rates, [course.decay], next(iter(x.values())))
    index = course.index
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
    form: StepForm, theta: Tree, state: list[Tree], batch: Tree, numbers: Tensor
) -> tuple[list[Tree], Tensor]:
    coefficients = _coefficients(numbers, form.decayed)
    return differentiable_step(form.g, form.rule, theta, state, [(1.0, batch)], coefficients, False)


def _back(
    form: StepForm,
    theta: Tree,
    state: list[Tree],
    batch: Tree,
    numbers: Tensor,
    sums: Tree,
    along: list[Tree],
) -> tuple[Tree, list[Tree]]:
    """Propagate ``along`` backward through one step.

    Return ``sums`` plus the step's derivative in θ, and the derivative in the state before the
    step.
    """
    upper, *before = (require_grad(tree) for tree in (theta, *state))
    coefficients = _coefficients(numbers, form.decayed)
    after, _ = differentiable_step(
        form.g, form.rule, upper, before, [(1.0, batch)], coefficients, True
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
    """The ``outputs`` as a function of the inputs, with the derivative ``back(grads)``."""

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
