"""The pipeline inside a wrapper."""

from __future__ import annotations

from typing import Any

from attrs import Attribute

from hgms_core import Pipeline


def innermost(method: Any) -> Any:
    """The method that is no wrapper, through the fields ``method`` of those that are."""
    while hasattr(method, "method"):
        method = method.method
    return method


def around_a_pipeline(_wrapper: object, attribute: Attribute[Any], value: Any) -> None:
    """The validator of a wrapper's method: it relies on a pipeline's state."""
    if not isinstance(innermost(value), Pipeline):
        raise ValueError(f"{attribute.name!r} must be a pipeline, or a wrapper around one: {value.name!r}")
