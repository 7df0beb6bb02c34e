"""Record the inputs and outputs of a pipeline's parts in one outer step.

The step is repeated with parts that record their calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
from attrs import define

from hgms.facts import inner_method
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

    def estimate_at(self, branch: Branch) -> Estimate:
        """Compute the pipeline's hypergradient of another branch at the same θ.

        The key and the memory are the same.
        """
        return self.pipeline.hypergradient.estimate(
            self.problem, self.theta, *branch.as_candidates(), self.estimating, self.memory
        )[0]


class _Part:
    """A part that passes each result of one method to ``note``; otherwise the original part."""

    def __init__(self, part: Any, method: str, note: Callable[..., None]) -> None:
        self._part = part
        self._note = note
        setattr(self, method, functools.partial(self._call, getattr(part, method)))

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        result = function(*arguments)
        self._note(result, *arguments)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


def pipeline_of(method: Any) -> Pipeline | None:
    """Return the pipeline inside a method's wrappers; ``None`` if there is no pipeline."""
    while attrs.has(type(method)) and not isinstance(method, Pipeline):
        method = inner_method(method)
    return method if isinstance(method, Pipeline) else None


def evolve_pipeline(method: Any, change: Callable[[Pipeline], Pipeline]) -> Any:
    """Return the method with the changed pipeline in the same wrappers."""
    if isinstance(method, Pipeline):
        return change(method)
    return attrs.evolve(method, method=evolve_pipeline(method.method, change))


def capture(method: Method, problem: Problem, state: State, progress: float) -> Seen:
    """Repeat the step that the method takes from ``state``, and record it.

    The repetition changes no state; only the returned record remains.

    Notes
    -----
    Cost: the cost of the step.
    """
    pipeline = pipeline_of(method)
    if pipeline is None:
        raise ConfigError(
            "not-supported", f"method {method.name!r} contains no pipeline", place=("method",)
        )
    notes: dict[str, Any] = {}

    def note_candidates(candidates: Candidates, *arguments: Any) -> None:
        names = ("problem", "theta", "start", "proposing", "progress")
        notes.update(zip(names, arguments, strict=True), candidates=candidates)

    def note_estimate(result: tuple[Estimate, State], *arguments: Any) -> None:
        *_, key, memory = arguments
        notes.update(estimate=result[0], estimating=key, memory=memory)

    def note_theta(result: tuple[Tree, State], *_: Any) -> None:
        notes["theta_after"] = notes["problem"].project(result[0])

    def change(pipeline: Pipeline) -> Pipeline:
        parts: dict[str, Any] = {
            "generator": _Part(pipeline.generator, "propose", note_candidates),
            "selector": _Part(
                pipeline.selector, "select", lambda chosen, *_: notes.update(selection=chosen)
            ),
            "hypergradient": _Part(pipeline.hypergradient, "estimate", note_estimate),
            "outer": _Part(pipeline.outer, "step", note_theta),
        }
        return evolve(pipeline, **parts)

    evolve_pipeline(method, change).step(problem, state, progress)
    return Seen(pipeline, **notes)
