"""The pipeline inside a wrapper."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from attrs import Attribute

from hgms_core import ConfigError, Pipeline, Problem


def innermost(method: Any) -> Any:
    """The method that is no wrapper, through the fields ``method`` of those that are."""
    while hasattr(method, "method"):
        method = method.method
    return method


def another(problem: Problem, key: Hashable, make: Callable[[], Problem]) -> Problem:
    """The problem that a wrapper makes of this one, the same at every step: what is compiled or
    recorded is kept by its losses.

    This problem keeps the other one, which must hold no reference back: the memory of such a circle
    stays taken for long.
    """
    if key not in problem.kept:
        problem.kept[key] = make()
    other: Problem = problem.kept[key]
    return other


def around_a_pipeline(_wrapper: object, attribute: Attribute[Any], value: Any) -> None:
    """The validator of a wrapper's method: it relies on a pipeline's state."""
    if not isinstance(innermost(value), Pipeline):
        raise ConfigError(
            "wrong-value",
            f"{attribute.name}={value.name!r} must be a pipeline, or a wrapper around a pipeline",
            place=(attribute.name,),
        )
