"""Checks of arguments: misspelt or missing names, wrong functions, wrong parts.

A wrong function accepts other arguments. A wrong part is of another kind of component.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeVar

import attrs
import torch

from hgms_core.errors import ConfigError, HgmsError, Place, join_place, raise_all, unknown_name

T = TypeVar("T")

__all__ = ["accepts", "check_function", "check_part", "kind_of", "reports_errors"]


def kind_of(value: object) -> str:
    """Return the kind of a value for a message: ``None``, ``the class Adam``, ``an int``."""
    if value is None or isinstance(value, type):
        return "None" if value is None else f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def brief(value: object) -> str:
    """Return a value for a message, or its type if the value is long.

    Examples
    --------
    >>> brief(2.5), brief(list(range(1000))), brief(dict)
    ('2.5', '(a list)', '(the class dict)')
    """
    text = repr(value)
    if isinstance(value, type) or len(text) > 80 or "\n" in text:
        return f"({kind_of(value)})"
    return text


def check_function(what: str, function: Any, *arguments: str) -> None:
    """Raise ConfigError unless ``function`` accepts these arguments by position.

    Examples
    --------
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
    module = isinstance(function, torch.nn.Module)
    try:
        signature = inspect.signature(function.forward if module else function)
    except (TypeError, ValueError):  # builtins may have no signature
        return
    own = list(signature.parameters)[: len(arguments)]
    try:
        signature.bind(*arguments)
        wrong = own != list(arguments) and sorted(own) == sorted(arguments)
    except TypeError:
        wrong = True
    if wrong:
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
    return tuple(
        name
        for name, value in vars(protocol).items()
        if inspect.isfunction(value) and name[0] != "_"
    )


def check_part(place: Place, value: object, label: str, methods: Collection[str]) -> None:
    """Raise ConfigError unless ``value`` is an object with these methods.

    ``label`` is the kind of component for the message.

    Examples
    --------
    >>> check_part(("selector",), "first", "a selector", ["select"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    hgms_core.errors.ConfigError: selector must be a selector, an object with select, not ...
    """
    fits = all(callable(getattr(value, name, None)) for name in methods)
    cls = value if isinstance(value, type) else type(value)
    kind = cls.__name__
    if fits and not isinstance(value, type):
        return
    hint = f"use {kind}()" if fits else None
    if isinstance(value, str):
        hint = "pass an object; names work in configurations only (see `hgms list`)"
    elif issubclass(cls, torch.optim.Optimizer):
        hint = f"use TorchOptimizer(optimizer={kind!r}, settings={{…}})"
    shown = repr(value) if isinstance(value, str) else kind_of(value)
    raise ConfigError(
        "wrong-part",
        f"{join_place(place)} must be {label}, an object with {', '.join(methods)}, not {shown}",
        place=place,
        hint=hint,
    )


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


def reports_errors(cls: type[T]) -> type[T]:
    """Make a class of attrs report all wrong arguments of a call, as one error of HGMS.

    :func:`hgms_core.component` uses it. A class with other options of attrs can use it directly.
    """
    built: Any = cls
    write = built.__init__

    @functools.wraps(write)
    def __init__(self: Any, *args: Any, **arguments: Any) -> None:
        try:
            write(self, *args, **arguments)
            return
        except (TypeError, ValueError, HgmsError) as error:
            failure = error
        errors: list[HgmsError] = []
        if isinstance(failure, TypeError):
            errors += wrong_names(write, cls.__name__, 1, (self, *args), arguments)
        errors += wrong_values(built, arguments)
        if errors:
            raise_all(errors)
        if isinstance(failure, TypeError):  # an error in the class: its traceback shows the place
            raise failure
        raise as_error(failure) from None

    built.__init__ = __init__
    return cls


def wrong_values(cls: Any, arguments: Mapping[str, object]) -> list[HgmsError]:
    """Return the errors of the converters and validators of single fields."""

    def check(field: Any, value: object) -> None:
        value = value if field.converter is None else field.converter(value)
        if field.validator is not None:
            field.validator(None, field, value)

    fields: Any = attrs.fields(cls)
    by_name = {field.alias: field for field in fields}
    known = {name: by_name[name] for name in arguments if name in by_name}
    found = [complaint(partial(check, known[name]), arguments[name], name) for name in known]
    return [error for group in found if group is not None for error in group.errors]


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
