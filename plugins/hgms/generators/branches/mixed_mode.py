"""Backward pass by mixed-mode differentiation: step by step, without a graph of the path.

Each step uses reverse over forward mode.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hgms.generators.branches.backward import Run
from hgms.generators.branches.course import Course, clip_by_norm, gradient_of_step
from hgms.generators.branches.steps import pieces
from hgms.optim.rule import Coefficients, Rule
from hgms_core import Loss, Tree, detach, slopes
from hgms_core.hypergrad import twice_differentiable_attention
from hgms_core.trees import require_grad


def mixed_run(course: Course, rule: Rule, theta: Tree, first: int) -> Run:
    """Run the steps of ``course``, for a backward pass from the end to step ``first``.

    The run stores the state before each of these steps and the gradient used (MixFlow-MG saves
    both), but no graph. In the backward pass, a step costs one Hessian product, which also yields
    the mixed product.
    """
    g = course.problem.g
    data = course.problem.lower_data
    still = detach(theta)
    index = course.index
    x, *moments = course.state()
    state = [detach(x), *moments]
    start = x
    states = []
    steps = []
    losses = []
    for step, rate in enumerate(course.rates):
        coefficients = rule.numbers(step, rate, course.decay)
        rows = None if index is None else index[step]
        point, taken, loss = gradient_of_step(
            g, still, state[0], pieces(data, rows, course.accumulate), graph=False
        )
        losses.append(loss)
        if step >= first:
            states.append(state)
            steps.append((rows, (coefficients, taken)))
            start = start if step > first or first == 0 else state[0]
        with torch.no_grad():
            state = rule.step(
                detach(point), clip_by_norm(rule.clip, taken, list(x)), state[1:], coefficients
            )
    return Run(theta, start, [*states, state], steps, losses, partial(_back, course, rule))


def _back(
    course: Course,
    rule: Rule,
    theta: Tree,
    state: list[Tree],
    rows: Tensor | None,
    step: tuple[Coefficients, list[Tensor]],
    sums: Tree,
    along: list[Tree],
) -> tuple[Tree, list[Tree]]:
    """Propagate ``along`` backward through one step.

    Return ``sums`` plus the step's derivative in θ, and the derivative in the state before the
    step.
    """
    numbers, taken = step
    x, *moments = (require_grad(tree) for tree in state)
    taken = [slope.detach().requires_grad_() for slope in taken]
    with torch.enable_grad():
        after = rule.step(x, clip_by_norm(rule.clip, taken, list(x)), moments, numbers)
    inputs = [*taken, *(leaf for tree in (x, *moments) for leaf in tree.values())]
    ends, weights = [[leaf for tree in trees for leaf in tree.values()] for trees in (after, along)]
    grads = iter(torch.autograd.grad(ends, inputs, weights, materialize_grads=True))
    v = {name: next(grads) for name in x}
    before = [{name: next(grads) for name in tree} for tree in (x, *moments)]
    for share, batch in pieces(course.problem.lower_data, rows, course.accumulate):
        mixed, product = second_products(course.problem.g, theta, state[0], batch, v)
        sums = {name: leaf + share * mixed[name] for name, leaf in sums.items()}
        before[0] = {name: leaf + share * product[name] for name, leaf in before[0].items()}
    return sums, before


def second_products(g: Loss, theta: Tree, x: Tree, batch: Any, v: Tree) -> tuple[Tree, Tree]:
    """Return (∇²_θx g · v, ∇²_xx g · v), by reverse over forward mode.

    The result is the reverse-mode gradient of g's forward-mode derivative along v. Forward over
    reverse gives the same result. In torch, the reverse pass then keeps a graph while it has
    tangents, which takes up to twice the memory (README).

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
