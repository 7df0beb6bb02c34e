"""Compiled functions for lower steps: one step per function, or several if a step is small."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from attrs import evolve, frozen
from torch import Tensor

from hgms.generators.branches.steps import Course, LowerStep, Point
from hgms.optim.adam import corrections
from hgms.optim.rule import Coefficients, Rule
from hgms_core import Loss, Problem, Tree

SMALL = 4_000_000
"""Maximum multiply-adds per step of a group for compiling several steps into one function. Below
this size the launch overhead matters.
"""
STEPS = 5
"""Maximum steps per compiled function. The compile time grows with their number."""
LENGTHS = (1, 2)
"""Steps per turn of a loop in the program of an outer step."""
TINY = 100_000
"""Maximum multiply-adds per step for twice as many steps per compiled function."""


@frozen
class Block:
    """The parameters of compiled steps: the rule, a stack or one branch, decay, the axis of steps.

    The axis is the axis of the batches (absent if all steps use the same batch).
    """

    rule: Rule
    stacked: bool
    decayed: bool
    axis: int | None

    @classmethod
    def of(cls, course: Course, rule: Rule) -> Block:
        axis = None if course.index is None else course.index.dim() - 2
        return cls(evolve(rule, done=0), course.stacked, any(course.decays), axis)


def advance_compiled(name: str, course: Course, rule: Rule, theta: Tree) -> Tensor:
    """Run :meth:`Course.advance` with compiled functions, requested under the generator's
    ``name``.
    """
    problem = course.problem
    index = course.index
    rates = course.rates
    like = next(iter(course.x.values()))
    numbers = table(rule, rates, course.decays, like)
    form = Block.of(course, rule)
    # The key uses the problem's loss, because the group's loss may be a new object in each call.
    block = problem.compiler((name, problem.g, form), partial(run_block, course.loss, form))
    length = _length(len(rates), sum(leaf.numel() for leaf in course.x.values()) * course.rows)
    point: Point = (course.x, course.moments)
    value = torch.empty(())
    data = problem.lower_data
    whole = data.batch(None) if index is None else None
    for first in range(0, len(rates), length):
        batches = data.batch(index[..., first : first + length, :]) if index is not None else whole
        point, value = block(theta, point, batches, numbers[first : first + length])
    pairs = list(zip((course.x, course.moments), point, strict=True))
    before = [leaf for tree, _ in pairs for leaf in tree.values()]
    after = [end[name] for tree, end in pairs for name in tree]
    torch._foreach_copy_(before, after)
    return value


def run_block(
    loss: Loss,
    form: Block,
    theta: Tree,
    point: Point,
    batches: Tree,
    numbers: Tensor,
    graph: bool = False,
) -> tuple[Point, Tensor]:
    """Take one step per row of ``numbers``; return (x and moments, lower losses before the last
    step).

    ``batches`` contains one batch per step along ``form.axis``.
    """
    step = LowerStep(loss, form.rule, form.stacked)
    value = numbers.new_empty(())
    for place, row in enumerate(numbers.unbind()):
        batch = (
            batches
            if form.axis is None
            else {name: leaf.select(form.axis, place) for name, leaf in batches.items()}
        )
        rate, kept, scale, correction = row.unbind()
        coefficients = Coefficients(
            rate, kept if form.decayed else None, scale, correction.reshape(-1)[0]
        )
        point, value = step.take(theta, point, batch, coefficients, graph)
    return point, value


def table(
    rule: Rule, rates: Sequence[Sequence[float]], decays: Sequence[float], like: Tensor
) -> Tensor:
    """Return the :class:`Coefficients` of every step, in float64 as without compilation.

    The shape is ``[steps, 4]``, or ``[steps, 4, members]`` if members differ.
    """
    alike = all(len(set(numbers)) == 1 for numbers in (*rates, decays))
    members = slice(0, 1) if alike else slice(None)
    rate = torch.tensor([step[members] for step in rates], dtype=torch.float64)
    decay = torch.tensor(decays[members], dtype=torch.float64)
    count = torch.arange(rule.done + 1, rule.done + len(rates) + 1, dtype=torch.float64)
    count = count.unsqueeze(1)
    scale, correction = corrections(rate, count, rule.betas)
    table = torch.stack([rate, 1 - rate * decay, scale, correction.expand_as(rate)], 1)
    return (table.squeeze(2) if alike else table).to(like.device, like.dtype, non_blocking=True)


def kept_table(
    problem: Problem, rule: Rule, rates: list[list[float]], decays: list[float], like: Tensor
) -> Tensor:
    """Return :func:`table`, which is kept until an argument changes."""
    done = 0 if rule.optimizer == "sgd" else rule.done
    given = (done, rule.betas, rates, decays, like.dtype)
    kept = problem.kept.get("table")
    if kept is None or kept[0] != given:
        kept = problem.kept["table"] = (given, table(rule, rates, decays, like))
    return kept[1]


def _length(steps: int, work: int) -> int:
    """Return the steps per compiled function: the largest allowed divisor of ``steps``.

    A divisor makes one compiled function sufficient.
    """
    most = 2 * STEPS if work <= TINY else STEPS if work <= SMALL else 1
    return max(length for length in range(1, most + 1) if steps % length == 0)
