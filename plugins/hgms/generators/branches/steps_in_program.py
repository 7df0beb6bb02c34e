"""The steps of all branches as a function of tensors, for the program of an outer step."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from hgms.compiled import repeat
from hgms.generators.branches.program import LENGTHS, Block, run_block
from hgms.optim.rule import Rule
from hgms_core import Group, Mode, Problem, Tree, groups


@frozen
class Form:
    """What is the same in all outer steps: the rule, K, whether weights decay, the batches.

    ``axis`` is the axis of the steps in the batches; it is absent if all steps use one batch. With
    ``own``, each branch has separate batches. A batch has ``rows`` rows.
    """

    rule: Rule
    steps: int
    decayed: bool
    axis: int | None
    own: bool
    rows: int
    mode: Mode
    chunk: int | None


def advance_joined(
    form: Form, problem: Problem, theta: Tree, x: Tree, moments: Tree, operands: dict[str, Any]
) -> tuple[Tree, Tree, Tensor]:
    """Return the stacked ends, their moments, and the losses before the last steps.

    ``x`` and ``moments`` are the stacked starts. The operands are the ``numbers`` of all steps, and
    the ``table`` of all rows with the numbers of the drawn ``rows``. Without numbers, the table
    contains the batches of all steps.
    """
    table = operands["table"]
    rows = operands["rows"]

    def trial() -> tuple[Tree, Tree]:
        return theta, _select(table, rows, form.axis, torch.zeros(1, dtype=torch.int64))

    parts = groups(
        problem.g,
        x,
        own_batch=form.own,
        rows=form.rows,
        mode=form.mode,
        chunk=form.chunk,
        trial=trial,
    )
    ends = [_run(form, group, theta, moments, operands) for group in parts]
    xs, memories, losses = zip(*ends, strict=True)
    return _join(xs), _join(memories), torch.cat([loss.reshape(-1) for loss in losses])


def _run(
    form: Form, group: Group, theta: Tree, stack: Tree, operands: dict[str, Any]
) -> tuple[Tree, Tree, Tensor]:
    stacked = isinstance(group.part, slice)
    axis = form.axis
    table = operands["table"]
    rows = operands["rows"]
    numbers = operands["numbers"]
    if form.own:
        if rows is None:
            table = {name: group.rows_of(leaf) for name, leaf in table.items()}
        else:
            rows = group.rows_of(rows)
        axis = axis if stacked or axis is None else axis - 1
    if numbers.dim() == 3:
        numbers = numbers[..., group.part]
    moments = {name: group.rows_of(leaf) for name, leaf in stack.items()}
    length = max(length for length in LENGTHS if form.steps % length == 0)
    block = Block(evolve(form.rule, done=0), stacked, form.decayed, axis)
    places = torch.arange(length)

    def turn(values: dict[str, Any]) -> dict[str, Any]:
        chosen = values["done"] + places
        (x, moments), loss = run_block(
            group.loss,
            block,
            theta,
            (values["x"], values["moments"]),
            _slice(table, rows, axis, chosen),
            numbers.index_select(0, chosen),
        )
        return {"x": x, "moments": moments, "loss": loss, "done": values["done"] + length}

    first = group.loss(theta, group.x, _select(table, rows, axis, places[:1]))
    start = {
        "x": group.x,
        "moments": moments,
        "loss": torch.zeros(first.shape, dtype=first.dtype),
        "done": torch.zeros((), dtype=torch.int64),
    }
    values, _ = repeat(turn, start, form.steps // length)
    ends = (values["x"], values["moments"])
    x, moments = ends if stacked else (_as_stack(tree) for tree in ends)
    return x, moments, values["loss"]


def _slice(table: Tree, rows: Tensor | None, axis: int | None, chosen: Tensor) -> Tree:
    """Return the batches of the chosen steps."""
    if axis is None:
        return table
    if rows is None:
        return {name: leaf.index_select(axis, chosen) for name, leaf in table.items()}
    drawn = rows.index_select(axis, chosen)
    return {name: leaf[drawn] for name, leaf in table.items()}


def _select(table: Tree, rows: Tensor | None, axis: int | None, step: Tensor) -> Tree:
    """Return the batch of one step."""
    batches = _slice(table, rows, axis, step)
    return batches if axis is None else {name: leaf.squeeze(axis) for name, leaf in batches.items()}


def _as_stack(tree: Tree) -> Tree:
    return {name: leaf.unsqueeze(0) for name, leaf in tree.items()}


def _join(trees: tuple[Tree, ...]) -> Tree:
    if len(trees) == 1:
        return trees[0]
    return {name: torch.cat([tree[name] for tree in trees]) for name in trees[0]}
