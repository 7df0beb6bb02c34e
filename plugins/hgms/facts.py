"""Facts that a component may state about itself, with their defaults.

Each fact is a class variable, or a property of instances.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from hgms_core import ConfigError, Pipeline
from hgms_core.capabilities import (
    DrawsChoice,
    Finishes,
    HasClosedForm,
    HasData,
    HasPlaceholder,
    HasTestingInstance,
    JoinsStep,
    LearnsStart,
    ProposesSome,
    Randomized,
    RanksRows,
    Recycles,
    Sharded,
    SolvesInProgram,
    UsesLoss,
)


def name_of(component: object) -> str:
    """Return the ``name`` of a component; for other objects, the name of their class."""
    return str(getattr(component, "name", type(component).__name__))


def module_file(name: str) -> str | None:
    """Return the file of an imported module; ``None`` without a file or an import."""
    return getattr(sys.modules.get(name), "__file__", None)


CAPABILITIES: Mapping[str, tuple[type, ...]] = {
    "generator": (ProposesSome, LearnsStart, JoinsStep, HasTestingInstance),
    "selector": (DrawsChoice, JoinsStep, HasTestingInstance),
    "solver": (Randomized, UsesLoss, Recycles, SolvesInProgram, HasTestingInstance),
    "hypergradient": (JoinsStep, HasTestingInstance),
    "outer": (JoinsStep, HasTestingInstance),
    "task": (HasData, HasClosedForm, Sharded, HasTestingInstance),
    "method": (Finishes, RanksRows, HasPlaceholder, HasTestingInstance),
}
"""The capabilities that callers look for, by kind of component."""


def members_of(capability: type) -> tuple[str, ...]:
    """Return the names of the members of a capability; a marker has no members.

    Examples
    --------
    >>> members_of(ProposesSome), members_of(LearnsStart)
    (('count', 'propose_some'), ())
    """
    own = vars(capability)
    return tuple(name for name in {**own.get("__annotations__", {}), **own} if name[0] != "_")


def declared_name(cls: object) -> object:
    """Return the ``name`` of a class of components; ``None`` for other classes."""
    return getattr(cls, "name", None)


def settings_of(component: object) -> dict[str, Any]:
    """Return the fields of a component with their values; empty for other objects."""
    cls = type(component)
    fields = attrs.fields(cls) if attrs.has(cls) else ()
    return {field.name: getattr(component, field.name) for field in fields}


def walk_parts(component: object, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a component and its parts with their places in a configuration, outer parts first.

    The parts are the fields of a component, and the elements of lists and tuples.
    """
    yield place, component
    if isinstance(component, list | tuple):
        for number, item in enumerate(component):
            yield from walk_parts(item, f"{place}.{number}")
    cls = type(component)
    for field in attrs.fields(cls) if attrs.has(cls) else ():
        inner = place if field.metadata.get("flat") else f"{place}.{field.name}"
        yield from walk_parts(getattr(component, field.name), inner)


def inner_method(method: object) -> Any:
    """Return the method inside a wrapper (its ``method``); ``None`` for other methods."""
    return getattr(method, "method", None)


def innermost(component: Any, field: str = "method") -> Any:
    """Return the innermost method, or generator, through the fields of this name of wrappers."""
    while (inner := getattr(component, field, None)) is not None:
        component = inner
    return component


def around_a_pipeline(_wrapper: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate a field whose method must be a pipeline, or a wrapper around one, because the class
    uses the state of a pipeline (``step``, ``theta``, ``cost``).
    """
    if not isinstance(innermost(value), Pipeline):
        raise ConfigError(
            "wrong-value",
            f"{attribute.name}={value.name!r} must be a pipeline, or a wrapper around a pipeline",
            place=(attribute.name,),
        )


def needs_of(component: object) -> frozenset[str]:
    """Return the traits that a task must have for this component (``needs``), without its parts."""
    needs: Iterable[str] | property = getattr(component, "needs", frozenset())
    return frozenset() if isinstance(needs, property) else frozenset(needs)


def traits_of(task: object) -> frozenset[str] | None:
    """Return the features of a task's problems (``traits``); ``None`` if they are not declared."""
    traits = getattr(task, "traits", None)
    return None if traits is None else frozenset(traits)


def role_of(method: object) -> str:
    """Return the role of a method in comparisons: "floor", "ceiling" or ""."""
    return str(getattr(method, "role", ""))


def version_of(task: object) -> str:
    """Return the version of the results of a task; empty for a problem without a task."""
    return str(getattr(task, "version", ""))


def metrics_of(task: object) -> Mapping[str, bool]:
    """Return the metrics of a task, with True if higher is better."""
    return getattr(task, "metrics", {})


def metric_rows_of(task: object) -> Mapping[str, str]:
    """Return the rows of metrics that methods also use: "train" or "validation", by metric."""
    return getattr(task, "metric_rows", {})
