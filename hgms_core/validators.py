"""Validators for ``attrs.field(validator=…)``: ranges and lengths.

Each error has a code, and the field as its place. :func:`hgms_core.component` checks a value by its
annotation before the validator runs. For one of several words, annotate a ``Literal``.

Examples
--------
>>> from attrs import field
>>> from hgms_core import component
>>> @component
... class Momentum:
...     name = "momentum"
...     lr: float = field(default=0.1, validator=positive)
>>> Momentum(lr=-1.0)
Traceback (most recent call last):
    ...
hgms_core.errors.ConfigError: lr=-1.0 must be greater than 0 (lr)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
from attrs import frozen

from hgms_core.errors import ConfigError

__all__ = [
    "Validator",
    "all_of",
    "at_least",
    "at_most",
    "decay_rate",
    "each",
    "greater_than",
    "less_than",
    "not_empty",
    "not_negative",
    "optional",
    "optional_positive",
    "positive",
    "reject",
    "share",
]

Validator = Callable[[Any, Any, Any], None]
"""A validator of attrs: ``(instance, attribute, value)``; it raises ConfigError."""


def not_empty(instance: object, attribute: Any, value: Any) -> None:
    """Require at least one element."""
    if len(value) < 1:
        reject("wrong-length", attribute, value, "not empty")


all_of: Callable[..., Validator] = attrs.validators.and_
"""Require that all of the given validators pass."""
optional: Callable[..., Validator] = attrs.validators.optional
"""Require ``None``, or a value that passes the given validator, or all of a list."""


def each(validator: Validator) -> Validator:
    """Require that each element passes.

    The place of an error ends with the position of the element.
    """
    return _Each(validator)


def reject(code: str, attribute: Any, value: Any, requirement: str) -> None:
    """Raise ConfigError for the value of a field."""
    name = attribute.alias or attribute.name
    raise ConfigError(code, f"{name}={value!r} must be {requirement}", place=(name,))


# Classes, because `hgms describe` prints ranges from their fields.

_HOLDS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}


@frozen
class _Bound:
    compare_op: str
    bound: float
    requirement: str

    def __call__(self, instance: object, attribute: Any, value: Any) -> None:
        if not _HOLDS[self.compare_op](value, self.bound):
            reject("out-of-range", attribute, value, f"{self.requirement} {self.bound}")
        if isinstance(value, float) and math.isinf(value):
            reject("out-of-range", attribute, value, "finite")


at_least: Callable[[float], Validator] = partial(_Bound, ">=", requirement="at least")
"""Require a finite number of at least a bound."""
at_most: Callable[[float], Validator] = partial(_Bound, "<=", requirement="at most")
"""Require a finite number of at most a bound."""
greater_than: Callable[[float], Validator] = partial(_Bound, ">", requirement="greater than")
"""Require a finite number greater than a bound."""
less_than: Callable[[float], Validator] = partial(_Bound, "<", requirement="less than")
"""Require a finite number less than a bound."""


@frozen
class _Each:
    member_validator: Validator

    def __call__(self, instance: object, attribute: Any, value: Any) -> None:
        for position, element in enumerate(value):
            try:
                self.member_validator(instance, attribute, element)
            except ConfigError as error:
                name, *inner = error.place
                parts = {**error.as_dict(), "place": (name, position, *inner)}
                raise ConfigError(**parts) from None


positive = greater_than(0)
"""A number > 0."""
not_negative = at_least(0)
"""A number ≥ 0."""
share = all_of(at_least(0), at_most(1))
"""A number in [0, 1]."""
decay_rate = all_of(at_least(0), less_than(1))
"""A number in [0, 1): the decay rate of a running mean."""
optional_positive = optional(positive)
"""A number > 0, or None."""
