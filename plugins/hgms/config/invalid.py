"""Descriptions of the fields of a table and their types; kinds of a class.

The kinds are the kinds of component that a class may belong to.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs

from hgms.config.budget import Budget
from hgms.config.tables import show
from hgms.facts import declared_name
from hgms.plugins import KINDS, Kind, Registry, faults_of, inside, method_faults
from hgms_core import ConfigError
from hgms_core.errors import unknown_name

PROTOCOLS: dict[Any, Kind] = {kind.protocol: kind for kind in KINDS.values()}
"""The kind of component for a field, by the protocol that is the field's type."""

SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


@functools.cache
def type_hints(cls: Any) -> Mapping[str, Any]:
    """Return the evaluated types of the fields of an attrs class.

    Raises
    ------
    ConfigError
        If a type cannot be resolved.
    """
    try:
        # cached: a call takes a millisecond, and each configuration of a grid needs all types
        return typing.get_type_hints(cls)
    except NameError as error:
        raise ConfigError(
            "wrong-annotation",
            f"the types of {cls.__module__}:{cls.__qualname__} cannot be resolved: {error}",
            hint="import the types of its annotations outside of TYPE_CHECKING",
        ) from None


def init_fields(cls: type) -> dict[str, attrs.Attribute[Any]]:
    """Return the fields that a configuration may set, by argument name."""
    return {
        field.alias or field.name: field
        for field in attrs.fields(cls)
        if field.init and field.metadata.get("toml", True)
    }


def plain_attribute(cls: type, name: str) -> ConfigError:
    """Return the error for a class attribute that is not a field.

    The attribute is not a field because it has no type.
    """
    value = getattr(cls, name)
    return ConfigError(
        "unknown-option",
        f"{cls.__name__}.{name} is a plain class attribute, not a field",
        place=(name,),
        hint=f"declare it with a type: {name}: {type(value).__name__} = {value!r}",
    )


def _simple_name(hint: Any) -> str | None:
    if hint in SCALARS:
        return SCALARS[hint]
    if hint in PROTOCOLS:
        return PROTOCOLS[hint].with_article
    if hint is Budget:
        return 'a budget like "60s", "25 steps" or "1e5 calls"'
    if hint in (None, type(None)):
        return '"none"'
    if attrs.has(hint):
        name = declared_name(hint)
        return show(name) if isinstance(name, str) else f"a table ({hint.__name__})"
    return hint.__name__ if isinstance(hint, type) else None


def origin_is(hint: Any, *classes: Any) -> bool:
    """Return whether a type is a generic of one of these classes."""
    origin = typing.get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, classes)


def spell(hint: Any) -> str:
    """Describe a type, for messages about files and for ``hgms describe``.

    Examples
    --------
    >>> spell(dict[str, int] | tuple[int, int])
    'a table (an integer each) or a list of 2 values (an integer, an integer)'
    """
    word = _simple_name(hint)
    if word is not None:
        return word
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is Literal:
        return " or ".join(map(show, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(spell(member) for member in arguments if inside(member) is None)
    if origin is tuple and Ellipsis not in arguments:
        return f"a list of {len(arguments)} values ({', '.join(map(spell, arguments))})"
    if origin_is(hint, tuple, list, Sequence):
        return f"a list ({spell(arguments[0])} each)"
    if origin_is(hint, Mapping):
        return f"a table ({spell(arguments[1])} each)"
    return "a function (from Python only)" if origin_is(hint, Callable) else str(hint)


def kinds_of(target: type) -> list[Kind]:
    """Return the kinds whose methods the class has, the nearest first.

    :func:`match_score` determines the order. If the signatures are right for some kinds, only these
    kinds are returned.
    """
    likely = [
        kind
        for kind in KINDS.values()
        if all(callable(getattr(target, name, None)) for name in kind.methods())
    ]
    right = [kind for kind in likely if not faults_of(kind, target)]
    return right or sorted(likely, key=lambda kind: -match_score(kind, target))


def available(registry: Registry, kind: Kind) -> str:
    """Return the hint for a missing name."""
    names = [component.name for component in registry.components(kind.name)]
    hint = unknown_name(kind.label, "", names).hint
    return f"{hint}\nrun `hgms list {kind.name}` for their descriptions"


def match_score(kind: Kind, target: type) -> int:
    """Return how closely a class matches the protocol of a kind.

    The score is the number of methods of the kind, plus the number of methods with the right
    parameters. This distinguishes a method with a misnamed parameter from an outer optimiser: both
    have ``init`` and ``step``, but a method also has ``result``.
    """
    here = [name for name in kind.methods() if callable(getattr(target, name, None))]
    return len(here) + sum(not method_faults(target, name, kind.methods()[name]) for name in here)
