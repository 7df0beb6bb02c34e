"""Validators for ``attrs.field(validator=…)``.

Each error has a code, and the field as its place.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen

from hgms_core import ConfigError

Validator = Callable[[Any, Any, Any], None]


def at_least(bound: float) -> Validator:
    """Require a finite number of at least ``bound``."""
    return _Bound(">=", bound, "at least")


def at_most(bound: float) -> Validator:
    """Require a finite number of at most ``bound``."""
    return _Bound("<=", bound, "at most")


def greater_than(bound: float) -> Validator:
    """Require a finite number greater than ``bound``."""
    return _Bound(">", bound, "greater than")


def less_than(bound: float) -> Validator:
    """Require a finite number less than ``bound``."""
    return _Bound("<", bound, "less than")


def whole_number(instance: object, attribute: Any, value: Any) -> None:
    """Require an int."""
    if isinstance(value, bool) or not isinstance(value, int):
        reject("wrong-type", attribute, value, "a whole number")


def not_empty(instance: object, attribute: Any, value: Any) -> None:
    """Require at least one element."""
    if len(value) < 1:
        reject("wrong-length", attribute, value, "not empty")


def optional(validator: Validator | Sequence[Validator]) -> Validator:
    """Require ``None``, or a value that passes."""
    return _Optional(validator if callable(validator) else all_of(*validator))


def all_of(*validators: Validator) -> Validator:
    """Require that all validators pass."""
    return _All(validators)


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


@frozen
class _Optional:
    validator: Validator

    def __call__(self, instance: object, attribute: Any, value: Any) -> None:
        if value is not None:
            self.validator(instance, attribute, value)


@frozen
class _All:
    validators: Sequence[Validator]

    def __call__(self, instance: object, attribute: Any, value: Any) -> None:
        for validator in self.validators:
            validator(instance, attribute, value)


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
