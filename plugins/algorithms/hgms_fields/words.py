"""Types and values in words, for messages."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from hgms_core import Budget
from hgms_fields.parts import KINDS, methods

SCALARS: dict[Any, str] = {
    bool: "True or False", int: "an integer", float: "a number", str: "a string", Path: "a path", Any: "anything",
    type(None): "None",
}  # fmt: skip


def is_generic(origin: Any, *classes: Any) -> bool:
    """Whether the origin of a type is one of these classes."""
    return isinstance(origin, type) and issubclass(origin, classes)


def spelled(hint: Any) -> str:
    """A type in words.

    >>> spelled(tuple[float, float] | None)
    '2 values (a number, a number) or None'
    """
    if hint in SCALARS:
        return SCALARS[hint]
    if hint in KINDS:
        return f"{KINDS[hint]} (an object with {', '.join(sorted(methods(hint)))})"
    if hint is Budget:
        return "a budget like '60s', '25 steps' or '1e5 calls'"
    if isinstance(hint, type) and attrs.has(hint):
        names = [field.alias for field in attrs.fields(hint) if field.init]
        return f"an object of {hint.__name__} or a dictionary of its arguments ({', '.join(names)})"
    if isinstance(hint, type):
        return f"an object of {hint.__name__}"
    return _spelled_generic(hint, typing.get_origin(hint), typing.get_args(hint))


def _spelled_generic(hint: Any, origin: Any, arguments: tuple[Any, ...]) -> str:
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(spelled(member) for member in arguments)
    if origin is tuple and Ellipsis not in arguments:
        return f"{len(arguments)} values ({', '.join(spelled(item) for item in arguments)})"
    if is_generic(origin, tuple, list, Sequence):
        return f"a list ({spelled(arguments[0])} each)"
    if is_generic(origin, Mapping):
        return f"a dictionary ({spelled(arguments[1])} each)"
    if origin is Iterable:
        return f"something to go through ({spelled(arguments[0])} each)"
    return "a function" if is_generic(origin, Callable) else str(hint)


def sentence(error: BaseException) -> str:
    """The sentence of an exception; attrs' own ones carry more arguments behind it."""
    return str(error.args[0]) if error.args else type(error).__name__


def got(value: object) -> str:
    """A value as a message shows it."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {value.__name__}"
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{_article(type(value).__name__)} of shape {list(shape)}"
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else _article(type(value).__name__)


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
