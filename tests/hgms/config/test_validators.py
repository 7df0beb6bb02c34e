"""Validators of fields: the code and the place of what they reject, and values that they accept."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from attrs import field
from support.helpers import rejects

from hgms.config import validation_shares
from hgms_core import ConfigError, component
from hgms_core.validators import (
    all_of,
    at_least,
    at_most,
    decay_rate,
    each,
    greater_than,
    less_than,
    not_empty,
    optional,
)


def checked(validator: Any, value: Any) -> None:
    """Validate the value of a field with an alias."""

    @attrs.frozen
    class Part:
        _rate: Any = field(validator=validator, alias="rate")

    Part(rate=value)


ROWS: list[tuple[Any, Any, Any, str, tuple[str | int, ...]]] = [
    (at_least(1), 1, 0, "out-of-range", ("rate",)),
    (at_most(1), 1, 1.5, "out-of-range", ("rate",)),
    (greater_than(0), 0.1, 0, "out-of-range", ("rate",)),
    (less_than(1), 0.9, 1, "out-of-range", ("rate",)),
    (not_empty, [1], [], "wrong-length", ("rate",)),
    (optional(at_least(1)), None, 0, "out-of-range", ("rate",)),
    (optional([at_least(1), at_most(2)]), 2, 3, "out-of-range", ("rate",)),
    (all_of(at_least(0), less_than(1)), 0, 1, "out-of-range", ("rate",)),
    (each(at_least(0)), [0, 1], [0, -1], "out-of-range", ("rate", 1)),
    (each(each(at_least(0))), [[0], [1]], [[0], [1, -1]], "out-of-range", ("rate", 1, 1)),
    *(
        (validator, 0.5, value, "out-of-range", ("rate",))
        for validator in (at_least(0), greater_than(0), at_most(1), less_than(1))
        for value in (float("inf"), -float("inf"))
    ),
    (each(decay_rate), (0.9, 0.99), (0.9, 1.0), "out-of-range", ("rate", 1)),
    (validation_shares, (0.6, 0.2, 0.2), (0.6, 0.2, 0.1), "wrong-value", ("rate",)),
]


@pytest.mark.parametrize(("validator", "accepted", "rejected", "code", "place"), ROWS)
def test_a_validator_accepts_one_value_and_rejects_the_other(
    validator: Any, accepted: Any, rejected: Any, code: str, place: tuple[str | int, ...]
) -> None:
    checked(validator, accepted)
    with rejects(code, *place, of=ConfigError):
        checked(validator, rejected)


def test_a_setting_is_finite_without_a_validator_too() -> None:
    @component
    class Settings:
        rate: float = 1.0
        clip: float | None = None
        shares: tuple[float, ...] = ()

    for values, place in (
        ({"rate": float("inf")}, ("rate",)),
        ({"clip": -float("inf")}, ("clip",)),
        ({"shares": (1.0, float("inf"))}, ("shares", 1)),
    ):
        with rejects("out-of-range", *place):
            Settings(**values)
