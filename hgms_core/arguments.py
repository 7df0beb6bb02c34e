"""Checks of arguments: misspelt or missing names, wrong functions, wrong parts.

A wrong function accepts other arguments. A wrong part is of another kind of component.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, cast

from hgms_core.errors import ConfigError, raise_all, unknown_name

__all__ = ["accepts", "arguments_named", "check_function", "check_part", "kind_of"]

Target = TypeVar("Target", bound=Callable[..., Any])


def kind_of(value: object) -> str:
    """Return the kind of a value for a message: ``None``, ``the class Adam``, ``an int``."""
    if value is None or isinstance(value, type):
        return "None" if value is None else f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def brief(value: object) -> str:
    """Return a value for a message, or its type if the value is long.

    >>> brief(2.5), brief(list(range(1000))), brief(dict)
    ('2.5', '(a list)', '(the class dict)')
    """
    text = repr(value)
    if isinstance(value, type) or len(text) > 80 or "\n" in text:
        return f"({kind_of(value)})"
    return text


def check_function(what: str, function: Any, *arguments: str) -> None:
    """Raise ConfigError unless ``function`` accepts these arguments by position.

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
    except (TypeError, ValueError):  # builtins may have no signature
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
    """Return a validator that requires a function of these arguments.

    If ``optional``, the validator also accepts None.
    """

    def check(instance: object, attribute: Any, value: Any) -> None:
        if value is not None or not optional:
            check_function(attribute.name, value, *arguments)

    return check


@functools.cache
def methods_of(protocol: type) -> tuple[str, ...]:
    """Return the public methods of a protocol."""
    members = vars(protocol).items()
    return tuple(name for name, value in members if inspect.isfunction(value) and name[0] != "_")


def check_part(place: str, value: object, label: str, methods: Collection[str]) -> None:
    """Raise ConfigError unless ``value`` is an object with these methods.

    ``label`` is the kind of component for the message.

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

    The code of the error is ``unknown-option`` for misspelt arguments, ``missing-option`` for
    missing arguments, and ``positional-argument`` if the target accepts arguments by name only.
    """
    decorated: Any = target
    if isinstance(target, type):
        decorated.__init__ = _named(decorated.__init__, target.__name__, own=1)
        return target
    return cast(Target, _named(decorated, decorated.__name__, own=0))


def _named(write: Callable[..., Any], name: str, own: int) -> Callable[..., Any]:
    """Wrap ``write``; the messages omit its first ``own`` parameters."""

    @functools.wraps(write)
    def named(*args: Any, **arguments: Any) -> Any:
        try:
            return write(*args, **arguments)
        except TypeError:
            errors = wrong_names(write, name, own, args, arguments)
            if not errors:
                raise
        raise_all(errors)

    return named


def wrong_names(
    write: Callable[..., Any],
    owner: str,
    own: int,
    args: tuple[Any, ...],
    arguments: Mapping[str, object],
) -> list[ConfigError]:
    """Return the errors of misspelt, missing and positional arguments of a call.

    The messages omit the first ``own`` parameters, such as ``self``.
    """
    parameters = list(inspect.signature(write).parameters.values())[own:]
    positional = len(args) - own
    known = [item.name for item in parameters if item.kind is not item.VAR_KEYWORD]
    places = [item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD]
    if positional > len(places):
        limit = f"at most {len(places)} arguments" if places else "no argument"
        message = f"{owner} accepts {limit} by position, but got {positional}"
        pairs = zip(known, args[own:], strict=False)
        by_name = ", ".join(f"{name}={brief(value)}" for name, value in pairs)
        return [ConfigError("positional-argument", message, hint=f"use {owner}({by_name})")]
    errors = [
        unknown_name("option", name, known, (name,), f"argument of {owner}")
        for name in arguments
        if name not in known and len(known) == len(parameters)
    ]
    errors += [
        ConfigError(
            "positional-argument",
            f"{owner} got {name} twice, by position and by name",
            place=(name,),
        )
        for name in places[:positional]
        if name in arguments
    ]
    if errors:
        return errors
    return [
        ConfigError("missing-option", f"{owner} requires {item.name}", place=(item.name,))
        for item in parameters[positional:]
        if item.default is item.empty
        and item.kind is not item.VAR_KEYWORD
        and item.name not in arguments
    ]
