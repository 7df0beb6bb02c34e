"""The pipeline inside a wrapper."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from attrs import Attribute

from hgms.facts import innermost
from hgms_core import ConfigError, Pipeline, Problem


def another(problem: Problem, key: Hashable, make: Callable[[], Problem]) -> Problem:
    """Return a wrapper's problem for this problem, the same object at every step.

    Compiled functions and recorded values are cached by its losses. This problem refers to the new
    problem. The new problem must not refer back: the memory of a reference cycle is released late.
    """
    if key not in problem.kept:
        problem.kept[key] = make()
    other: Problem = problem.kept[key]
    return other


def around_a_pipeline(_wrapper: object, attribute: Attribute[Any], value: Any) -> None:
    """Require that a wrapper's method is a pipeline, since the wrapper relies on a pipeline's
    state.
    """
    if not isinstance(innermost(value), Pipeline):
        raise ConfigError(
            "wrong-value",
            f"{attribute.name}={value.name!r} must be a pipeline, or a wrapper around a pipeline",
            place=(attribute.name,),
        )
