"""The search space of a pilot sweep: lists of values, and ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from hgms.arguments import errors_at, require
from hgms_core import ConfigError
from hgms_core.arguments import reports_errors
from hgms_core.components import read_by_annotation


@frozen
class Choices:
    """A dimension with a list of values."""

    values: tuple[Any, ...]

    def __attrs_post_init__(self) -> None:
        require(self.values, "missing-option", "the list has no values")
        require(
            not any(one in self.values[:number] for number, one in enumerate(self.values)),
            "wrong-value",
            f"{[*self.values]} must not contain a value twice",
        )

    def at(self, share: float) -> Any:
        """Return the value at a share in [0, 1) of the list."""
        return self.values[int(share * len(self.values))]

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values that must be valid for the whole dimension to be valid."""
        return self.values


@reports_errors
@frozen(field_transformer=read_by_annotation)
class Range:
    """A number between ``low`` and ``high``, drawn uniformly or log-uniformly; an integer if both
    ends are integers.

    Examples
    --------
    >>> Range(0.01, 1.0, log=True).at(0.5), Range(1, 8).at(0.999)
    (0.1, 8)
    """

    low: int | float
    high: int | float
    log: bool = False

    def __attrs_post_init__(self) -> None:
        require(
            self.low < self.high,
            "out-of-range",
            f"low={self.low} must be less than high={self.high}",
            place=("low",),
        )
        if self.log and self.low <= 0:
            raise ConfigError(
                "out-of-range",
                f"low={self.low} must be greater than 0 in a logarithmic range",
                place=("low",),
            )

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

    Raises
    ------
    ConfigError
        For the first wrong dimension; the place begins with its key.

    Examples
    --------
    >>> parse({"outer.lr": [0.1, 1.0], "generator": {"steps": {"low": 5, "high": 50}}})
    {'outer.lr': Choices(values=(0.1, 1.0)), 'generator.steps': Range(low=5, high=50, log=False)}
    """
    space: dict[str, Dimension] = {}
    for key, value in table.items():
        with errors_at(*key.split(".")):
            if isinstance(value, Sequence) and not isinstance(value, str):
                space[key] = Choices(tuple(value))
            elif isinstance(value, Mapping) and not {"low", "high", "log"} & value.keys():
                space |= {f"{key}.{inner}": part for inner, part in parse(value).items()}
            elif isinstance(value, Mapping):
                space[key] = Range(**value)
            else:
                raise ConfigError(
                    "wrong-type",
                    f"{key}={value!r} must be a list of values or a range",
                    hint="write a range as { low = 0.01, high = 1.0, log = true }",
                )
    return space


def points(space: Space) -> int | None:
    """Return the number of points of the space, or ``None`` if a dimension is a range of floats."""
    sizes = [
        0 if dimension.values is None else len(dimension.values) for dimension in space.values()
    ]
    return None if 0 in sizes else math.prod(sizes)
