"""Validation rows that no method sees; a comparison measures the upper loss on them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from hgms_core import Data, Key, Problem, Tree

ONE_OF = 4
"""One of this number of validation rows is held out."""


def hold_out(problem: Problem) -> tuple[Problem, list[Data]]:
    """Return the problem without a quarter of its validation rows, and these rows.

    A fixed key selects the rows, so they are the same in all runs of a problem. Roles with equally
    many rows lose the same row numbers. Equal tables therefore stay equal, and a row that is
    removed from one table does not stay in another. Groups of rows (``Data.strata``) keep their
    shares. A part with fewer than four rows keeps all rows.

    Examples
    --------
    >>> rows = Data.of({"a": torch.arange(8.0)})
    >>> problem = Problem(
    ...     theta0={},
    ...     x0={"x": torch.zeros(1)},
    ...     g=lambda t, x, b: x["x"].sum(),
    ...     f=lambda t, x, b: (x["x"] - b["a"]).square().mean(),
    ...     upper_data=rows,
    ... )
    >>> fewer, held = hold_out(problem)
    >>> {role: part.size for role, part in fewer.upper_data.items()}, held[0].size
    ({'differentiate': 6, 'select': 6, 'stop': 6}, 2)
    """
    parts = distinct(problem)
    split = {id(part): _split(part) for part in parts}
    kept = {
        role: split[id(part)][0] if part.size else part  # a loss without rows
        for role, part in problem.upper_data.items()
    }
    held = [split[id(part)][1] for part in parts]
    return attrs.evolve(problem, upper_data=kept), [part for part in held if part.size]


def distinct(problem: Problem) -> list[Data]:
    """Return the validation rows of all roles, each table once."""
    return [*{id(part): part for part in problem.upper_data.values() if part.size}.values()]


def loss_on(problem: Problem, parts: Sequence[Data], theta: Tree, x: Tree) -> float:
    """Return f on all rows of the parts, each row with the same weight."""
    counts = [part.count(None) for part in parts]  # a loss without rows has the count 1
    with torch.no_grad():
        losses = [float(problem.f(theta, x, part.batch(None))) for part in parts]
    return sum(count / sum(counts) * loss for count, loss in zip(counts, losses, strict=True))


def _split(data: Data) -> tuple[Data, Data]:
    """Return three quarters of the rows, and the remaining rows."""
    first = 0
    kept: list[Tensor] = []
    held: list[Tensor] = []
    strata: list[tuple[str, int]] = []
    for name, size in data.strata or (("", data.size),):
        key = Key(0).fold("held-out").fold(size)
        order = first + torch.randperm(size, generator=key.generator())
        count = size // ONE_OF
        held.append(order[:count].sort().values)
        kept.append(order[count:].sort().values)
        strata.append((name, size - count))
        first += size
    groups = tuple(strata) if data.strata else None
    return _rows_of(data, torch.cat(kept), groups), _rows_of(data, torch.cat(held), None)


def _rows_of(data: Data, numbers: Tensor, strata: tuple[tuple[str, int], ...] | None) -> Data:
    """Return the rows with these numbers. Each keeps its number in ``data`` as its ``index``."""
    moved = numbers.to(data.device)
    rows = data.rows
    return Data(
        size=len(numbers), rows=lambda index: rows(moved[index]), device=data.device, strata=strata
    )
