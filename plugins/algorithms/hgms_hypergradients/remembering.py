"""A solver that remembers, for one solve."""

from __future__ import annotations

from typing import Any, ClassVar

from attrs import define
from torch import Tensor

from hgms_core import LinearSolver, MatVec, Solution, State


@define
class Remembering:
    """A solver with ``solve_from(matvec, b, x0, memory) -> (solution, memory)`` as a LinearSolver; it keeps the new one.

    A solver's memory is a state: ``{}`` before the first system, and never changed in place.
    """

    name: ClassVar[str] = "remembering"
    solver: Any
    memory: State

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        solution: Solution
        solution, self.memory = self.solver.solve_from(matvec, b, x0, self.memory)
        return solution


def remembering(solver: LinearSolver, state: State) -> LinearSolver:
    """The solver itself, or with what it remembers in ``state`` where it does."""
    return Remembering(solver, state.get("memory", {})) if hasattr(solver, "solve_from") else solver


def remembered(solver: LinearSolver) -> State:
    """What to add to the state after the solve."""
    return {"memory": solver.memory} if isinstance(solver, Remembering) else {}
