"""Folds of lower and validation rows: what each branch does not see, and is judged by."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

from hgms.rows import trained_on
from hgms_core import Key, Problem


@frozen(kw_only=True)
class Folds:
    """N disjoint parts of the lower rows, and N of the validation rows that x may be trained on
    (the roles ``differentiate`` and ``select``). Branch j is trained on everything but part j.

    ``lower`` is each lower row's part, ``[n]``. ``kept`` and ``held`` are the validation rows that
    each branch is trained on, and that it is judged by, ``[N, m − m//N]`` and ``[N, m//N]``: what
    does not divide belongs to no part, so that all branches see equally many rows."""

    lower: Tensor
    kept: Tensor
    held: Tensor

    @classmethod
    def drawn(cls, problem: Problem, count: int, key: Key) -> Folds:
        """The folds of a run, by its key alone."""
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
