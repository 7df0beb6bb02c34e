"""Checks of constructor arguments: misspelt or missing ones, functions that accept other arguments,
and parts of the wrong kind.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, cast

from hgms_core.errors import ConfigError, unknown_name

Target = TypeVar("Target", bound=Callable[..., Any])


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


def arguments_named(target: Target) -> Target:
    """Decorate a class or function so that wrong arguments raise ConfigError.

    Misspelt arguments raise ``unknown-option``, missing ones ``missing-option``, and positional
    arguments of a target that accepts names only ``positional-argument``.
    """
    decorated: Any = target
    if isinstance(target, type):
        decorated.__init__ = _named(decorated.__init__, target.__name__, own=1)
        return target
    return cast(Target, _named(decorated, decorated.__name__, own=0))


def _named(write: Callable[..., Any], name: str, own: int) -> Callable[..., Any]:
    """``write`` with its ``own`` first parameters left out of the messages."""

    @functools.wraps(write)
    def named(*args: Any, **arguments: Any) -> Any:
        try:
            return write(*args, **arguments)
        except TypeError:
            parameters = list(inspect.signature(write).parameters.values())[own:]
            _check_names(name, parameters, len(args) - own, arguments)
            raise

    return named


def _check_names(
    owner: str,
    parameters: list[inspect.Parameter],
    positional: int,
    arguments: Mapping[str, object],
) -> None:
    """Raise ConfigError for the first argument that explains a TypeError."""
    known = [item.name for item in parameters if item.kind is not item.VAR_KEYWORD]
    for argument in arguments:
        if argument not in known and len(known) == len(parameters):
            label = f"argument of {owner}"
            raise unknown_name("option", argument, known, (argument,), label) from None
    by_name = [f"{item.name}=…" for item in parameters if item.kind is item.KEYWORD_ONLY]
    if positional > sum(item.kind is item.POSITIONAL_OR_KEYWORD for item in parameters) and by_name:
        raise ConfigError(
            "positional-argument",
            f"{owner} accepts arguments by name only",
            hint=f"use {owner}({', '.join(by_name)})",
        ) from None
    missing = [
        item.name
        for item in parameters[positional:]
        if item.default is item.empty
        and item.kind is not item.VAR_KEYWORD
        and item.name not in arguments
    ]
    if missing:
        raise ConfigError(
            "missing-option", f"{owner} requires {', '.join(missing)}", place=(missing[0],)
        ) from None
