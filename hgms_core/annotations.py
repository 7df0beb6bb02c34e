"""Checks of field values by annotations such as ``float | None`` or ``LinearSolver``."""

from __future__ import annotations

import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NoReturn, Protocol

from hgms_core import protocols
from hgms_core.arguments import brief, check_part, methods_of
from hgms_core.errors import ConfigError, Place, join_place, unknown_name
from hgms_core.linear import as_solver, is_solver

Read = Callable[[Place, Any], Any]
"""Returns the value of a field from the value that a user wrote, else raises ConfigError."""

PARTS: dict[Any, str] = {
    protocols.CandidateGenerator: "a candidate generator",
    protocols.Selector: "a selector",
    protocols.LinearSolver: "a linear solver",
    protocols.HyperGradient: "a hypergradient estimator",
    protocols.OuterOptimizer: "an outer optimiser",
    protocols.Task: "a task",
    protocols.Method: "a method",
}
"""Descriptions of the kinds of component, by protocol."""


def reader_in(names: dict[str, Any], hint: Any) -> Read | None:
    """Return the reader for an annotation that may be written as text, as ``__future__`` does.

    ``names`` is the namespace of the module with the annotation. A type that is imported for
    type checkers only accepts all values.
    """
    try:
        # the text is source code of the class or function that is being defined
        return reader(eval(hint, names) if isinstance(hint, str) else hint)
    except NameError:
        return None


def reader(hint: Any) -> Read | None:
    """Return the reader for the values of an annotation, or None if it accepts all values."""
    origin = typing.get_origin(hint)
    if hint in SCALARS:
        return SCALARS[hint]
    if hint in PARTS:
        return partial(_part, hint)
    if origin in GENERIC:
        return partial(GENERIC[origin], hint, typing.get_args(hint))
    is_class = isinstance(hint, type) and origin is None and hint not in (Any, object)
    return partial(_object, hint) if is_class and Protocol not in hint.__bases__ else None


def words(hint: Any) -> str:
    """Return the description of an annotation for messages."""
    members = typing.get_args(hint)
    if hint in WORDS:
        return WORDS[hint]
    if hint in PARTS:
        return f"{PARTS[hint]}, an object with {', '.join(methods_of(hint))}"
    origin = typing.get_origin(hint)
    if origin in (Literal, typing.Union, types.UnionType):
        return " or ".join(map(repr if origin is Literal else words, members))
    if origin is Callable:
        return "a function"
    return hint.__name__ if isinstance(hint, type) and not members else str(hint)


def wrong(code: str, place: Place, value: object, requirement: str) -> NoReturn:
    """Raise ConfigError for a value, with a hint if it is a class or a number in quotes."""
    hint = None
    if isinstance(value, type):
        hint = f"create it: {value.__name__}()"
    elif isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value):
        hint = f"write it without quotes: {value}"
    if place:
        message = f"{join_place(place)}={brief(value)} must be {requirement}"
    else:  # the caller adds it
        message = f"expected {requirement}, got {brief(value)}"
    raise ConfigError(code, message, place=place, hint=hint)


def number(place: Place, value: Any) -> float:
    """Return a finite number as a float."""
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        wrong("wrong-type", place, value, "a number")
    if isinstance(value, float) and math.isnan(value):
        wrong("not-finite", place, value, "a finite number")
    if abs(value) > sys.float_info.max:
        wrong("out-of-range", place, value, "a finite number")
    return float(value)


def integer(place: Place, value: Any) -> int:
    """Return an integer of at most 64 bits."""
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, int):
        wrong("wrong-type", place, value, "an integer")
    if not -(2**63) <= value < 2**63:
        wrong("out-of-range", place, value, "an integer of at most 64 bits")
    return int(value)


def truth(place: Place, value: Any) -> bool:
    """Return a boolean; 0 and 1 are rejected."""
    value = plain_number(value)
    return value if isinstance(value, bool) else wrong("wrong-type", place, value, "True or False")


def text(place: Place, value: Any) -> str:
    """Return a string; a path is accepted."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return str(value) if isinstance(value, str) else wrong("wrong-type", place, value, "a string")


SCALARS: dict[Any, Read] = {bool: truth, int: integer, float: number, str: text}
WORDS = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    type(None): "None",
}


def plain_number(value: Any) -> Any:
    """Convert a single number of NumPy or torch to a Python number."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _choice(hint: Any, choices: tuple[Any, ...], place: Place, value: Any) -> Any:
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    if isinstance(value, str) and all(isinstance(choice, str) for choice in choices):
        raise unknown_name("choice", value, choices, place, join_place(place))
    wrong("wrong-type", place, value, words(hint))


def _union(hint: Any, members: tuple[Any, ...], place: Place, value: Any) -> Any:
    if value is None and type(None) in members:
        return None
    errors = []
    given = [member for member in members if member is not type(None)]
    for member in sorted(given, key=lambda member: type(value) is not member):
        try:
            return _item(member, place, value)
        except ConfigError as error:
            errors.append(error)
    # an error more precise than "wrong-type" shows which member the user intended
    precise = [error for error in errors if error.code != "wrong-type" or error.place != place]
    if precise or len(errors) == 1:
        raise [*precise, *errors][0]
    wrong("wrong-type", place, value, words(hint))


def _sequence(hint: Any, members: tuple[Any, ...], place: Place, value: Any) -> Any:
    value = value.tolist() if getattr(value, "ndim", None) == 1 else value
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        wrong("wrong-type", place, value, words(hint))
    kind = typing.get_origin(hint)
    if members[-1] is Ellipsis or kind is not tuple:
        members = (members[0],) * len(value)
    if len(value) != len(members):
        wrong("wrong-length", place, value, words(hint))
    items = [
        _item(member, (*place, index), item)
        for index, (member, item) in enumerate(zip(members, value, strict=True))
    ]
    return items if kind is list else tuple(items)


def _mapping(hint: Any, members: tuple[Any, ...], place: Place, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        wrong("wrong-type", place, value, words(hint))
    return {key: _item(members[-1], (*place, str(key)), item) for key, item in value.items()}


def _item(hint: Any, place: Place, value: Any) -> Any:
    read = reader(hint)
    return value if read is None else read(place, value)


def _function(hint: Any, members: tuple[Any, ...], place: Place, value: Any) -> Any:
    return value if callable(value) else wrong("wrong-type", place, value, "a function")


def _object(cls: type, place: Place, value: Any) -> Any:
    return value if isinstance(value, cls) else wrong("wrong-type", place, value, words(cls))


def _part(kind: Any, place: Place, value: Any) -> Any:
    is_function = callable(value) and not isinstance(value, type) and not is_solver(value)
    if kind is protocols.LinearSolver and is_function:
        return as_solver(value)
    names = methods_of(kind)
    check_part(place, value, PARTS[kind], names)
    # a method has the methods of an outer optimiser, but is no outer optimiser
    for other, label in PARTS.items():
        more = methods_of(other)
        if set(more) > set(names) and all(hasattr(value, name) for name in more):
            message = f"{join_place(place)} must be {PARTS[kind]}, but is {label}"
            raise ConfigError("wrong-part", message, place=place)
    return value


GENERIC: dict[Any, Callable[..., Any]] = {
    Literal: _choice,
    typing.Union: _union,
    types.UnionType: _union,
    tuple: _sequence,
    list: _sequence,
    Sequence: _sequence,
    dict: _mapping,
    Mapping: _mapping,
    Callable: _function,
}
"""Readers of generic annotations, ``(hint, members, place, value)``, by origin."""
