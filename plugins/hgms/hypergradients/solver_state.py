"""Preparation of a solver for one solve: its random key, the loss, and its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from attrs import define
from torch import Tensor

from hgms_core import Batch, Key, LinearSolver, Loss, MatVec, Solution, State, Tree
from hgms_core.capabilities import Randomized, Recycles, UsesLoss, find


@define
class Remembering:
    """Wrap a solver that ``Recycles`` as a LinearSolver, and store its new memory.

    A solver's memory is a state: ``{}`` before the first system, and never changed in place.
    """

    name: ClassVar[str] = "remembering"
    solver: Recycles
    memory: State

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        solution, self.memory = self.solver.solve_from(matvec, b, x0, self.memory)
        return solution


def prepare(
    solver: LinearSolver,
    g: Loss,
    theta: Tree,
    x: Tree,
    batch: Callable[[], Batch],
    state: State,
    key: Key,
) -> LinearSolver:
    """Prepare the solver for one solve.

    Pass the key to a ``Randomized`` solver, then g on the lower ``batch()`` to one that
    ``UsesLoss``. Wrap a solver that ``Recycles`` with the memory in ``state``. Return other solvers
    unchanged.
    """
    if randomized := find(solver, Randomized):
        solver = randomized.with_key(key)
    if uses_loss := find(solver, UsesLoss):
        solver = uses_loss.for_loss(g, theta, x, batch())
    recycles = find(solver, Recycles)
    return solver if recycles is None else Remembering(recycles, state.get("memory", {}))


def memory_of(solver: LinearSolver) -> State:
    """Return the entries to add to the state after the solve."""
    return {"memory": solver.memory} if isinstance(solver, Remembering) else {}
