"""Descriptions of types and values for messages."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs import frozen

from hgms.config.budget import Budget
from hgms.config.parts import KINDS, methods

SCALARS: dict[Any, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
    Any: "anything",
    type(None): "None",
}


def origin_is(hint: Any, *classes: Any) -> bool:
    """Return whether a type is a generic of one of these classes."""
    origin = typing.get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, classes)


@frozen
class Words:
    """Descriptions of types in the terms of Python or TOML.

    Choose the terms by the notation of the values: Python (:data:`spelled`), or a TOML table.
    ``known`` describes types that are not generics; ``literal`` formats a value.

    >>> Words(known={int: "an integer"}.get, mapping="a table").spell(
    ...     dict[str, int] | tuple[int, int]
    ... )
    'a table (an integer each) or 2 values (an integer, an integer)'
    """

    known: Callable[[Any], str | None]
    literal: Callable[[Any], str] = repr
    fixed: str = ""
    mapping: str = "a dictionary"
    function: str = "a function"

    def spell(self, hint: Any) -> str:
        word = self.known(hint)
        if word is not None:
            return word
        origin = typing.get_origin(hint)
        arguments = typing.get_args(hint)
        if origin is Literal:
            return " or ".join(map(self.literal, arguments))
        if origin in (typing.Union, types.UnionType):
            return " or ".join(map(self.spell, arguments))
        if origin is tuple and Ellipsis not in arguments:
            return f"{self.fixed}{len(arguments)} values ({', '.join(map(self.spell, arguments))})"
        if origin_is(hint, tuple, list, Sequence):
            return f"a list ({self.spell(arguments[0])} each)"
        if origin_is(hint, Mapping):
            return f"{self.mapping} ({self.spell(arguments[1])} each)"
        if origin is Iterable:
            return f"something to go through ({self.spell(arguments[0])} each)"
        return self.function if origin_is(hint, Callable) else str(hint)


def _known(hint: Any) -> str | None:
    if hint in SCALARS:
        return SCALARS[hint]
    if hint in KINDS:
        return f"{KINDS[hint]} (an object with {', '.join(sorted(methods(hint)))})"
    if hint is Budget:
        return "a budget like '60s', '25 steps' or '1e5 calls'"
    if isinstance(hint, type) and attrs.has(hint):
        names = [field.alias for field in attrs.fields(hint) if field.init]
        return f"an object of {hint.__name__} or a dictionary of its arguments ({', '.join(names)})"
    return f"an object of {hint.__name__}" if isinstance(hint, type) else None


spelled = Words(_known).spell
"""Describe a type for users who write Python."""
