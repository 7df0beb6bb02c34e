"""The validation batch a hypergradient is taken on."""

from __future__ import annotations

from hgms_core import Key, Problem, Tree


def upper_batch(problem: Problem, key: Key, batch_size: int | None) -> tuple[Tree, int]:
    """(rows of the role ``differentiate``, how many)."""
    return problem.upper_data["differentiate"].sample(key.fold("upper"), batch_size)
