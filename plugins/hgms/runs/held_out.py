"""Validation rows that a comparison holds out from all methods, to measure the upper loss on."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from hgms_core import Data, Key, Problem, Tree

ONE_OF = 4
"""One of so many validation rows is held out."""


def hold_out(problem: Problem) -> tuple[Problem, list[Data]]:
    """The problem without a quarter of its validation rows, and the rows that it is without.

    Rows are drawn by a fixed key, so every run of a problem holds out the same. Roles with equally
    many rows are without the same numbers: tables that are equal stay so, and no held-out row of
    one is a row of another. Groups of rows (``Data.strata``) keep their shares. A part with fewer
    than four rows keeps all.

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
    """The validation rows of all roles, each table once."""
    return [*{id(part): part for part in problem.upper_data.values() if part.size}.values()]


def loss_on(problem: Problem, parts: Sequence[Data], theta: Tree, x: Tree) -> float:
    """f on all rows of the parts, each row with the same weight."""
    counts = [part.count(None) for part in parts]  # a loss without rows counts one
    with torch.no_grad():
        losses = [float(problem.f(theta, x, part.batch(None))) for part in parts]
    return sum(count / sum(counts) * loss for count, loss in zip(counts, losses, strict=True))


def _split(data: Data) -> tuple[Data, Data]:
    """Three quarters of the rows, and the others."""
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
    """The rows with these numbers. Each keeps its number in ``data`` as its ``index``."""
    moved = numbers.to(data.device)
    rows = data.rows
    return Data(
        size=len(numbers), rows=lambda index: rows(moved[index]), device=data.device, strata=strata
    )
