"""Validators of components' fields, for ``attrs.field(validator=…)``: which numbers and words a hyper-parameter may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import validators

from hgms_core.errors import closest

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


def finite_positive(instance: object, attribute: Any, value: float) -> None:
    """A number > 0 that is not infinite."""
    if not 0 < value < float("inf"):
        raise ValueError(f"{attribute.name!r} must be > 0 and finite: {value!r}")


def strictly_whole(instance: object, attribute: Any, value: Any) -> None:
    """A whole number > 0, and no True."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{attribute.name!r} must be a whole number > 0: {value!r}")


def choice(*words: str) -> Callable[[object, Any, object], None]:
    """One of some words.

    >>> from attrs import field, frozen
    >>> @frozen
    ... class Step:
    ...     rule: str = field(default="sgd", validator=choice("sgd", "adamw"))
    >>> Step("adam")
    Traceback (most recent call last):
        ...
    ValueError: 'rule' must be in ['sgd', 'adamw']: 'adam'; did you mean 'adamw'?

    .. versionadded:: 0.3
    """

    def check(instance: object, attribute: Any, value: object) -> None:
        if value not in words:
            near = closest(str(value), words)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ValueError(f"{attribute.name!r} must be in {list(words)}: {value!r}{hint}")

    return check


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
