"""The search space of a pilot sweep: lists of values, and ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from hgms_core import ConfigError
from hgms_core.errors import unknown_name


@frozen
class Choices:
    """A dimension with a list of values."""

    values: tuple[Any, ...]

    def at(self, share: float) -> Any:
        """Return the value at a share in [0, 1) of the list."""
        return self.values[int(share * len(self.values))]

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values that must be valid for the whole dimension to be valid."""
        return self.values


@frozen
class Range:
    """A number between ``low`` and ``high``, drawn uniformly or log-uniformly; an integer if both
    ends are integers.

    >>> Range(0.01, 1.0, log=True).at(0.5), Range(1, 8).at(0.999)
    (0.1, 8)
    """

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def at(self, share: float) -> float:
        top = self.high + 1 if self.whole else self.high
        value = (
            self.low * (top / self.low) ** share
            if self.log
            else self.low + share * (top - self.low)
        )
        # round to 12 digits, so that a platform's pow() does not change the result
        return min(int(value), int(self.high)) if self.whole else float(f"{value:.12g}")

    @property
    def ends(self) -> tuple[float, ...]:
        return self.low, self.high

    @property
    def values(self) -> Sequence[int] | None:
        """All values of a range of integers."""
        return range(int(self.low), int(self.high) + 1) if self.whole else None


Dimension = Choices | Range
Space = Mapping[str, Dimension]


def parse(table: Mapping[str, Any]) -> dict[str, Dimension]:
    """Parse the dimensions of a table with dotted or nested keys.

    Errors: ConfigError for the first wrong dimension; the place begins with its key.

    >>> parse({"outer.lr": [0.1, 1.0], "generator": {"steps": {"low": 5, "high": 50}}})
    {'outer.lr': Choices(values=(0.1, 1.0)), 'generator.steps': Range(low=5, high=50, log=False)}
    """
    space: dict[str, Dimension] = {}
    for key, value in table.items():
        if isinstance(value, Sequence) and not isinstance(value, str):
            if not value:
                raise ConfigError("missing-option", f"{key}=[] has no values", place=_path(key))
            if any(one in value[:number] for number, one in enumerate(value)):
                message = f"{key}={list(value)} must not contain a value twice"
                raise ConfigError("wrong-value", message, place=_path(key))
            space[key] = Choices(tuple(value))
        elif isinstance(value, Mapping) and not {"low", "high", "log"} & value.keys():
            try:
                below = parse(value)
            except ConfigError as error:
                raise error.at(*_path(key)) from None
            space |= {f"{key}.{inner}": dimension for inner, dimension in below.items()}
        elif isinstance(value, Mapping):
            space[key] = _range(key, value)
        else:
            raise ConfigError(
                "wrong-type",
                f"{key}={value!r} must be a list of values or a range",
                place=_path(key),
                hint="write a range as { low = 0.01, high = 1.0, log = true }",
            )
    return space


def _range(key: str, table: Mapping[str, Any]) -> Range:
    known = ("low", "high", "log")
    path = _path(key)
    for word in table:
        if word not in known:
            raise unknown_name("option", word, known, (*path, word))
    low = table.get("low")
    high = table.get("high")
    log = table.get("log", False)
    for name, end in (("low", low), ("high", high)):
        if end is None:
            message = "a range requires two numbers, low and high"
            raise ConfigError("missing-option", message, place=(*path, name))
        if isinstance(end, bool) or not isinstance(end, (int, float)) or not math.isfinite(end):
            message = f"{name}={end!r} must be a finite number"
            raise ConfigError("wrong-type", message, place=(*path, name))
    assert low is not None
    assert high is not None
    if not isinstance(log, bool):
        message = f"log={log!r} must be true or false"
        raise ConfigError("wrong-type", message, place=(*path, "log"))
    if not low < high:
        message = f"low={low} must be less than high={high}"
        raise ConfigError("out-of-range", message, place=(*path, "low"))
    if log and low <= 0:
        message = f"low={low} must be greater than 0 in a logarithmic range"
        raise ConfigError("out-of-range", message, place=(*path, "low"))
    return Range(low, high, log)


def _path(key: str) -> tuple[str, ...]:
    """Return the path to the field with a dotted key."""
    return tuple(key.split("."))


def points(space: Space) -> int | None:
    """Return the number of points of the space, or ``None`` if a dimension is a range of floats."""
    sizes = [
        0 if dimension.values is None else len(dimension.values) for dimension in space.values()
    ]
    return None if 0 in sizes else math.prod(sizes)
