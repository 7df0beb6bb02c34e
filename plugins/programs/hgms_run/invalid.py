"""What is wrong with a table, and where; the types and values of its fields in words."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import attrs

from hgms_core import Budget, ConfigError
from hgms_core.registry import KINDS, Kind, faults_of, method_faults
from hgms_run.tables import Place, show

PROTOCOLS: dict[Any, Kind] = {kind.protocol: kind for kind in KINDS.values()}
"""The kind of component that a field with a protocol as its type holds."""

SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


class Invalid(Exception):
    """Errors with their places, gathered from the bottom of a table upwards."""

    def __init__(self, *errors: tuple[Place, str]) -> None:
        super().__init__(*errors)
        self.errors = errors

    def below(self, key: str | int) -> list[tuple[Place, str]]:
        return [((key, *place), message) for place, message in self.errors]

    def render(self, source: str, sets: tuple[Place, ...] = ()) -> str:
        """One message with the place behind its first line; several ones under a heading."""
        messages = []
        for place, message in self.errors:
            was_set = any(place[: len(path)] == path for path in sets)
            keys = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
            first, *rest = message.splitlines()
            messages.append("\n  ".join([f"{first} @ {'--set ' if was_set else source + '.' * bool(place)}{keys}", *rest]))
        if len(messages) == 1:
            return messages[0]
        return f"{len(messages)} errors in {source}:\n" + "\n".join("  " + text.replace("\n", "\n  ") for text in messages)


def fail(message: str) -> NoReturn:
    raise Invalid(((), message))


def type_hints(cls: type) -> dict[str, Any]:
    """The types of an attrs class's fields, evaluated."""
    try:
        return typing.get_type_hints(cls)
    except NameError as error:
        raise ConfigError(
            f"the types of {cls.__module__}:{cls.__qualname__} cannot be resolved ({error}); "
            "import what its annotations name outside of TYPE_CHECKING"
        ) from None


def init_fields(cls: type) -> dict[str, attrs.Attribute[Any]]:
    """The fields that a configuration may set, by the name of their argument."""
    return {field.alias or field.name: field for field in attrs.fields(cls) if field.init and field.metadata.get("toml", True)}


def origin_is(hint: Any, *classes: Any) -> bool:
    """Whether a type is a generic of one of these classes."""
    origin = typing.get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, classes)


def spell(hint: Any) -> str:
    """A type in words, for messages and ``hgms describe``."""
    if hint in SCALARS:
        return SCALARS[hint]
    if hint in PROTOCOLS:
        return PROTOCOLS[hint].with_article
    if hint is Budget:
        return 'a budget like "60s", "25 steps" or "1e5 calls"'
    if hint in (None, type(None)):
        return '"none"'
    return f"a table ({hint.__name__})" if attrs.has(hint) else _spell_generic(hint, typing.get_args(hint))


def _spell_generic(hint: Any, arguments: tuple[Any, ...]) -> str:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return " or ".join(show(choice) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(spell(member) for member in arguments)
    if origin is tuple and Ellipsis not in arguments:
        return f"a list of {len(arguments)} values ({', '.join(spell(item) for item in arguments)})"
    if origin_is(hint, tuple, list, Sequence):
        return f"a list ({spell(arguments[0])} each)"
    if origin_is(hint, Mapping):
        return f"a table ({spell(arguments[1])} each)"
    if origin_is(hint, Callable):
        return "a function (from Python only)"
    return getattr(hint, "__name__", str(hint))


def kinds_of(target: type) -> list[Kind]:
    """The kinds whose methods the class has, the nearest first (:func:`nearness`); which one it is if its signatures are right
    for one only."""
    likely = [kind for kind in KINDS.values() if all(callable(getattr(target, name, None)) for name in kind.methods())]
    right = [kind for kind in likely if not faults_of(kind, target)]
    return right or sorted(likely, key=lambda kind: -nearness(kind, target))


def nearness(kind: Kind, target: type) -> int:
    """How much of a kind's protocol a class has: its methods, and once more those with the right parameters. So a method with
    a misnamed parameter is no outer optimiser, though it has ``init`` and ``step``: it has ``result`` too."""
    here = [name for name in kind.methods() if callable(getattr(target, name, None))]
    return len(here) + sum(not method_faults(target, name, kind.methods()[name]) for name in here)
