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

from hgms.generators.branches.program import SMALL, Block, run_block, table
from hgms.generators.branches.steps import Course, Point
from hgms.optim.rule import Rule
from hgms_core import Loss, Tree, detach
from hgms_core.trees import require_grad

PATH = "path"
BACK = "backward pass"
"""The names of the compiled functions."""


@frozen(eq=False)
class Run:
    """A finished run: points, each step's batch and numbers, and the loss before it.

    The points are (x, moments) before each step and at the end. The run keeps no graph. The
    backward pass recomputes each step from the point before it.
    """

    theta: Tree
    start: Tree
    points: list[Point]
    steps: list[tuple[Any, Any]]
    losses: list[Tensor]
    back: Callable[..., Any]

    def end(self, steps: int) -> Tree:
        """Return the iterate after ``steps`` steps.

        It is a differentiable function of θ and of the start.
        """
        x = self.points[steps][0]
        inputs = [*self.theta.values(), *self.start.values()]
        if not any(leaf.requires_grad for leaf in inputs):
            return x
        return with_backward(x, partial(self._backward, steps), inputs)

    def _backward(self, steps: int, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients in θ and in the start.

        ``grads`` are the gradients in the iterate after ``steps`` steps.
        """
        theta = detach(self.theta)
        sums, moments = (
            {name: torch.zeros_like(leaf) for name, leaf in tree.items()}
            for tree in (theta, self.points[0][1])
        )
        along = (dict(zip(self.start, grads, strict=True)), moments)
        for point, step in zip(
            reversed(self.points[:steps]), reversed(self.steps[:steps]), strict=True
        ):
            sums, along = self.back(theta, point, *step, sums, along)
        return [*sums.values(), *along[0].values()]


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
    form = evolve(Block.of(course, rule), axis=None)
    ahead = programs((PATH, problem.g, form), partial(run_block, problem.g, form))
    back = programs((BACK, problem.g, form), partial(_back, problem.g, form))
    run = Run(theta, course.x, [(detach(course.x), course.moments)], [], [], back)
    numbers = table(rule, course.rates, course.decays, next(iter(course.x.values())))
    still = detach(theta)
    for step, row in enumerate(numbers.split(1)):
        batch = course.batch(step)
        point, loss = ahead(still, run.points[-1], batch, row)
        run.points.append(point)
        run.steps.append((batch, row))
        run.losses.append(loss)
    return run


def _back(
    g: Loss,
    form: Block,
    theta: Tree,
    point: Point,
    batch: Tree,
    numbers: Tensor,
    sums: Tree,
    along: Point,
) -> tuple[Tree, Point]:
    """Propagate ``along`` backward through one step.

    Return ``sums`` plus the step's derivative in θ, and the derivative in the point before the
    step.
    """
    upper, x, moments = (require_grad(tree) for tree in (theta, *point))
    after, _ = run_block(g, form, upper, (x, moments), batch, numbers, graph=True)
    inputs = [leaf for tree in (upper, x, moments) for leaf in tree.values()]
    ends = [leaf for tree in after for leaf in tree.values()]
    slopes = [slope[name] for tree, slope in zip(after, along, strict=True) for name in tree]
    grads = iter(torch.autograd.grad(ends, inputs, slopes, materialize_grads=True))
    summed = {name: leaf + next(grads) for name, leaf in sums.items()}
    return summed, ({name: next(grads) for name in x}, {name: next(grads) for name in moments})


def with_backward(
    outputs: Tree, back: Callable[[Sequence[Tensor]], Sequence[Tensor]], inputs: Sequence[Tensor]
) -> Tree:
    """Return the ``outputs`` as a function of the inputs, with the derivative ``back(grads)``."""
    values = _WithBackward.apply(back, list(outputs.values()), *inputs)
    return dict(zip(outputs, cast("tuple[Tensor, ...]", values), strict=True))


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, back: Any, outputs: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.back(grads)
