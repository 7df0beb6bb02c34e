"""Checks of arguments that raise, collect and locate structured errors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import ParamSpec, TypeVar

from hgms_core.arguments import wrong_names
from hgms_core.errors import ConfigError, HgmsError, Place, raise_all, unknown_name

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def arguments_named(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function so that wrong arguments raise ConfigError.

    The code of the error is ``unknown-option`` for misspelt arguments, ``missing-option`` for
    missing arguments, and ``positional-argument`` if the target accepts arguments by name only.

    Examples
    --------
    >>> @arguments_named
    ... def train(*, steps: int) -> int:
    ...     return steps
    >>> train(step=3)
    Traceback (most recent call last):
        ...
    hgms_core.errors.ConfigError: unknown argument of train 'step' (step)
      did you mean 'steps'?
      available: steps
    """

    @functools.wraps(function)
    def wrapper(*args: Arguments.args, **arguments: Arguments.kwargs) -> Result:
        try:
            return function(*args, **arguments)
        except TypeError:
            errors = wrong_names(function, function.__name__, 0, args, arguments)
            if not errors:
                raise
        raise_all(errors)

    return wrapper


def require(
    holds: object,
    code: str,
    message: str,
    hint: str | None = None,
    place: Place = (),
    error: type[HgmsError] = ConfigError,
) -> None:
    """Raise an error unless a condition is true.

    Examples
    --------
    >>> require(2 > 1, "out-of-range", "2 must be greater than 1")
    """
    if not holds:
        raise error(code, message, place=place, hint=hint)


def require_known(
    kind: str, word: str, choices: Collection[str], place: Place = (), label: str = ""
) -> None:
    """Raise ConfigError ``unknown-<kind>`` unless a word is one of the choices.

    Examples
    --------
    >>> require_known("metric", "loss", ["loss", "accuracy"])
    """
    if word not in choices:
        raise unknown_name(kind, word, choices, place, label)


@contextlib.contextmanager
def errors_at(*place: str | int, of: type[HgmsError] = HgmsError) -> Iterator[None]:
    """Prepend a place to the place of each error of type ``of`` from inside the context."""
    try:
        yield
    except of as error:
        raise error.at(*place) from None


@contextlib.contextmanager
def collect_errors(errors: list[HgmsError], *place: str | int) -> Iterator[None]:
    """Add the errors from inside the context to a list, and prepend a place to each error."""
    try:
        yield
    except HgmsError as error:
        errors += error.at(*place).errors
