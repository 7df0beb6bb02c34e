"""A solver as it is for one solve: with a key where it draws, told of the loss where it wants to
know, with its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from attrs import define
from torch import Tensor

from hgms_core import Batch, Key, LinearSolver, Loss, MatVec, Solution, State, Tree


@define
class Remembering:
    """A solver with ``solve_from(matvec, b, x0, memory) -> (solution, memory)`` as a LinearSolver;
    it keeps the new one.

    A solver's memory is a state: ``{}`` before the first system, and never changed in place.
    """

    name: ClassVar[str] = "remembering"
    solver: Any
    memory: State

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        solution: Solution
        solution, self.memory = self.solver.solve_from(matvec, b, x0, self.memory)
        return solution


def prepared(
    solver: LinearSolver,
    g: Loss,
    theta: Tree,
    x: Tree,
    batch: Callable[[], Batch],
    state: State,
    key: Key,
) -> LinearSolver:
    """The solver itself; of one that has it ``with_key(key)``, then ``at(loss, theta, x, batch)``,
    on the lower ``batch()``; of one with ``solve_from`` with what it remembers in ``state``."""
    if hasattr(solver, "with_key"):
        solver = solver.with_key(key)
    if hasattr(solver, "at"):
        solver = solver.at(g, theta, x, batch())
    return Remembering(solver, state.get("memory", {})) if hasattr(solver, "solve_from") else solver


def remembered(solver: LinearSolver) -> State:
    """What to add to the state after the solve."""
    return {"memory": solver.memory} if isinstance(solver, Remembering) else {}
