"""``component``: frozen classes whose arguments are checked.

The fields of a component are its hyperparameters. Data and state go through its methods, so two
components with equal fields are interchangeable, in a file, in a test and in a hash.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar, dataclass_transform

import attrs

from hgms_core import protocols
from hgms_core.arguments import brief, check_part, methods_of, wrong_names
from hgms_core.errors import ConfigError, HgmsError, Place, dotted, raise_all, unknown_name
from hgms_core.linear import as_solver

T = TypeVar("T")
Read = Callable[[Place, Any], Any]
"""Returns the value of a field from the value that a user wrote, else raises ConfigError."""

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
PARTS: dict[Any, str] = {
    protocols.CandidateGenerator: "a candidate generator",
    protocols.Selector: "a selector",
    protocols.LinearSolver: "a linear solver",
    protocols.HyperGradient: "a hypergradient estimator",
    protocols.OuterOptimizer: "an outer optimiser",
    protocols.Task: "a task",
    protocols.Method: "a method",
}
"""Descriptions of the kinds of component, by protocol."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(attrs.field,))
def component(cls: type[T]) -> type[T]:
    """Make a class a component: a frozen attrs class with keyword arguments that are checked.

    ``name`` is the name in configurations, in kebab case. Each annotated field is an argument.
    Its value is checked by the annotation: numbers, strings, booleans, ``Literal``, ``None``,
    tuples and mappings of these, classes, functions, and kinds of component. Numbers of NumPy and
    tensors with one number are accepted as numbers, and lists as tuples. Then the validator of
    the field runs (:mod:`hgms_core.validators`). A field with an own converter is not checked by
    its annotation.

    Errors: ConfigError ``bad-name`` at import. ``unknown-option``, ``missing-option`` and
    ``positional-argument`` for wrong arguments; ``wrong-type``, ``wrong-part``, ``unknown-choice``,
    ``wrong-length``, ``not-finite`` and the codes of the validators for wrong values, with the
    place ``(argument,)``. Type checkers report the first five at the call. Cost: microseconds.

    >>> from hgms_core.validators import positive
    >>> @component
    ... class Step:
    ...     name = "step"
    ...     lr: float = attrs.field(default=0.1, validator=positive)
    ...     betas: tuple[float, float] = (0.9, 0.999)
    >>> import numpy as np
    >>> Step(lr=np.float32(0.5), betas=[0.5, 0.9])
    Step(lr=0.5, betas=(0.5, 0.9))
    >>> Step(betas=0.9)
    Traceback (most recent call last):
        ...
    hgms_core.errors.ConfigError: betas=0.9 must be tuple[float, float] (betas)
    >>> Step(rate=0.1)
    Traceback (most recent call last):
        ...
    hgms_core.errors.ConfigError: unknown argument of Step 'rate' (rate)
      available: betas, lr
    """
    built: Any = attrs.frozen(cls, kw_only=True, field_transformer=read_by_annotation)
    name = getattr(built, "name", None)
    if isinstance(name, str) and not NAME.fullmatch(name):
        raise ConfigError("bad-name", f"{cls.__name__}.name={name!r} must be in kebab case")
    return typing.cast(type[T], reports_errors(built))


def reports_errors(built: Any) -> Any:
    """Make a class of attrs report all wrong arguments of a call, as one error of HGMS.

    :func:`component` uses it. A class with other options of attrs can use it directly.
    """
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
            errors += wrong_names(write, built.__name__, 1, (self, *args), arguments)
        errors += wrong_values(built, arguments)
        if errors:
            raise_all(errors)
        if isinstance(failure, TypeError):  # an error in the class: its traceback shows the place
            raise failure
        raise as_error(failure) from None

    built.__init__ = __init__
    return built


def wrong_values(cls: type, arguments: Mapping[str, object]) -> list[HgmsError]:
    """Return the errors of the converters and validators of single fields."""

    def check(field: Any, value: object) -> None:
        value = value if field.converter is None else field.converter(value)
        if field.validator is not None:
            field.validator(None, field, value)

    fields: Any = attrs.fields(typing.cast(Any, cls))
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


def evolve(component: T, **changes: Any) -> T:
    """Return a copy of a component with other arguments."""
    return typing.cast(T, attrs.evolve(typing.cast(Any, component), **changes))


def read_by_annotation(cls: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Check the fields of a class by their annotations: a ``field_transformer`` of attrs.

    :func:`component` uses it. A class with other options of attrs can use it directly.
    """
    names = {**vars(sys.modules[cls.__module__]), cls.__name__: cls}
    given: list[Any] = fields
    return [
        field
        if not field.init
        or field.inherited
        or field.converter is not None
        or field.metadata.get("own")
        else _with_reader(field, names)
        for field in given
    ]


def _with_reader(field: attrs.Attribute[Any], names: dict[str, Any]) -> attrs.Attribute[Any]:
    hint: Any = field.type
    try:
        hint = eval(hint, names) if isinstance(hint, str) else hint
    except NameError:  # a type that is imported for type checkers only
        return field
    read = reader(hint)
    place = (field.alias or field.name.lstrip("_"),)
    return field if read is None else field.evolve(converter=partial(read, place))


def reader(hint: Any) -> Read | None:
    """Return what reads the values of an annotation, or None if it accepts all values."""
    origin = typing.get_origin(hint)
    members = typing.get_args(hint)
    if hint is Any:
        return None
    if hint in SCALARS:
        return SCALARS[hint]
    if hint in PARTS:
        return partial(_part, hint)
    if origin is Literal:
        return partial(_choice, hint, members)
    if origin in (typing.Union, types.UnionType):
        return partial(_union, hint, members)
    if origin in (tuple, list, Sequence):
        return partial(_sequence, hint, members)
    if origin is not None and issubclass(origin, Mapping):
        return partial(_mapping, hint, members[-1])
    if origin is Callable or hint is Callable:
        return partial(_function, hint)
    is_class = isinstance(hint, type) and origin is None and hint is not object
    return partial(_object, hint) if is_class and not _is_protocol(hint) else None


def _is_protocol(hint: Any) -> bool:
    return bool(getattr(hint, "_is_protocol", False))


def words(hint: Any) -> str:
    """Return an annotation in words, for messages."""
    members = typing.get_args(hint)
    if hint in WORDS:
        return WORDS[hint]
    if hint in PARTS:
        return f"{PARTS[hint]}, an object with {', '.join(methods_of(hint))}"
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, members))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(map(words, members))
    if typing.get_origin(hint) is Callable:
        return "a function"
    return hint.__name__ if isinstance(hint, type) and not members else str(hint)


def wrong(code: str, place: Place, value: object, requirement: str) -> NoReturn:
    """Raise ConfigError for a value, with its form if a string holds a number."""
    hint = None
    if isinstance(value, type):
        hint = f"create it: {value.__name__}()"
    elif isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value):
        hint = f"write it without quotes: {value}"
    message = f"{dotted(place)}={brief(value)} must be {requirement}"
    raise ConfigError(code, message, place=place, hint=hint)


def number(place: Place, value: Any) -> float:
    """Return a finite number as a float."""
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        wrong("wrong-type", place, value, "a number")
    if isinstance(value, float) and math.isnan(value):
        wrong("not-finite", place, value, "a finite number")
    if abs(value) > sys.float_info.max:
        wrong("out-of-range", place, value, "a finite number")
    return float(value)


def integer(place: Place, value: Any) -> int:
    """Return an integer of at most 64 bits."""
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, int):
        wrong("wrong-type", place, value, "an integer")
    if not -(2**63) <= value < 2**63:
        wrong("out-of-range", place, value, "an integer of at most 64 bits")
    return int(value)


def truth(place: Place, value: Any) -> bool:
    """Return a boolean; 0 and 1 are rejected."""
    value = _plain(value)
    return value if isinstance(value, bool) else wrong("wrong-type", place, value, "True or False")


def text(place: Place, value: Any) -> str:
    """Return a string; a path is accepted."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return str(value) if isinstance(value, str) else wrong("wrong-type", place, value, "a string")


SCALARS: dict[Any, Read] = {bool: truth, int: integer, float: number, str: text}
WORDS = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    type(None): "None",
}


def _plain(value: Any) -> Any:
    """Convert a single number of NumPy or torch to a Python number."""
    is_single = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    return value.item() if is_single else value


def _choice(hint: Any, choices: tuple[Any, ...], place: Place, value: Any) -> Any:
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    if isinstance(value, str) and all(isinstance(choice, str) for choice in choices):
        raise unknown_name("choice", value, choices, place, dotted(place))
    wrong("wrong-type", place, value, words(hint))


def _union(hint: Any, members: tuple[Any, ...], place: Place, value: Any) -> Any:
    if value is None and type(None) in members:
        return None
    errors = []
    for member in sorted(members, key=lambda member: type(value) is not member):
        read = reader(member)
        if member is type(None):
            continue
        if read is None:
            return value
        try:
            return read(place, value)
        except ConfigError as error:
            errors.append(error)
    # an error that is more precise than "of another type" belongs to the intended member
    precise = [error for error in errors if error.code != "wrong-type" or error.place != place]
    if precise or len(errors) == 1:
        raise [*precise, *errors][0]
    wrong("wrong-type", place, value, words(hint))


def _sequence(hint: Any, members: tuple[Any, ...], place: Place, value: Any) -> Any:
    value = value.tolist() if getattr(value, "ndim", None) == 1 else value
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        wrong("wrong-type", place, value, words(hint))
    kind = typing.get_origin(hint)
    if members[-1] is Ellipsis or kind is not tuple:
        members = (members[0],) * len(value)
    if len(value) != len(members):
        wrong("wrong-length", place, value, words(hint))
    pairs = enumerate(zip(members, value, strict=True))
    items = [_item(member, (*place, index), item) for index, (member, item) in pairs]
    return items if kind is list else tuple(items)


def _mapping(hint: Any, member: Any, place: Place, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        wrong("wrong-type", place, value, words(hint))
    return {key: _item(member, (*place, str(key)), item) for key, item in value.items()}


def _item(hint: Any, place: Place, value: Any) -> Any:
    read = reader(hint)
    return value if read is None else read(place, value)


def _function(hint: Any, place: Place, value: Any) -> Any:
    return value if callable(value) else wrong("wrong-type", place, value, "a function")


def _object(cls: type, place: Place, value: Any) -> Any:
    return value if isinstance(value, cls) else wrong("wrong-type", place, value, words(cls))


def _part(kind: Any, place: Place, value: Any) -> Any:
    is_function = callable(value) and not isinstance(value, type) and not hasattr(value, "solve")
    if kind is protocols.LinearSolver and is_function:
        return as_solver(value)
    names = methods_of(kind)
    check_part(dotted(place), value, PARTS[kind], names)
    # a method has the methods of an outer optimiser, but is no outer optimiser
    for other, label in PARTS.items():
        more = methods_of(other)
        if set(more) > set(names) and all(hasattr(value, name) for name in more):
            message = f"{dotted(place)} must be {PARTS[kind]}, but is {label}"
            raise ConfigError("wrong-part", message, place=place)
    return value
