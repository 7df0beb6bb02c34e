"""Checks of arguments: ``frozen`` for components and ``checked`` for functions.

Both report wrong arguments immediately, with their place.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import attrs

from hgms.adapters import as_html
from hgms.config.reading import Reader, as_error, complaint, reader
from hgms.config.shown import got
from hgms.config.words import spelled
from hgms_core import ConfigError, HgmsError, raise_all, unknown_name

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def frozen(cls: type | None = None, /, **options: Any) -> Any:
    """Create a frozen attrs class that reads its arguments by their types.

    The types are the types of the fields. Numbers of NumPy and tensors with one number are accepted
    as numbers, and lists as tuples. A dictionary of arguments is accepted as the object of a field.

    A value of another type or outside its range raises :class:`hgms_core.ConfigError`. So does a
    misspelt, missing or positional argument. Several errors are raised as one
    :class:`hgms_core.ErrorGroup`. The place of each error starts with the argument. Objects have a
    display for notebooks.

    >>> from hgms.config import positive
    >>> @frozen(kw_only=True)
    ... class Step:
    ...     lr: float = attrs.field(default=0.1, validator=positive)
    ...     betas: tuple[float, float] = (0.9, 0.999)
    >>> import numpy as np
    >>> Step(lr=np.float32(0.5), betas=[0.5, 0.9])
    Step(lr=0.5, betas=(0.5, 0.9))
    >>> Step(rate=0.1)
    Traceback (most recent call last):
        ...
    hgms_core.errors.ConfigError: unknown argument of Step 'rate' (rate)
      available: betas, lr
    >>> Step(lr="1e-2", betas=0.9)
    Traceback (most recent call last):
        ...
    hgms_core.errors.ErrorGroup: 2 errors:
      expected a number, got '1e-2' (lr)
        use 0.01
      expected 2 values (a number, a number), got 0.9 (betas)

    A field with a converter or with ``metadata={"own": True}`` is not read by its type: the class
    handles its values. Cost: a few microseconds per object.
    """
    return (
        functools.partial(frozen, **options)
        if cls is None
        else _checking(attrs.frozen(cls, **options))
    )


def define(cls: type | None = None, /, **options: Any) -> Any:
    """Create a mutable attrs class with the checks of :func:`frozen`.

    Options are the options of ``attrs.define``.
    """
    return (
        functools.partial(define, **options)
        if cls is None
        else _checking(attrs.define(cls, **options))
    )


def _checking(built: Any) -> Any:
    """Make the constructor of an attrs class read its arguments first."""
    write = built.__init__
    name = built.__name__
    # evaluated for the first object, when all types are defined
    fields = functools.cache(lambda: _of_class(built))

    @functools.wraps(write)
    def __init__(self: Any, *args: Any, **arguments: Any) -> None:
        read = _read(name, fields(), args, arguments)
        try:
            write(self, **read)
            return
        except (ValueError, TypeError, HgmsError) as error:
            failure = error
        errors = [*_refused(fields(), read)]
        if errors:
            raise_all(errors)
        if isinstance(failure, TypeError):  # an error in the class; its traceback shows the place
            raise failure
        raise as_error(failure) from None

    built.__init__ = __init__
    if not hasattr(built, "_repr_html_"):
        built._repr_html_ = as_html
    return built


def checked(*own: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Decorate a function so that its arguments are read by their types.

    The rules are the same as for :func:`frozen`. Arguments named in ``own`` are not read by type:
    the function handles them.

    >>> @checked("rows")
    ... def train(rows: list, steps: int = 10) -> int:
    ...     return steps * len(rows)
    >>> train("ab", step=3)
    Traceback (most recent call last):
        ...
    hgms_core.errors.ConfigError: unknown argument of train 'step' (step)
      did you mean 'steps'?
      available: rows, steps
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        parameters = functools.cache(lambda: _of_function(function, own))

        @functools.wraps(function)
        def call(*args: Arguments.args, **arguments: Arguments.kwargs) -> Result:
            values: Any = _read(function.__name__, parameters(), args, arguments)
            return function(**values)  # type: ignore[call-arg]

        return call

    return decorate


@attrs.frozen
class _Argument:
    """Properties of a field of a class, or of a parameter of a function."""

    hint: Any
    read: Reader
    required: bool
    by_position: bool
    check: Callable[[Any], object] | None = None


def _hints(owner: Any) -> dict[str, Any]:
    """Return the types of an owner; empty if they cannot be evaluated.

    Such types may use names that are imported for type checking only.
    """
    try:
        return typing.get_type_hints(owner)
    except Exception:
        return {}


def _of_function(function: Callable[..., Any], own: Collection[str]) -> dict[str, _Argument]:
    hints = {name: hint for name, hint in _hints(function).items() if name not in own}
    return {
        name: _Argument(
            hint := hints.get(name, Any),
            reader(hint),
            item.default is item.empty,
            item.kind is not item.KEYWORD_ONLY,
        )
        for name, item in inspect.signature(function).parameters.items()
    }


def _of_class(cls: Any) -> dict[str, _Argument]:
    arguments = {}
    hints = _hints(cls)
    for field in attrs.fields(cls):
        hint = hints.get(field.name, Any)
        own = field.converter is not None or field.metadata.get("own")
        if field.init:
            read = reader(Any if own else hint)
            required = field.default is attrs.NOTHING
            arguments[field.alias] = _Argument(
                hint, read, required, not field.kw_only, _check_of(field)
            )
    return arguments


def _check_of(field: Any) -> Callable[[Any], object] | None:
    """Return the check of a single value of a field.

    The check is the converter, or the validator without the object.
    """

    def convert(value: Any) -> None:
        try:
            field.converter(value)
        except TypeError as error:
            raise as_error(error) from None

    if field.converter is not None:
        return None if isinstance(field.converter, attrs.Converter) else convert
    return None if field.validator is None else lambda value: field.validator(None, field, value)


def _read(
    owner: str, arguments: Mapping[str, _Argument], args: tuple[Any, ...], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments in the form that the class or the function uses."""
    read: dict[str, Any] = {}
    errors: list[HgmsError] = []
    for name, value in (_named(owner, arguments, args, values) if args else values).items():
        if name not in arguments:
            label = f"argument of {owner}"
            errors.append(unknown_name("option", name, arguments, (name,), label))
            continue
        try:
            read[name] = arguments[name].read(value)
        except HgmsError as error:
            if value is None and not arguments[name].required:
                parts = {**error.as_dict(), "hint": "omit the argument for its default"}
                error = ConfigError(**parts)
            errors += error.at(name).errors
    if len(read) < len(arguments) and not errors:
        missing = [
            name for name, argument in arguments.items() if argument.required and name not in read
        ]
        errors = [
            ConfigError(
                "missing-option",
                f"{owner} requires {name}: {spelled(arguments[name].hint)}",
                place=(name,),
            )
            for name in missing
        ]
    if errors:
        raise_all([*errors, *_refused(arguments, read)])
    return read


def _named(
    owner: str, arguments: Mapping[str, _Argument], args: tuple[Any, ...], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all arguments by name, including arguments given by position.

    Errors: ConfigError if an argument cannot be given by position, or is given twice.
    """
    places = [name for name, argument in arguments.items() if argument.by_position]
    if len(args) > len(places):
        names = ", ".join(
            f"{name}={got(value)}" for name, value in zip(arguments, args, strict=False)
        )
        limit = f"at most {len(places)} arguments" if places else "no argument"
        raise ConfigError(
            "positional-argument",
            f"{owner} accepts {limit} by position, but got {len(args)}",
            hint=f"use {owner}({names})" if names else f"use {owner}()",
        )
    first = dict(zip(places, args, strict=False))
    if twice := [name for name in first if name in values]:
        raise ConfigError(
            "positional-argument",
            f"{owner} got {twice[0]} twice, by position and by name",
            place=(twice[0],),
        )
    return {**first, **values}


def _refused(arguments: Mapping[str, _Argument], read: Mapping[str, Any]) -> Iterator[HgmsError]:
    """Yield the errors of the validators of single fields."""
    for name, argument in arguments.items():
        if argument.check is None or name not in read:
            continue
        error = complaint(argument.check, read[name], name)
        if error is not None:
            yield from error.errors
