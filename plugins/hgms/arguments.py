"""Functions that report misspelt, missing and positional arguments as errors of HGMS."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from hgms_core.arguments import wrong_names
from hgms_core.errors import raise_all

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
