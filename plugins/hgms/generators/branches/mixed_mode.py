"""Backward pass by mixed-mode differentiation: step by step, without a graph of the path.

Each step uses reverse over forward mode.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hgms.generators.branches.backward import Run
from hgms.generators.branches.steps import Course, Point
from hgms.optim.rule import Coefficients, Rule
from hgms_core import Loss, Tree, detach, gradient, slopes
from hgms_core.hypergrad import twice_differentiable_attention
from hgms_core.trees import require_grad


def mixed_run(course: Course, rule: Rule, theta: Tree, first: int) -> Run:
    """Run the steps of ``course``, for a backward pass from the end to step ``first``.

    The run stores the state before each of these steps and the gradient used (MixFlow-MG saves
    both), but no graph. In the backward pass, a step costs one Hessian product, which also yields
    the mixed product.
    """
    still = detach(theta)
    point: Point = (course.x, course.moments)
    start = course.x
    points: list[Point] = []
    steps = []
    losses = []
    for step in range(len(course.rates)):
        x, moments = detach(point[0]), point[1]
        numbers = course.numbers(step)
        taken, loss = gradient(course.loss, still, x, course.batch(step))
        losses.append(loss)
        if step == first:
            start = point[0]
        if step >= first:
            points.append((x, moments))
            steps.append((step, (numbers, taken)))
        with torch.no_grad():
            point = rule.step(x, taken, moments, numbers)
    return Run(theta, start, [*points, point], steps, losses, partial(_back, course, rule))


def _back(
    course: Course,
    rule: Rule,
    theta: Tree,
    point: Point,
    step: int,
    inputs: tuple[Coefficients, list[Tensor]],
    sums: Tree,
    along: Point,
) -> tuple[Tree, Point]:
    """Propagate ``along`` backward through one step.

    Return ``sums`` plus the step's derivative in θ, and the derivative in the point before the
    step.
    """
    numbers, taken = inputs
    x, moments = (require_grad(tree) for tree in point)
    taken = [slope.detach().requires_grad_() for slope in taken]
    with torch.enable_grad():
        after = rule.step(x, taken, moments, numbers)
    leaves = [*taken, *x.values(), *moments.values()]
    ends = [leaf for tree in after for leaf in tree.values()]
    weights = [slope[name] for tree, slope in zip(after, along, strict=True) for name in tree]
    grads = iter(torch.autograd.grad(ends, leaves, weights, materialize_grads=True))
    v, before, memory = ({name: next(grads) for name in tree} for tree in (x, x, moments))
    mixed, product = second_products(course.loss, theta, point[0], course.batch(step), v)
    sums = {name: leaf + mixed[name] for name, leaf in sums.items()}
    before = {name: leaf + product[name] for name, leaf in before.items()}
    return sums, (before, memory)


def second_products(g: Loss, theta: Tree, x: Tree, batch: Any, v: Tree) -> tuple[Tree, Tree]:
    """Return (∇²_θx g · v, ∇²_xx g · v), by reverse over forward mode.

    The result is the reverse-mode gradient of g's forward-mode derivative along v. Forward over
    reverse gives the same result. In torch, the reverse pass then keeps a graph while it has
    tangents, which takes up to twice the memory (README).

    Examples
    --------
    >>> one = torch.ones(1)
    >>> second_products(
    ...     lambda t, x, _: (t["t"] * x["x"] ** 2).sum(),
    ...     {"t": 3 * one},
    ...     {"x": 2 * one},
    ...     {},
    ...     {"x": one},
    ... )
    ({'t': tensor([4.])}, {'x': tensor([6.])})
    """
    upper, lower = (require_grad(tree) for tree in (theta, x))
    with torch.enable_grad(), twice_differentiable_attention():
        along = torch.func.jvp(lambda point: g(upper, point, batch), (lower,), (v,))[1]
        grads = slopes(along, [*upper.values(), *lower.values()])
    count = len(upper)
    return dict(zip(upper, grads[:count], strict=True)), dict(
        zip(lower, grads[count:], strict=True)
    )
