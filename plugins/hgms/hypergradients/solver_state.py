"""Preparation of a solver for one solve: its random key, the loss, and its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from attrs import define
from torch import Tensor

from hgms_core import Batch, Key, LinearSolver, Loss, MatVec, Solution, State, Tree


@define
class Remembering:
    """Wrap a solver with ``solve_from`` as a LinearSolver, and store its new memory.

    The signature is ``solve_from(matvec, b, x0, memory) -> (solution, memory)``. A solver's memory
    is a state: ``{}`` before the first system, and never changed in place.
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
    """Prepare the solver for one solve.

    Call ``with_key(key)``, then ``at(loss, theta, x, batch)`` on the lower ``batch()``, if the
    solver defines them. Wrap a solver that has ``solve_from`` with the memory in ``state``. Return
    other solvers unchanged.
    """
    if hasattr(solver, "with_key"):
        solver = solver.with_key(key)
    if hasattr(solver, "at"):
        solver = solver.at(g, theta, x, batch())
    return Remembering(solver, state.get("memory", {})) if hasattr(solver, "solve_from") else solver


def remembered(solver: LinearSolver) -> State:
    """Return the entries to add to the state after the solve."""
    return {"memory": solver.memory} if isinstance(solver, Remembering) else {}
