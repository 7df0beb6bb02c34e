"""``checked``: functions whose arguments are checked by their annotations."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from hgms_core.annotations import Read, reader
from hgms_core.arguments import arguments_named

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def checked(*own: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Decorate a function so that its arguments are checked as those of a component.

    Arguments named in ``own`` are not checked: the function does it.

    Errors: ConfigError with the place ``(argument,)``; see :func:`hgms_core.component`.

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
        readers = functools.cache(lambda: _readers(function, own))

        @functools.wraps(function)
        def call(*args: Arguments.args, **arguments: Arguments.kwargs) -> Result:
            bound = inspect.signature(function).bind(*args, **arguments)
            for name in bound.arguments.keys() & readers().keys():
                bound.arguments[name] = readers()[name]((name,), bound.arguments[name])
            return function(*bound.args, **bound.kwargs)

        return arguments_named(call)

    return decorate


def _readers(function: Callable[..., Any], own: tuple[str, ...]) -> dict[str, Read]:
    try:
        hints = typing.get_type_hints(function)
    except NameError:  # a type that is imported for type checkers only
        return {}
    readers = {name: reader(hint) for name, hint in hints.items() if name not in (*own, "return")}
    return {name: read for name, read in readers.items() if read is not None}
