"""Weights of lower rows, and the validation rows that may be used to train x as one table."""

from __future__ import annotations

import torch
from torch import Tensor

from hgms_core import Batch, ConfigError, Data, Problem, Rows


def weighted_rows(problem: Problem, method: str) -> Rows:
    """Return the losses of lower rows and their weights, which a method requires."""
    rows = problem.find(Rows)
    if rows is None:
        raise ConfigError(
            "not-supported",
            f"method {method!r} requires one weight per lower row (extension Rows), but the "
            "problem has none",
            place=("method",),
        )
    return rows


def trained_on(problem: Problem) -> Data:
    """Return the validation rows of the roles ``differentiate`` and ``select`` as one table.

    The rows of ``stop`` are excluded.

    Examples
    --------
    >>> first, second = Data.of({"a": torch.arange(4.0)}), Data.of({"a": torch.ones(2)})
    >>> problem = Problem(
    ...     theta0={},
    ...     x0={"x": torch.zeros(1)},
    ...     g=lambda t, x, b: x["x"].sum(),
    ...     f=lambda t, x, b: x["x"].sum(),
    ...     upper_data={"differentiate": first, "select": second},
    ... )
    >>> trained_on(problem).rows(torch.tensor([3, 4]))["a"]
    tensor([3., 1.])
    """
    first = problem.upper_data["differentiate"]
    second = problem.upper_data["select"]
    return first if first is second else join_rows(first, second)


def join_rows(first: Data, second: Data) -> Data:
    """Return the rows of two data sets with the same columns, as one data set."""
    if not first.size or not second.size:
        return first if first.size else second

    def rows(index: Tensor) -> Batch:
        above = first.rows(index.clamp(max=first.size - 1))
        below = second.rows((index - first.size).clamp(min=0))
        return {
            name: _choose_rows(index < first.size, leaf, below[name])
            for name, leaf in above.items()
        }

    return Data(first.size + second.size, {}, rows, first.device)


def _choose_rows(own: Tensor, above: Tensor, below: Tensor) -> Tensor:
    """Select rows of ``above`` at the positions ``own``, and rows of ``below`` elsewhere.

    The shorter of two texts is padded with zeros at its end.
    """
    sizes = [max(pair) for pair in zip(above.shape, below.shape, strict=True)]
    above, below = (_pad(leaf, sizes) for leaf in (above, below))
    return torch.where(
        own.reshape(own.shape + (1,) * (above.ndim - own.ndim)).to(above.device), above, below
    )


def _pad(leaf: Tensor, sizes: list[int]) -> Tensor:
    missing = [size - own for own, size in zip(leaf.shape, sizes, strict=True)]
    return (
        torch.nn.functional.pad(leaf, [n for more in reversed(missing) for n in (0, more)])
        if any(missing)
        else leaf
    )


__all__ = ["join_rows", "trained_on"]
