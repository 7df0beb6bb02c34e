"""Readers of arguments by the types of their fields.

Readers accept the values that a user may mean, and report errors for other values.
"""

from __future__ import annotations

import contextlib
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import attrs

from hgms.config.budget import Budget
from hgms.config.parts import KINDS, instead, part
from hgms.config.shown import got
from hgms.config.words import origin_is, spelled
from hgms_core import ConfigError, HgmsError, raise_all, unknown_name

Reader = Callable[[Any], Any]
"""A function from the value that a user wrote to the value of a field."""


def fail(code: str, message: str, **parts: Any) -> NoReturn:
    """Raise ConfigError about the value being read; the callers add its place."""
    raise ConfigError(code, message, **parts)


def complaint(check: Callable[[Any], object], value: object, name: str) -> HgmsError | None:
    """Return the error of a validator for the argument ``name``.

    The result is ``None`` if the value passes. Other exceptions of a validator are ignored here,
    because they recur when the object is built.
    """
    try:
        check(value)
    except (ValueError, HgmsError) as error:
        return as_error(error, name)
    except Exception as error:
        if isinstance(error, TypeError) and len(error.args) == 4:  # from attrs' instance_of
            return as_error(error, name)
    return None


def as_error(error: Exception, *place: str) -> HgmsError:
    """Convert an exception to an error of HGMS with a place.

    An error of HGMS is returned; it gets ``place`` only if it has no place. The error of another
    validator becomes a ConfigError.
    """
    if isinstance(error, HgmsError):
        has_place = not place or any(part.place for part in error.errors)
        return error if has_place else error.at(*place)
    # attrs adds the field and the value after its sentence
    text = str(error.args[0]) if error.args else type(error).__name__
    code = "wrong-type" if isinstance(error, TypeError) else "wrong-value"
    return ConfigError(code, text, place=place)


# --- readers
# --------------------------------------------------------------------------------------------------


def reader(hint: Any) -> Reader:
    """Return the reader for values of a type.

    Values of a type without a reader are accepted unchanged.
    """
    if hint is Any:
        return lambda value: value
    if hint in SCALARS:
        return SCALARS[hint]
    if hint in KINDS:
        return lambda value: _part(value, hint)
    if hint is Budget:
        return _budget
    if isinstance(hint, type) and attrs.has(hint):
        return lambda value: _object(value, hint)
    if isinstance(hint, type):
        return lambda value: value if isinstance(value, hint) else _unexpected(hint, value)
    return _generic(hint, typing.get_origin(hint), typing.get_args(hint))


def _generic(hint: Any, origin: Any, arguments: tuple[Any, ...]) -> Reader:
    if origin is Literal:
        return lambda value: choice_of(value, hint, _unexpected)
    if origin in (typing.Union, types.UnionType):
        return _union(hint, arguments)
    if origin_is(hint, tuple, list, Sequence):
        return _sequence(hint, origin, arguments)
    if origin_is(hint, Mapping):
        return _mapping(hint, reader(arguments[1]))
    if origin_is(hint, Callable):
        return lambda value: value if callable(value) else _unexpected(hint, value)
    if origin is Iterable:
        return lambda value: (
            value
            if hasattr(value, "__iter__") or hasattr(value, "__getitem__")
            else _unexpected(hint, value)
        )
    return lambda value: value


def _plain(value: Any) -> Any:
    """Convert a single number of NumPy or torch to a Python number."""
    return (
        value.item()
        if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None))
        else value
    )


def _number(value: Any) -> float:
    if type(value) is not float:
        value = _plain(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            _unexpected(float, value)
        try:
            value = float(value)
        except OverflowError:
            fail("out-of-range", f"{got(value)} is too large for a number")
    if math.isnan(value):
        fail("not-finite", "expected a number, got nan")
    if math.isinf(value):
        fail("out-of-range", f"expected a finite number, got {value}")
    return float(value)


def _integer(value: Any) -> int:
    if type(value) is not int:
        value = _plain(value)
        if isinstance(value, bool) or not isinstance(value, int):
            _unexpected(int, value)
    if not -(2**63) <= value < 2**63:
        fail("out-of-range", "the integer has more than 64 bits")
    return int(value)


def _truth(value: Any) -> bool:
    value = _plain(value)
    return value if isinstance(value, bool) else _unexpected(bool, value)


def _text(value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return (
        value
        if type(value) is str
        else str(value)
        if isinstance(value, str)
        else _unexpected(str, value)
    )


SCALARS: dict[Any, Reader] = {bool: _truth, int: _integer, float: _number, str: _text}


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


def _part(value: Any, kind: Any) -> Any:
    component = part(value, kind)
    if component is None:
        raise instead(value, kind)
    return component


def _union(hint: Any, members: tuple[Any, ...]) -> Reader:
    readers = [(member, reader(member)) for member in members if member is not type(None)]
    optional = len(readers) < len(members)

    def read(value: Any) -> Any:
        if optional and value is None:
            return None
        failures = []
        misspelt = []
        for member, function in sorted(readers, key=lambda pair: type(value) is not pair[0]):
            try:
                return function(value)
            except HgmsError as error:
                failures.append(error)
                misspelt += [error] * (
                    isinstance(value, str) and typing.get_origin(member) is Literal
                )
        # An error at an inner place belongs to the member that the value resembles most.
        infinite = isinstance(value, float) and math.isinf(value)
        inside = [error for error in failures if error.errors[0].place or infinite]
        words = [member for member, _ in readers if not origin_is(member, Callable)]
        if inside:
            raise inside[0]
        if misspelt and len(words) == 1:
            parts = misspelt[0].as_dict()
            others = "" if len(readers) == 1 else ", or a function"
            raise ConfigError(**{**parts, "hint": f"{parts['hint']}{others}"})
        _unexpected(hint, value)

    return read


def _sequence(hint: Any, origin: Any, arguments: tuple[Any, ...]) -> Reader:
    fixed = origin is tuple and arguments[-1] is not Ellipsis
    readers = [reader(argument) for argument in arguments if argument is not Ellipsis]

    def read(value: Any) -> Any:
        if getattr(value, "ndim", None) == 1 and hasattr(value, "tolist"):
            value = value.tolist()
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            _unexpected(hint, value)
        if fixed and len(value) != len(readers):
            fail("wrong-length", f"expected {spelled(hint)}, got {len(value)}")
        items = gathered(
            (index, item, readers[index if fixed else 0]) for index, item in enumerate(value)
        )
        return list(items.values()) if origin is list else tuple(items.values())

    return read


def _mapping(hint: Any, function: Reader) -> Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            _unexpected(hint, value)
        for key in value:
            if not isinstance(key, str):
                fail("wrong-type", f"keys must be strings, not {got(key)}")
        return gathered((key, item, function) for key, item in value.items())

    return read


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


def _budget(value: Any) -> Budget:
    if not isinstance(value, Budget | str | Mapping):
        _unexpected(Budget, value)
    return _built(Budget, **value) if isinstance(value, Mapping) else _built(Budget, value)


def _object(value: Any, cls: Any) -> Any:
    """Return an object of the class, from such an object or a table of its fields.

    The table has the form used in configurations.
    """
    if isinstance(value, cls):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return _built(cls, **value)
    _unexpected(cls, value)


def _built(cls: Any, *args: Any, **arguments: Any) -> Any:
    try:
        return cls(*args, **arguments)
    except (ValueError, TypeError, HgmsError) as error:
        raise as_error(error) from None


# --- hints for wrong values
# --------------------------------------------------------------------------------------------------


def _unexpected(hint: Any, value: object) -> NoReturn:
    message = f"expected {spelled(hint)}, got {got(value)}"
    fail("wrong-type", message, hint=_meant(hint, value))


def _meant(hint: Any, value: Any) -> str | None:
    """Return the valid form of a value, if one is likely."""
    if isinstance(value, type) and isinstance(hint, type) and issubclass(value, hint):
        return f"use {value.__name__}()"
    name = type(value).__name__
    members = typing.get_args(hint)
    if any(origin_is(member, Callable) for member in members):
        if hasattr(value, "param_groups"):
            return f"use a function that creates it: lambda params: {name}(params, …)"
        if hasattr(value, "get_last_lr"):
            return f"use a function that creates it: lambda optimizer: {name}(optimizer, …)"
    for guess in _guesses(value):
        try:
            return f"use {reader(hint)(guess)!r}"
        except HgmsError:
            continue
    return None


def _guesses(value: Any) -> Iterator[Any]:
    if type(value).__module__ == "torch":  # a dtype or a device
        yield str(value).removeprefix("torch.")
    if isinstance(value, str):
        yield from [word for text, word in _WORDS.items() if text == value.casefold()]
        for form in (int, float):
            with contextlib.suppress(ValueError):
                yield form(value)
        yield (value,)
    elif isinstance(value, float) and value.is_integer():
        yield int(value)
    elif getattr(value, "shape", None) is not None and math.prod(value.shape) == 1:
        yield value.item()
    elif isinstance(value, list | tuple) and len(value) == 1 and not isinstance(value[0], str):
        # a guess is not expanded to further guesses
        yield value[0]


_WORDS = {"none": None, "true": True, "false": False}
