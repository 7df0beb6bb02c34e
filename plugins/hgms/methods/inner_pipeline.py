"""Wrappers of methods."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from hgms.facts import needs_of
from hgms_core import Method, Problem, Record, State, Tree


class Wrapper:
    """Steps of ``method`` on a changed problem."""

    method: Method

    @property
    def needs(self) -> frozenset[str]:
        return needs_of(self.method)

    def changed_problem(self, problem: Problem) -> Problem:
        """Return the problem of the method; by default it is unchanged."""
        return problem

    def init(self, problem: Problem, seed: int) -> State:
        return self.method.init(self.changed_problem(problem), seed)

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        return self.method.step(self.changed_problem(problem), state, progress)

    def result(self, state: State) -> tuple[Tree, Tree]:
        return self.method.result(state)


def another(problem: Problem, key: Hashable, make: Callable[[], Problem]) -> Problem:
    """Return a wrapper's problem for this problem, the same object at every step.

    Compiled functions and recorded values are cached by its losses. This problem refers to the new
    problem. The new problem must not refer back: the memory of a reference cycle is released late.
    """
    if key not in problem.kept:
        problem.kept[key] = make()
    return problem.kept[key]
