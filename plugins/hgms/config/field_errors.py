"""Errors of fields: with their places, and all of them at once."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from hgms_core import ConfigError, HgmsError
from hgms_core.errors import raise_all, unknown_name

Reader = Callable[[Any], Any]
"""A function from the value in a file to the value of a field."""


def fail(code: str, message: str, **parts: Any) -> NoReturn:
    """Raise ConfigError about the value being read; the callers add its place."""
    raise ConfigError(code, message, **parts)


def choice_of(value: object, hint: Any, otherwise: Callable[[Any, object], NoReturn]) -> Any:
    """Return the member of a ``Literal`` that is equal to a value.

    For any other string, the error suggests the nearest member. Other values are passed to
    ``otherwise``.
    """
    choices = typing.get_args(hint)
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    if isinstance(value, str) and all(isinstance(choice, str) for choice in choices):
        raise unknown_name("choice", value, choices)
    otherwise(hint, value)


def gathered(items: Iterable[tuple[Any, Any, Reader]]) -> dict[Any, Any]:
    """Return each (key, value, reader) as key and read value.

    Errors: all errors are raised together.
    """
    values = {}
    errors: list[HgmsError] = []
    for key, item, function in items:
        try:
            values[key] = function(item)
        except HgmsError as error:
            errors += error.at(key).errors
    if errors:
        raise_all(errors)
    return values
