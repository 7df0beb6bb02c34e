"""Record the inputs and outputs of a pipeline's parts in one outer step.

The step is repeated with parts that record their calls.
"""

from __future__ import annotations

import contextlib
from typing import Any

import attrs
from attrs import define

from hgms.plugins import inside
from hgms_core import (
    Branch,
    Candidates,
    ConfigError,
    Cost,
    Estimate,
    Key,
    Method,
    Pipeline,
    Problem,
    Selection,
    State,
    Tree,
)
from hgms_core.components import evolve


@define(eq=False)
class Seen:
    """One outer step of a pipeline, as its parts received it.

    ``problem`` is the problem that the parts received. For example, inside ``tilted`` its lower
    loss is g + εf. ``theta_after`` is θ after the outer update and the projection.
    """

    pipeline: Pipeline
    problem: Problem
    theta: Tree
    start: State
    proposing: Key
    progress: float
    candidates: Candidates
    selection: Selection
    estimating: Key
    memory: State
    estimate: Estimate
    theta_after: Tree

    @property
    def branch(self) -> Branch:
        return self.candidates.branch(self.selection.index)

    @property
    def cost(self) -> Cost:
        return self.candidates.cost + self.selection.cost + self.estimate.cost

    def estimate_at(self, branch: Branch, problem: Problem | None = None) -> Estimate:
        """Compute the pipeline's hypergradient of another branch at the same θ.

        The key and the memory are the same.
        """
        problem = problem or self.problem
        return self.pipeline.hypergradient.estimate(
            problem, self.theta, *branch.as_candidates(), self.estimating, self.memory
        )[0]


class _Part:
    """A part that records its arguments and results, and otherwise equals the original part."""

    def __init__(self, part: Any, notes: dict[str, Any]) -> None:
        self._part = part
        self._notes = notes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class _Generator(_Part):
    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float
    ) -> Candidates:
        self._notes.update(
            problem=problem, theta=theta, start=start, proposing=key, progress=progress
        )
        self._notes["candidates"] = candidates = self._part.propose(
            problem, theta, start, key, progress
        )
        return candidates


class _Selector(_Part):
    def select(self, problem: Problem, theta: Tree, candidates: Candidates, key: Key) -> Selection:
        self._notes["selection"] = selection = self._part.select(problem, theta, candidates, key)
        return selection


class _HyperGradient(_Part):
    def estimate(
        self,
        problem: Problem,
        theta: Tree,
        candidates: Candidates,
        selection: Selection,
        key: Key,
        state: State,
    ) -> tuple[Estimate, State]:
        self._notes.update(estimating=key, memory=state)
        estimate, memory = self._part.estimate(problem, theta, candidates, selection, key, state)
        self._notes["estimate"] = estimate
        return estimate, memory


class _Outer(_Part):
    def step(
        self, theta: Tree, gradient: Tree, state: State, progress: float
    ) -> tuple[Tree, State]:
        theta, state = self._part.step(theta, gradient, state, progress)
        self._notes["theta_after"] = self._notes["problem"].project(theta)
        return theta, state


def pipeline_of(method: Any) -> Pipeline | None:
    """Return the pipeline inside a method's wrappers; ``None`` if there is no pipeline."""
    while not isinstance(method, Pipeline):
        field = _field(method)
        if field is None:
            return None
        method = getattr(method, field)
    return method


def _field(method: Any) -> str | None:
    """Return the field of a wrapper that contains the inner method."""
    if not attrs.has(type(method)):
        return None
    return inside(type(method)) or (
        "method" if "method" in attrs.fields_dict(type(method)) else None
    )


def noting(method: Any, notes: dict[str, Any]) -> Any:
    """Return the method with parts that record into ``notes``, in the same wrappers."""
    if isinstance(method, Pipeline):
        parts: dict[str, Any] = {
            "generator": _Generator(method.generator, notes),
            "selector": _Selector(method.selector, notes),
            "hypergradient": _HyperGradient(method.hypergradient, notes),
            "outer": _Outer(method.outer, notes),
        }
        return evolve(method, **parts)
    field = _field(method)
    assert field is not None, "only called where there is a pipeline inside"
    return attrs.evolve(method, **{field: noting(getattr(method, field), notes)})


def capture(method: Method, problem: Problem, state: State, progress: float) -> Seen:
    """Repeat the step that the method takes from ``state``, and record it.

    The repetition changes no state; only the returned record remains.

    Cost: the cost of the step.
    """
    pipeline = pipeline_of(method)
    if pipeline is None:
        raise ConfigError(
            "not-supported", f"method {method.name!r} contains no pipeline", place=("method",)
        )
    notes: dict[str, Any] = {}
    noting(method, notes).step(problem, state, progress)
    return Seen(pipeline, **notes)


class _Handed(BaseException):
    """Interrupt a step when its generator receives the problem."""


class _Stop(_Part):
    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float
    ) -> Candidates:
        self._notes["problem"] = problem
        raise _Handed


def inner_problem(method: Any, problem: Problem, state: State, progress: float) -> Problem:
    """Return the problem that the parts receive after the wrappers have transformed ``problem``.

    Nothing is evaluated.
    """
    notes: dict[str, Any] = {}

    def stopping(method: Any) -> Any:
        if isinstance(method, Pipeline):
            generator: Any = _Stop(method.generator, notes)
            return evolve(method, generator=generator)
        field = str(_field(method))
        return attrs.evolve(method, **{field: stopping(getattr(method, field))})

    with contextlib.suppress(_Handed):
        stopping(method).step(problem, state, progress)
    inner: Problem = notes["problem"]
    return inner
