"""Checks of constructor arguments: misspelt or missing ones, functions that accept other arguments,
and parts of the wrong kind.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from hgms_core.errors import ConfigError, unknown_name

Class = TypeVar("Class", bound=type)


def kind_of(value: object) -> str:
    """Return what a value is, for a message: ``None``, ``the class Adam``, ``an int``."""
    if value is None or isinstance(value, type):
        return "None" if value is None else f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def check_function(what: str, function: Any, *arguments: str) -> None:
    """Require a function that can be called with these arguments by position, else ConfigError.

    >>> check_function("g", lambda theta, x: x, "theta", "x", "batch")
    Traceback (most recent call last):
        ...
    hgms_core.errors.ConfigError: g must accept (theta, x, batch), but takes (theta, x) (g)
    """
    wanted = ", ".join(arguments)
    if (isinstance(function, type) and arguments) or not callable(function):
        raise ConfigError(
            "wrong-type",
            f"{what} must be a function of ({wanted}), not {kind_of(function)}",
            place=tuple(what.split(".")),
        )
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
            "wrong-signature",
            f"{what} must accept ({wanted}), but takes ({', '.join(signature.parameters)})",
            place=tuple(what.split(".")),
        )


def accepts(*arguments: str, optional: bool = False) -> Callable[[object, Any, Any], None]:
    """Return a validator that requires a function of these arguments, or, if optional, None."""

    def check(instance: object, attribute: Any, value: Any) -> None:
        if value is not None or not optional:
            check_function(attribute.name, value, *arguments)

    return check


def check_part(place: str, value: object, label: str, methods: Collection[str]) -> None:
    """Require an object with the methods of a kind of component (``label``), else ConfigError.

    >>> check_part("selector", "first", "a selector", ["select"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    hgms_core.errors.ConfigError: selector must be a selector, an object with select, not ...
    """
    fits = all(callable(getattr(value, name, None)) for name in methods)
    kind = getattr(value, "__name__", type(value).__name__)
    if fits and not isinstance(value, type):
        return
    hint: str | None
    if isinstance(value, str):
        hint = "pass an object; names work in configurations only (see `hgms list`)"
    elif hasattr(value, "add_param_group"):
        hint = f"use TorchOptimizer(optimizer={kind!r}, settings={{…}})"
    else:
        hint = f"use {kind}()" if fits else None
    shown = repr(value) if isinstance(value, str) else kind_of(value)
    raise ConfigError(
        "wrong-part",
        f"{place} must be {label}, an object with {', '.join(methods)}, not {shown}",
        place=(place,),
        hint=hint,
    )


def arguments_named(cls: Class) -> Class:
    """Decorate a class so that misspelt, missing and positional arguments raise ConfigError."""
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
                    label = f"argument of {cls.__name__}"
                    raise unknown_name("option", name, list(own)[1:], (name,), label) from None
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
                    "positional-argument",
                    f"{cls.__name__} accepts arguments by name only",
                    hint=f"use {cls.__name__}({by_name})",
                ) from None
            if missing and not args:
                raise ConfigError(
                    "missing-option",
                    f"{cls.__name__} requires {', '.join(missing)}",
                    place=(missing[0],),
                ) from None
            raise

    decorated.__init__ = __init__
    return cls
