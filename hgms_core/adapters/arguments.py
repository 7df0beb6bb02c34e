"""What is wrong with arguments: misspelt or missing, functions that take others, parts of
another kind.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from typing import Any, TypeVar

from hgms_core.errors import ConfigError, unknown

Class = TypeVar("Class", bound=type)


def kind_of(value: object) -> str:
    """What a value is, in a sentence: ``None``, ``the class Adam``, ``an int``."""
    if value is None or isinstance(value, type):
        return "None" if value is None else f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def check_function(what: str, function: Any, *arguments: str) -> None:
    """ConfigError where ``function`` cannot be called with these arguments by position.

    >>> check_function("g", lambda theta, x: x, "theta", "x", "batch")
    Traceback (most recent call last):
        ...
    hgms_core.errors.ConfigError: 'g' is called as g(theta, x, batch), and this one takes (theta, x)
    """
    call = f"{what}({', '.join(arguments)})"
    if (isinstance(function, type) and arguments) or not callable(function):
        raise ConfigError(f"{what!r} must be a function, {call}, and it is {kind_of(function)}")
    module = hasattr(function, "state_dict") and hasattr(function, "forward")
    try:
        signature = inspect.signature(function.forward if module else function)
    except (TypeError, ValueError):  # of a builtin, which has none
        return
    try:
        signature.bind(*arguments)
        swapped = sorted(own := list(signature.parameters)[: len(arguments)]) == sorted(
            arguments
        ) and own != list(arguments)
    except TypeError:
        swapped = True
    if swapped:
        raise ConfigError(
            f"{what!r} is called as {call}, and this one takes ({', '.join(signature.parameters)})"
        )


def check_part(place: str, value: object, label: str, methods: Collection[str]) -> None:
    """ConfigError where ``value`` lacks methods of a part of that kind (``label``), such as a name
    or a class in its place.

    >>> check_part("Pipeline.selector", "first", "a selector", ["select"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    hgms_core.errors.ConfigError: expected a selector (an object with select), got 'first' @ ...
    """
    fits = all(callable(getattr(value, name, None)) for name in methods)
    kind = getattr(value, "__name__", type(value).__name__)
    if fits and not isinstance(value, type):
        return
    expected = f"expected {label} (an object with {', '.join(methods)}), got"
    if isinstance(value, str):
        hint = (
            "a name stands for an object in configurations only; `hgms list` shows where each "
            "is imported from"
        )
        raise ConfigError(f"{expected} {value!r} @ {place}\n  {hint}")
    if hasattr(value, "add_param_group"):
        hint = (
            "it holds its own parameters and state; write "
            f"`TorchOptimizer(optimizer={kind!r}, settings={{…}})`"
        )
        raise ConfigError(f"{expected} torch's {kind} @ {place}\n  {hint}")
    raise ConfigError(f"{expected} {kind_of(value)}{f'; write {kind}()' if fits else ''} @ {place}")


def arguments_named(cls: Class) -> Class:
    """A class whose constructor says by a ConfigError which argument is misspelt or missing, and
    which ones there are.
    """
    decorated: Any = cls
    write = decorated.__init__

    @functools.wraps(write)
    def __init__(self: Any, *args: Any, **arguments: Any) -> None:
        try:
            write(self, *args, **arguments)
        except TypeError:
            own = inspect.signature(write).parameters
            for name in arguments:
                if name not in own:
                    raise ConfigError(
                        f"{unknown('argument', name, list(own)[1:])} @ {cls.__name__}"
                    ) from None
            missing = [
                name
                for name, item in own.items()
                if item.default is item.empty and name not in arguments
            ][1:]
            by_name = ", ".join(
                f"{name}=…" for name, item in own.items() if item.kind is item.KEYWORD_ONLY
            )
            if args and by_name:
                raise ConfigError(
                    f"{cls.__name__} takes its arguments by name: {by_name}"
                ) from None
            if missing and not args:
                raise ConfigError(f"{cls.__name__} needs {', '.join(map(repr, missing))}") from None
            raise

    decorated.__init__ = __init__
    return cls
