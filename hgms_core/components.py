"""``component``: frozen classes whose arguments are checked.

The fields of a component are its hyperparameters. Data and state go through its methods, so two
components with equal fields are interchangeable, in a file, in a test and in a hash.
"""

from __future__ import annotations

import functools
import re
import sys
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, dataclass_transform

import attrs

from hgms_core.annotations import Read, reader_in
from hgms_core.arguments import wrong_names
from hgms_core.errors import ConfigError, HgmsError, Place, raise_all

T = TypeVar("T")

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


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
    module = sys.modules.get(cls.__module__)  # None for code that is executed from a text
    names = {**({} if module is None else vars(module)), cls.__name__: cls}
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
    read = reader_in(names, field.type)
    place = (field.alias or field.name.lstrip("_"),)
    return field if read is None else field.evolve(converter=Checked(read, place, field.default))


@attrs.frozen(eq=False)
class Checked:
    """The converter of a field: checks a value by the annotation; the default is not checked."""

    read: Read
    place: Place
    default: Any

    def __call__(self, value: Any) -> Any:
        return value if value is self.default else self.read(self.place, value)
