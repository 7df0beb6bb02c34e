"""Folds of lower and validation rows: the held-out rows of each branch."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

from hgms.rows import trained_on
from hgms_core import Key, Problem


@frozen(kw_only=True)
class Folds:
    """N disjoint parts of the lower rows, and N of the validation rows that x may be trained on
    (the roles ``differentiate`` and ``select``). Branch j is trained on all parts except part j.

    ``lower`` is the part of each lower row, ``[n]``. ``kept`` are the validation rows that each
    branch is trained on, ``[N, m − m//N]``. ``held`` are the validation rows that evaluate each
    branch, ``[N, m//N]``. A remainder of the division belongs to no part, so that all branches see
    equally many rows.
    """

    lower: Tensor
    kept: Tensor
    held: Tensor

    @classmethod
    def draw(cls, problem: Problem, count: int, key: Key) -> Folds:
        """Draw the folds of a run; they depend only on its key."""
        lower = problem.lower_data
        upper = trained_on(problem)
        order = key.fold("lower").indices(lower.size, lower.size, 1)[0]
        part = order.argsort() % count
        rows = key.fold("upper").indices(upper.size, upper.size, 1)[0]
        size = upper.size // count
        held = rows[: size * count].reshape(count, size)
        kept = held.new_empty((count, upper.size - size))
        for branch in range(count):
            kept[branch] = rows[(rows.unsqueeze(1) != held[branch]).all(1)]
        return cls(
            lower=part.to(lower.device), kept=kept.to(upper.device), held=held.to(upper.device)
        )
