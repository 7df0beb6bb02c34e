"""``component``: frozen classes whose arguments are checked.

The fields of a component are its hyperparameters. Data and state go through its methods, so two
components with equal fields are interchangeable, in a file, in a test and in a hash.
"""

from __future__ import annotations

import re
import sys
import typing
from typing import Any, TypeVar, dataclass_transform

import attrs

from hgms_core.annotations import Read, reader_in
from hgms_core.arguments import reports_errors
from hgms_core.errors import ConfigError, Place

T = TypeVar("T")

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(attrs.field,))
def component(cls: type[T]) -> type[T]:
    """Make a class a component: a frozen attrs class with keyword arguments that are checked.

    ``name`` is the name in configurations, in kebab case. Each annotated field is an argument.
    Its value is checked by the annotation: numbers, strings, booleans, ``Literal``, ``None``,
    tuples and mappings of these, classes, functions, and kinds of component. Numbers of NumPy and
    tensors with one number are accepted as numbers, and lists as tuples. Then the validator of
    the field runs (:mod:`hgms_core.validators`). A field with a custom converter is not checked by
    its annotation.

    Raises
    ------
    ConfigError
        ``bad-name`` at import. ``unknown-option``, ``missing-option`` and ``positional-argument``
        for wrong arguments; ``wrong-type``, ``wrong-part``, ``unknown-choice``, ``wrong-length``,
        ``not-finite`` and the codes of the validators for wrong values, with the place
        ``(argument,)``. Type checkers report the first five at the call.

    Notes
    -----
    Cost: microseconds.

    Examples
    --------
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
    return reports_errors(typing.cast(type[T], built))


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
