"""The fields of a table and their types, in words; the kinds of component that a class may be
of.
"""

from __future__ import annotations

import functools
import typing
from typing import Any

import attrs

from hgms.config import Words
from hgms.config.budget import Budget
from hgms.config.tables import show
from hgms_core import ConfigError, unknown_name
from hgms_core.registry import KINDS, Kind, Registry, faults_of, method_faults

PROTOCOLS: dict[Any, Kind] = {kind.protocol: kind for kind in KINDS.values()}
"""The kind of component that a field with a protocol as its type holds."""

SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def type_hints(cls: type) -> dict[str, Any]:
    """The types of an attrs class's fields, evaluated."""
    try:
        return dict(_type_hints(cls))
    except NameError as error:
        raise ConfigError(
            "wrong-annotation",
            f"the types of {cls.__module__}:{cls.__qualname__} cannot be resolved: {error}",
            hint="import the types of its annotations outside of TYPE_CHECKING",
        ) from None


@functools.cache
def _type_hints(cls: Any) -> dict[str, Any]:
    # it takes a millisecond, and every configuration of a grid asks for the types of all its parts
    return typing.get_type_hints(cls)


def init_fields(cls: type) -> dict[str, attrs.Attribute[Any]]:
    """The fields that a configuration may set, by the name of their argument."""
    return {
        field.alias or field.name: field
        for field in attrs.fields(cls)
        if field.init and field.metadata.get("toml", True)
    }


def is_plain(cls: type, name: str) -> bool:
    """Whether this is a number or a text of the class that wants a type to be a field: none of a
    ClassVar, nor of what every component of its kind has."""
    typed = any(
        name in vars(base).get("__annotations__", {}) for base in (*cls.__mro__, *PROTOCOLS)
    )
    return not typed and isinstance(getattr(cls, name, None), int | float | str)


def plain_attribute(cls: type, name: str) -> ConfigError:
    """Return the error for a class attribute that is not a field because it has no type."""
    value = getattr(cls, name)
    return ConfigError(
        "unknown-option",
        f"{cls.__name__}.{name} is a plain class attribute, not a field",
        place=(name,),
        hint=f"declare it with a type: {name}: {type(value).__name__} = {value!r}",
    )


def _known(hint: Any) -> str | None:
    if hint in SCALARS:
        return SCALARS[hint]
    if hint in PROTOCOLS:
        return PROTOCOLS[hint].with_article
    if hint is Budget:
        return 'a budget like "60s", "25 steps" or "1e5 calls"'
    if hint in (None, type(None)):
        return '"none"'
    if attrs.has(hint):
        return f"a table ({hint.__name__})"
    return hint.__name__ if isinstance(hint, type) else None


spell = Words(
    _known,
    literal=show,
    fixed="a list of ",
    mapping="a table",
    function="a function (from Python only)",
).spell
"""A type in words, for messages about files and ``hgms describe``."""


def kinds_of(target: type) -> list[Kind]:
    """The kinds whose methods the class has, the nearest first (:func:`nearness`); which one it is
    if its signatures are right for one only."""
    likely = [
        kind
        for kind in KINDS.values()
        if all(callable(getattr(target, name, None)) for name in kind.methods())
    ]
    right = [kind for kind in likely if not faults_of(kind, target)]
    return right or sorted(likely, key=lambda kind: -nearness(kind, target))


def available(registry: Registry, kind: Kind) -> str:
    """Return the hint for a missing name."""
    names = [component.name for component in registry.components(kind.name)]
    hint = unknown_name(kind.label, "", names).hint
    return f"{hint}\nrun `hgms list {kind.name}` for their descriptions"


def nearness(kind: Kind, target: type) -> int:
    """How much of a kind's protocol a class has: its methods, and once more those with the right
    parameters. So a method with a misnamed parameter is no outer optimiser, though it has ``init``
    and ``step``: it has ``result`` too.
    """
    here = [name for name in kind.methods() if callable(getattr(target, name, None))]
    return len(here) + sum(not method_faults(target, name, kind.methods()[name]) for name in here)
