"""``check_arguments``: checks of a function's arguments by their annotations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from hgms.arguments import arguments_named, collect_errors
from hgms_core.annotations import Read, reader, reader_in
from hgms_core.errors import HgmsError, Place, raise_all

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def check_arguments(
    *own: str,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Return a decorator that checks arguments in the same way as the fields of a component.

    Arguments named in ``own`` are not checked, because the function checks them.

    Raises
    ------
    ConfigError
        With the place ``(argument,)``; see :func:`hgms_core.component`.

    Examples
    --------
    >>> @check_arguments("rows")
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
        readers = functools.cache(lambda: _readers(function, own))

        @functools.wraps(function)
        def call(*args: Arguments.args, **arguments: Arguments.kwargs) -> Result:
            bound = inspect.signature(function).bind(*args, **arguments)
            errors: list[HgmsError] = []
            for name, value in bound.arguments.items():
                read = readers().get(name)
                with collect_errors(errors):
                    bound.arguments[name] = value if read is None else read((name,), value)
            if errors:
                raise_all(errors)
            return function(*bound.args, **bound.kwargs)

        return arguments_named(call)

    return decorate


def check_types(table: Mapping[str, Any], hints: Mapping[str, Any], place: Place) -> None:
    """Raise ConfigError if a value of the table has another type; a missing value is ``None``."""
    for name, hint in hints.items():
        read = reader(hint)
        if read is not None:
            read((*place, name), table.get(name))


def _readers(function: Callable[..., Any], own: tuple[str, ...]) -> dict[str, Read]:
    names = function.__globals__
    hints = {name: hint for name, hint in function.__annotations__.items() if name not in own}
    hints.pop("return", None)
    readers = {name: reader_in(names, hint) for name, hint in hints.items()}
    return {name: read for name, read in readers.items() if read is not None}
