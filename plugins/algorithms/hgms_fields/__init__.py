"""Validators of components' fields, for ``attrs.field(validator=…)``, and the method ``lighter`` made of their names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from attrs import validators

from hgms_core import ROLES

positive: Any = validators.gt(0)
"""A number > 0."""
not_negative: Any = validators.ge(0)
"""A number ≥ 0."""
share: Any = [validators.ge(0), validators.le(1)]
"""A number in [0, 1]."""
decay_rate: Any = [validators.ge(0), validators.lt(1)]
"""A number in [0, 1): what is kept of a running mean."""
whole: Any = [validators.instance_of(int), validators.gt(0)]
"""A whole number > 0."""
optional_positive: Any = validators.optional(positive)
"""A number > 0, or None."""
optional_whole: Any = validators.optional(whole)
"""A whole number > 0, or None."""


def decay_rates(instance: object, attribute: Any, value: tuple[float, float]) -> None:
    """Two numbers in [0, 1): Adam's β₁ and β₂."""
    if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
        raise ValueError(f"{attribute.name!r} must be two numbers in [0, 1): {value}")


def validation_shares(instance: object, attribute: Any, value: tuple[float, ...]) -> None:
    """Which share of the validation rows each role sees (:func:`hgms_core.roles`).

    .. versionadded:: 0.2
    """
    disjoint = len(value) == 3 and min(value) > 0 and math.isclose(sum(value), 1)
    if not disjoint and value != (1, 1, 1):
        raise ValueError(
            f"{attribute.name!r} must be three positive shares ({', '.join(ROLES)}) that sum to 1, "
            f"or (1, 1, 1) to share all rows: {value}"
        )


def lowering(*, same: Sequence[str] = (), other: Sequence[str] = ()) -> Callable[[Any], list[str]]:
    """The method ``lighter`` of a component whose fields bound its memory: which to lower, first those that change no result
    (``same``), then the others. A field that is 1 cannot be lowered; one that is None takes everything at once.

    >>> from attrs import frozen
    >>> @frozen
    ... class Shuffle:
    ...     batch_size: int | None = None
    ...     chunk: int = 8
    ...     lighter = lowering(same=["chunk"], other=["batch_size"])
    >>> Shuffle().lighter()
    ['lower chunk (now 8; the same result)', 'lower batch_size (now all)']

    .. versionadded:: 0.3
    """

    def lighter(self: Any) -> list[str]:
        fields = [(name, "; the same result") for name in same] + [(name, "") for name in other]
        values = [(name, getattr(self, name), note) for name, note in fields]
        return [f"lower {name} (now {'all' if value is None else value}{note})" for name, value, note in values if value != 1]

    return lighter
