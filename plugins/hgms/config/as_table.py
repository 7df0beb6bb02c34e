"""Conversion of objects to tables.

A table describes a component or a configuration in TOML.
"""

from __future__ import annotations

import contextlib
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from hgms.arguments import errors_at
from hgms.config.budget import Budget
from hgms.config.fingerprinting import fingerprint
from hgms.config.invalid import init_fields, origin_is, type_hints
from hgms.facts import declared_name
from hgms.plugins import inside
from hgms_core import CandidateGenerator, ConfigError, Pipeline
from hgms_core.arguments import brief

AT_REST: Mapping[str, Any] = {
    "reference": "none",
    "mixture": "none",
    "keep": "last",
    "learn_start": False,
    "answer": "selected",
    "tilt": 0.0,
    "max_curvature": "none",
}
"""Defaults of wrapper keys in the table of every pipeline, in this order.

The table also contains the keys of wrappers that the pipeline does not use. The hash of a
configuration therefore does not depend on the installed plugins.
"""
NO_RESTARTS: Mapping[str, Any] = {"restart_every": "none"}
"""The same for every generator. A table without this key, read as part of a composition that has
restarts, would get them back.
"""


def is_at_rest(key: str, value: object) -> bool:
    """Return whether the key of a wrapper has its default in ``AT_REST`` or ``NO_RESTARTS``.

    With the default, the pipeline or the generator has no such wrapper.
    """
    defaults = {**AT_REST, **NO_RESTARTS}
    rest = defaults.get(key)
    value = "none" if value is None else value
    return key in defaults and value == rest and isinstance(value, bool) is isinstance(rest, bool)


def describe_component(component: Any, name: str) -> dict[str, Any]:
    """Return the table of a component, even if no configuration can build it.

    The table contains a fingerprint for each value that TOML cannot express. A component that is
    not an attrs class is also described by its fingerprint.

    Examples
    --------
    >>> describe_component(Pipeline, "mine").keys()
    dict_keys(['name', 'identity'])
    """
    table: Any = None
    if attrs.has(type(component)):
        with contextlib.suppress(ConfigError):  # types that cannot be evaluated
            table = plain(component, otherwise=_type_and_fingerprint)
    return (
        {**table, "name": name}
        if isinstance(table, dict)
        else {"name": name, "identity": fingerprint(component)}
    )


def _type_and_fingerprint(value: Any) -> str:
    is_named = isinstance(value, type) or inspect.isroutine(value)
    return f"{value.__name__ if is_named else type(value).__name__}: {fingerprint(value)}"


def _reject_value(value: Any) -> Any:
    raise ConfigError(
        "not-supported",
        f"{brief(value)} cannot be written to a configuration",
        hint="use it from Python only, or use a name, a number, a table or a component",
    )


def plain(value: Any, hint: Any = None, otherwise: Callable[[Any], Any] = _reject_value) -> Any:
    """Convert a component or a configuration to TOML values.

    TOML values are tables, lists, strings, numbers, booleans and ``"none"``. ``otherwise`` converts
    any other value. By default it raises ConfigError.
    """
    if value is None:
        return "none"
    if isinstance(value, int) and not isinstance(value, bool):
        members = typing.get_args(hint) or (hint,)
        return float(value) if float in members and int not in members else value
    if isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (list, tuple)):
        inner = _arguments(hint, tuple, list, Sequence)
        fixed = len(inner) == len(value) and Ellipsis not in inner
        return [
            plain(item, inner[index] if fixed else inner[0] if inner else None, otherwise)
            for index, item in enumerate(value)
        ]
    if isinstance(value, Mapping):
        inner = _arguments(hint, Mapping)
        return {
            str(key): plain(item, inner[1] if inner else None, otherwise)
            for key, item in value.items()
        }
    if attrs.has(type(value)):
        return _plain_fields(value, otherwise)
    return otherwise(value)


def _plain_fields(value: Any, otherwise: Callable[[Any], Any]) -> dict[str, Any]:
    cls: Any = type(value)
    hints = type_hints(cls)
    name = declared_name(cls)
    named: dict[str, Any] = {"name": name} if isinstance(name, str) else {}
    items = {}
    for key, field in init_fields(cls).items():
        with errors_at(key):
            items[key] = plain(getattr(value, field.name), hints[field.name], otherwise)
    if isinstance(value, Budget):
        return {key: item for key, item in items.items() if item != "none"}
    if isinstance(value, Pipeline):
        return {
            **named,
            **{key: item for key, item in items.items() if key not in AT_REST},
            **AT_REST,
            **items,
        }
    if isinstance(value, CandidateGenerator) and inside(cls) is None:
        items = {**items, **{key: NO_RESTARTS[key] for key in NO_RESTARTS if key not in items}}
    return _beside(named, items, inside(cls))


def _beside(named: dict[str, Any], items: dict[str, Any], within: str | None) -> dict[str, Any]:
    """Return the table of a wrapper, merged with the table of the object inside.

    The object is not merged if it is a method other than a pipeline. If its table already sets one
    of the wrapper's keys, the wrapper's fields are placed above that table.
    """
    is_other_method = within == "method" and not AT_REST.keys() <= items["method"].keys()
    if within is None or is_other_method:
        return named | items
    own = {key: item for key, item in items.items() if key != within}
    if any(key in items[within] and not is_at_rest(key, items[within][key]) for key in own):
        return named | items
    return items[within] | own


def _arguments(hint: Any, *classes: Any) -> tuple[Any, ...]:
    """Return the type arguments of a collection type, also of a union member."""
    for member in (hint, *typing.get_args(hint)):
        if origin_is(member, *classes):
            return typing.get_args(member)
    return ()
